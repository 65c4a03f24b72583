"""From names to a Speculator: which drafters can be used here, what they take, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer import devices
from edgeinfer.backends.base import Session
from edgeinfer.backends.native import NativeBackend, NativeSession, best_isa, build_id
from edgeinfer.drafters.base import Drafter
from edgeinfer.drafters.model import ModelDrafter
from edgeinfer.drafters.recycling import RecyclingDrafter
from edgeinfer.drafters.suffix import SuffixDrafter
from edgeinfer.errors import BudgetExceeded, EdgeInferError, UnsupportedModel
from edgeinfer.gguf import ModelFile
from edgeinfer.memory.plan import human_bytes
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.speculation.cost import (
    MAX_TOKENS,
    CostModel,
    cost_key,
    default_folder,
    load_curve,
    measure_costs,
    save_curve,
)
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.types import Device, MemoryPlan

FREE_DRAFTERS = ("suffix", "recycling")
# At most, for both curves together; a draft model's passes take less time.
_CALIBRATION_SECONDS, _DRAFT_CALIBRATION_SECONDS = 2.0, 0.6


@dataclass
class DraftPlan:
    """Drafters that will fit, before anything is loaded.

    free: names of those without a model.  n_vocab: tokens that the target has.  n_bytes: of all of them.  dropped:
    those that cannot be used, and why.  file, spec, plan: of the draft model, None without one.
    """

    free: tuple[str, ...]
    n_vocab: int
    n_bytes: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    file: ModelFile | None = None
    spec: ModelSpec | None = None
    plan: MemoryPlan | None = None

    def open(self, file: ModelFile, session: Session, plan: MemoryPlan, device: Device, draft_max: int) -> Speculator:
        """The drafters behind an empty session of the target with that plan. What fails now is noted in `dropped`."""
        seconds = _CALIBRATION_SECONDS - (0.0 if self.file is None else _DRAFT_CALIBRATION_SECONDS)
        drafters: list[Drafter] = []
        if "suffix" in self.free:
            drafters.append(SuffixDrafter(session.n_ctx))
        if "recycling" in self.free:
            drafters.append(RecyclingDrafter())
        if self.file is not None and self.spec is not None and self.plan is not None:
            try:
                drafters.append(_open_model(self.file, self.spec, self.plan, self.n_vocab, device))
            except (EdgeInferError, OSError) as error:
                self.dropped["model"] = str(error)
        return Speculator(session, drafters, _costs(file, session, plan, device, seconds), self.n_vocab, draft_max)

    def close(self) -> None:
        """Close the file of the draft model."""
        if self.file is not None:
            self.file.close()


def drafters_named(draft: str | Sequence[str]) -> tuple[tuple[str, ...], Path | None]:
    """(names of free drafters, file of a draft model) that `draft` means.

    "auto": all free ones; the name of one: that one; a file: all free ones and a model. A sequence: what it names.
    """
    if draft == "auto":
        return FREE_DRAFTERS, None
    if isinstance(draft, str):
        return ((draft,), None) if draft in FREE_DRAFTERS else (FREE_DRAFTERS, Path(draft).expanduser())
    files = [one for one in draft if one not in FREE_DRAFTERS]
    return tuple(name for name in FREE_DRAFTERS if name in draft), Path(files[-1]).expanduser() if files else None


def plan_drafters(
    draft: str | Sequence[str], target: ModelFile, n_vocab: int, plan: MemoryPlan, n_threads: int, budget_bytes: int
) -> DraftPlan:
    """What of the drafters can be used beside a target with that plan. Opens the file of the draft model."""
    free, path = drafters_named(draft)
    sizes = {"suffix": SuffixDrafter.memory(plan.n_ctx), "recycling": RecyclingDrafter.memory()}
    planned = DraftPlan((), n_vocab)
    left = budget_bytes - plan.use.total
    for name in free:
        if sizes[name] <= left - planned.n_bytes:
            planned.free += (name,)
            planned.n_bytes += sizes[name]
        else:
            planned.dropped[name] = f"needs {human_bytes(sizes[name])}, {human_bytes(left - planned.n_bytes)} are left"
    if path is not None:
        try:
            _plan_model(planned, path, target, n_vocab, plan, n_threads, left)
        except (EdgeInferError, OSError) as error:
            planned.dropped["model"] = str(error)
    return planned


def _plan_model(
    planned: DraftPlan, path: Path, target: ModelFile, n_vocab: int, plan: MemoryPlan, n_threads: int, left: int
) -> None:
    """Add a draft model to the plan. Raises EdgeInferError where it cannot be used."""
    file = ModelFile.open(path)
    try:
        spec = read_spec(file)
        _check_vocabulary(file, target, n_vocab)
        own = NativeBackend(for_drafts=True).plan(file, spec, plan.n_ctx, plan.n_batch, n_threads)
        if own.use.total > left - planned.n_bytes:
            raise BudgetExceeded(
                f"{path} needs {human_bytes(own.use.total)}, beside the model {human_bytes(left - planned.n_bytes)} "
                "are left: use a smaller one, or a smaller context (-c)"
            )
    except BaseException:
        file.close()
        raise
    planned.file, planned.spec, planned.plan = file, spec, own
    planned.n_bytes += own.use.total


def _check_vocabulary(draft: ModelFile, target: ModelFile, n_vocab: int) -> None:
    """Raises UnsupportedModel unless every token of the target is the same in the draft model."""
    own, wanted = (file.metadata.get("tokenizer.ggml.tokens") for file in (draft, target))
    own, wanted = (tokens[:n_vocab] if isinstance(tokens, list) else [] for tokens in (own, wanted))
    if own == wanted:
        return
    different = next(
        (i for i, (a, b) in enumerate(zip(own, wanted, strict=False)) if a != b), min(len(own), len(wanted))
    )
    raise UnsupportedModel(
        f"{draft.path}: a draft model needs the vocabulary of {target.path}; they differ from token {different} on: "
        "use a smaller model of the same family"
    )


def _open_model(file: ModelFile, spec: ModelSpec, plan: MemoryPlan, n_vocab: int, device: Device) -> ModelDrafter:
    """The draft model, all of it in memory: a file that is lost later does no harm."""
    session = NativeSession(file, spec, plan, device, resident=True, for_drafts=True)
    try:
        costs = _costs(file, session, plan, device, _DRAFT_CALIBRATION_SECONDS, "for drafts")
    except BaseException:
        session.close()
        raise
    return ModelDrafter(session, n_vocab, costs)


def _costs(
    file: ModelFile, session: Session, plan: MemoryPlan, device: Device, calibration_seconds: float, *facts: str
) -> CostModel:
    """The costs of a session, from disk or measured now. facts: what else they depend on."""
    isa = device.isa or best_isa()
    is_short = plan.n_ctx < MAX_TOKENS
    key = cost_key(file, devices.cpu_name(), isa, device.n_threads, build_id(), plan.cache_type, is_short, *facts)
    folder = default_folder()
    curve = load_curve(key, folder)
    if curve is None:
        curve = measure_costs(session, calibration_seconds)
        save_curve(key, curve, folder)
    return CostModel(curve)
