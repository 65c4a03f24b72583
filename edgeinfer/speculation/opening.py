"""From names to a Speculator: which drafters can be used here, what they take, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgeinfer import devices
from edgeinfer.backends.base import Session
from edgeinfer.backends.native import NativeBackend, NativeHead, NativeSession, best_isa, build_id, plan_head
from edgeinfer.drafters.base import Drafter
from edgeinfer.drafters.head import HeadDrafter
from edgeinfer.drafters.model import ModelDrafter
from edgeinfer.drafters.recycling import RecyclingDrafter
from edgeinfer.drafters.suffix import SuffixDrafter
from edgeinfer.drafters.translated import check_vocabulary, model_drafter
from edgeinfer.errors import BudgetExceeded, EdgeInferError, UnsupportedModel
from edgeinfer.gguf import ModelFile
from edgeinfer.memory.plan import human_bytes
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.draft_head import DraftHeadSpec, check_target, fingerprint, is_draft_head, read_head
from edgeinfer.speculation.cost import (
    DOUBTFUL,
    MAX_TOKENS,
    CostModel,
    Timed,
    cost_key,
    default_folder,
    load_curve,
    measure_costs,
    save_curve,
)
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.types import Device, LogitsRows, MemoryPlan, Output

FREE_DRAFTERS = ("suffix", "recycling")
# At most, for both curves together; a draft model's passes take less time.
_CALIBRATION_SECONDS, _DRAFT_CALIBRATION_SECONDS = 2.0, 0.6
_HEAD_BATCH = 128  # rows: prompts are read no faster with more


@dataclass
class DraftPlan:
    """Drafters that will fit, before anything is loaded.

    free: names of those without a model.  n_vocab: tokens that the target has.  n_bytes: of all of them.  dropped:
    those that cannot be used, and why.  file, spec, plan: of the draft model or the head, None without one.
    """

    free: tuple[str, ...]
    n_vocab: int
    n_bytes: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    file: ModelFile | None = None
    spec: ModelSpec | DraftHeadSpec | None = None
    plan: MemoryPlan | None = None

    def open(self, file: ModelFile, session: Session, plan: MemoryPlan, device: Device, draft_max: int) -> Speculator:
        """The drafters behind an empty session of the target with that plan. What fails now is noted in `dropped`."""
        seconds = _CALIBRATION_SECONDS - (0.0 if self.file is None else _DRAFT_CALIBRATION_SECONDS)
        drafters: list[Drafter] = []
        if "suffix" in self.free:
            drafters.append(SuffixDrafter(session.n_ctx))
        if "recycling" in self.free:
            drafters.append(RecyclingDrafter())
        if self.file is not None and self.plan is not None:
            try:
                drafters.append(self._open_file(self.file, self.plan, file, session, device))
            except (EdgeInferError, OSError) as error:
                self.dropped[_name_of(self.file)] = str(error)
        return Speculator(session, drafters, _costs(file, session, plan, device, seconds), self.n_vocab, draft_max)

    def close(self) -> None:
        """Close the file of the draft model or the head."""
        if self.file is not None:
            self.file.close()

    def _open_file(
        self, file: ModelFile, plan: MemoryPlan, target: ModelFile, session: Session, device: Device
    ) -> Drafter:
        if isinstance(self.spec, DraftHeadSpec) and isinstance(session, NativeSession):
            return _open_head(file, self.spec, plan, self.n_vocab, session, device)
        if isinstance(self.spec, ModelSpec):
            return _open_model(file, self.spec, plan, self.n_vocab, target, device)
        raise UnsupportedModel(f"{file.path}: heads draft for models of the native backend only")


def drafters_named(draft: str | Sequence[str]) -> tuple[tuple[str, ...], Path | None]:
    """(names of free drafters, file of a draft model or a head) that `draft` means.

    "auto": all free ones; the name of one: that one; a file: all free ones and it. A sequence: what it names.
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
    """What of the drafters can be used beside a target with that plan. Opens the file of the draft model or the head.

    "auto" has the head that this package brings for the target, if there is one.
    """
    free, path = drafters_named(draft)
    if draft == "auto":
        path = head_beside(target, heads_folder())
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
            file = ModelFile.open(path)
        except (EdgeInferError, OSError) as error:
            planned.dropped["model"] = str(error)
            return planned
        try:
            _plan_file(planned, file, target, plan, n_threads, left)
        except BaseException as error:
            file.close()
            if not isinstance(error, (EdgeInferError, OSError)):
                raise
            planned.dropped[_name_of(file)] = str(error)
    return planned


def heads_folder() -> Path:
    """Where the heads lie that this package brings: <fingerprint of the target>.gguf."""
    return Path(__file__).parents[1] / "heads"


def head_beside(target: ModelFile, folder: Path) -> Path | None:
    """The head for a model in a folder of heads, None if there is none."""
    if not any(folder.glob("*.gguf")):
        return None
    path = folder / f"{fingerprint(target)}.gguf"
    return path if path.exists() else None


def _name_of(file: ModelFile) -> str:
    """Name of the drafter that a file is for."""
    return HeadDrafter.name if is_draft_head(file) else ModelDrafter.name


def _plan_file(
    planned: DraftPlan, file: ModelFile, target: ModelFile, plan: MemoryPlan, n_threads: int, left: int
) -> None:
    """Add a draft model or a head to the plan. Raises EdgeInferError where it cannot be used."""
    spec: ModelSpec | DraftHeadSpec
    if is_draft_head(file):
        spec = read_head(file)
        check_target(spec, file.path, target, read_spec(target))
        own = plan_head(file, spec.decoder, plan.n_ctx, min(plan.n_batch, _HEAD_BATCH), n_threads)
        n_rows = 0 if spec.decoder.pair is None else spec.decoder.pair.n_rows
        kept = HeadDrafter.memory(plan.n_ctx, plan.n_batch, spec.decoder.n_embd, planned.n_vocab, n_rows)
    else:
        spec = read_spec(file)
        check_vocabulary(file, target, planned.n_vocab)
        own, kept = NativeBackend(for_drafts=True).plan(file, spec, plan.n_ctx, plan.n_batch, n_threads), 0
    n_bytes = own.use.total + kept
    if n_bytes > left - planned.n_bytes:
        raise BudgetExceeded(
            f"{file.path} needs {human_bytes(n_bytes)}, beside the model {human_bytes(left - planned.n_bytes)} "
            "are left: use a smaller one, or a smaller context (-c)"
        )
    planned.file, planned.spec, planned.plan = file, spec, own
    planned.n_bytes += n_bytes


def _open_model(
    file: ModelFile, spec: ModelSpec, plan: MemoryPlan, n_vocab: int, target: ModelFile, device: Device
) -> ModelDrafter:
    """The draft model, all of it in memory: a file that is lost later does no harm."""
    session = NativeSession(file, spec, plan, device, resident=True, for_drafts=True)
    try:
        costs = _costs(file, session, plan, device, _DRAFT_CALIBRATION_SECONDS, "for drafts")
        return model_drafter(session, file, target, n_vocab, costs)
    except BaseException:
        session.close()
        raise


def _open_head(
    file: ModelFile, spec: DraftHeadSpec, plan: MemoryPlan, n_vocab: int, target: NativeSession, device: Device
) -> HeadDrafter:
    """The head, whose weights are in memory; embeddings are read where the target has them."""
    session = NativeHead(file, spec.decoder, target, plan, device)
    try:
        costs = _costs(file, _WithoutFeatures(session), plan, device, _DRAFT_CALIBRATION_SECONDS)
    except BaseException:
        session.close()
        raise
    return HeadDrafter(session, spec.draft_vocab, n_vocab, costs, spec.taps)


class _WithoutFeatures:
    """A head as measure_costs knows sessions: its tokens come with features of ones."""

    def __init__(self, head: NativeHead) -> None:
        self._head = head
        self.spec = head.spec
        self.n_ctx = head.n_ctx
        self.n_batch = head.n_batch
        self.commit = head.commit
        self.truncate = head.truncate

    @property
    def n_past(self) -> int:
        return self._head.n_past

    def forward(self, tokens: Sequence[int], *, logits: LogitsRows = "last") -> Output:
        return self._head.forward(tokens, np.ones((len(tokens), self.spec.n_embd), np.float32), logits=logits)


def _costs(
    file: ModelFile, session: Timed, plan: MemoryPlan, device: Device, calibration_seconds: float, *facts: str
) -> CostModel:
    """The costs of a session, from disk or measured now. facts: what else they depend on."""
    isa = device.isa or best_isa()
    is_short = plan.n_ctx < MAX_TOKENS
    key = cost_key(file, devices.cpu_name(), isa, device.n_threads, build_id(), plan.cache_type, is_short, *facts)
    folder = default_folder()
    curve = load_curve(key, folder)
    if curve is None:
        curve = measure_costs(session, calibration_seconds)
        if curve.near.get(2, 0.0) <= DOUBTFUL * curve.near[1]:  # else the next load measures again
            save_curve(key, curve, folder)
    return CostModel(curve, lambda followed: save_curve(key, followed, folder))
