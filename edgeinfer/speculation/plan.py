"""Which drafters can be used beside a target, and the bytes that they take. Loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeinfer.arguments import check_file_name
from edgeinfer.backends.head_weights import kept_bytes, read_head_beside
from edgeinfer.backends.native import NativeBackend, plan_head
from edgeinfer.errors import BackendUnavailable, BudgetExceeded, EdgeInferError, UnsupportedModel
from edgeinfer.memory.plan import human_bytes
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.draft_head import HeadSpec, fingerprint, is_draft_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.cost import DEFAULT_DRAFT_MAX
from edgeinfer.speculation.draft_names import drafters_named
from edgeinfer.speculation.drafters.cross_vocabulary import check_vocabulary
from edgeinfer.speculation.drafters.head import HeadDrafter
from edgeinfer.speculation.drafters.lookup import NgramLookup
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.drafters.recycling import RecyclingDrafter
from edgeinfer.speculation.drafters.suffix import SuffixDrafter
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.placement import DraftDevice, devices_named
from edgeinfer.types import MemoryPlan

_HEAD_BATCH = 128  # rows: a larger batch makes the prefill of a head no faster


@dataclass
class DraftPlan:
    """The drafters that fit, before anything is loaded.

    free: names of those without a model.  n_vocab: tokens that the target has.  parts: bytes of all drafters, by part:
    "weights", "caches", "rows", "features", "tables".  dropped: those that cannot be used, with the reason.  file,
    spec: of the draft model or the head, None without one.  plan: of it on the CPU, None where it does not fit there.
    places: other devices for it, with a plan for each.  is_auto: they are used only where they are faster than the CPU.
    draft_max: most draft tokens that a pass verifies.
    """

    free: tuple[str, ...]
    n_vocab: int
    parts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    file: ModelFile | None = None
    spec: ModelSpec | HeadSpec | None = None
    plan: MemoryPlan | None = None
    places: list[tuple[DraftDevice, MemoryPlan]] = field(default_factory=list)
    is_auto: bool = True
    draft_max: int = DEFAULT_DRAFT_MAX

    @property
    def n_bytes(self) -> int:
        """Bytes of all drafters."""
        return sum(self.parts.values())

    def add(self, parts: Mapping[str, int]) -> None:
        """Count bytes of another drafter, by part."""
        for part, n_bytes in parts.items():
            self.parts[part] = self.parts.get(part, 0) + n_bytes

    def close(self) -> None:
        """Close the file of the draft model or the head."""
        if self.file is not None:
            self.file.close()


def plan_drafters(
    draft: str | Sequence[str],
    target: ModelFile,
    n_vocab: int,
    plan: MemoryPlan,
    n_threads: int,
    budget_bytes: int,
    draft_device: str = "auto",
) -> DraftPlan:
    """The drafters that can be used beside a target with that plan. Opens the file of the draft model or the head.

    "auto" includes the head that this package ships for the target, if there is one. draft_device: where a draft model
    is to run; see edgeinfer.speculation.placement.
    """
    free, name = drafters_named(draft)
    if draft == "auto":
        path = head_beside(target, heads_folder())
    else:
        path = None if name is None else check_file_name("draft", name)
    planned = DraftPlan((), n_vocab, is_auto=draft_device == "auto")
    left = budget_bytes - plan.use.total
    if plan.expert_cache is not None and (free or path is not None):
        # It comes with drafters and an expert cache.
        planned.add({"tables": min(max(left, 0), ExpertForecast.memory())})
    _plan_free(planned, free, plan.n_ctx, left)
    if path is None and draft_device not in ("auto", "cpu"):
        planned.dropped[draft_device] = "there is no draft model (-md) to run there"
    if path is None:
        return planned
    try:
        file = ModelFile.open(path)
    except (EdgeInferError, OSError) as error:
        planned.dropped["model"] = str(error)
        return planned
    try:
        _plan_file(planned, file, target, plan, n_threads, left - planned.n_bytes, draft_device)
    except BaseException as error:
        file.close()
        if not isinstance(error, (EdgeInferError, OSError)):
            raise
        planned.dropped[drafter_name(file)] = str(error)
    return planned


def heads_folder() -> Path:
    """The folder of the heads that this package ships: <fingerprint of the target>.gguf."""
    return Path(__file__).parents[1] / "heads"


def head_beside(target: ModelFile, folder: Path) -> Path | None:
    """The head for a model in a folder of heads, None if there is none."""
    if not any(folder.glob("*.gguf")):
        return None
    path = folder / f"{fingerprint(target)}.gguf"
    return path if path.exists() else None


def drafter_name(file: ModelFile) -> str:
    """Name of the drafter that uses a file."""
    return HeadDrafter.name if is_draft_head(file) else ModelDrafter.name


def _plan_free(planned: DraftPlan, names: Sequence[str], n_ctx: int, left: int) -> None:
    """Add the drafters without a model that fit into the bytes that are left."""
    sizes = {"suffix": SuffixDrafter.memory(n_ctx), "recycling": RecyclingDrafter.memory()}
    for name in names:
        if sizes[name] <= left - planned.n_bytes:
            planned.free += (name,)
            planned.add({"tables": sizes[name]})
        else:
            planned.dropped[name] = f"needs {human_bytes(sizes[name])}, {human_bytes(left - planned.n_bytes)} are left"


def _plan_file(
    planned: DraftPlan,
    file: ModelFile,
    target: ModelFile,
    plan: MemoryPlan,
    n_threads: int,
    left: int,
    draft_device: str,
) -> None:
    """Add a draft model or a head to the plan. Raises EdgeInferError where it cannot be used."""
    plan_it = _plan_head if is_draft_head(file) else _plan_model
    spec, own, extra = plan_it(planned, file, target, plan, n_threads, left, draft_device)
    parts = _parts_of(own, extra)
    n_bytes = sum(parts.values())
    if n_bytes > left and not planned.places:
        raise BudgetExceeded(
            f"{file.path} needs {human_bytes(n_bytes)}, beside the model {human_bytes(left)} are left: use a smaller "
            "one, or a smaller context (-c)"
        )
    planned.file, planned.spec, planned.plan = file, spec, own if n_bytes <= left else None
    choices = [_parts_of(there, extra) for place, there in planned.places if place.shares_memory]
    if n_bytes <= left:
        choices.append(parts)
    planned.add(max(choices, key=lambda each: sum(each.values()), default={}))


def _parts_of(plan: MemoryPlan, extra: Mapping[str, int]) -> dict[str, int]:
    """Bytes of a draft model or a head by part. extra: of its drafter."""
    use = plan.use
    parts = {"weights": use.weights + use.experts, "caches": use.kv_cache, "rows": use.activations}
    return {part: parts.get(part, 0) + extra.get(part, 0) for part in {**parts, **extra}}


def _plan_model(
    planned: DraftPlan,
    file: ModelFile,
    target: ModelFile,
    plan: MemoryPlan,
    n_threads: int,
    left: int,
    draft_device: str,
) -> tuple[ModelSpec, MemoryPlan, dict[str, int]]:
    """(spec, plan on the CPU, bytes of the drafter) of a draft model; adds the other devices on which it fits."""
    spec = read_spec(file)
    check_vocabulary(file, target, planned.n_vocab)
    own = NativeBackend(for_drafts=True).plan(file, spec, plan.n_ctx, plan.n_batch, n_threads)
    _plan_places(planned, file, spec, plan, left, draft_device)
    return spec, own, {"tables": NgramLookup.memory()}


def _plan_head(
    planned: DraftPlan,
    file: ModelFile,
    target: ModelFile,
    plan: MemoryPlan,
    n_threads: int,
    left: int,
    draft_device: str,
) -> tuple[HeadSpec, MemoryPlan, dict[str, int]]:
    """(spec, plan on the CPU, bytes of the drafter) of a head; adds the other devices on which it fits."""
    head = read_head_beside(file, target, read_spec(target))
    own = plan_head(file, head, plan.n_ctx, min(plan.n_batch, _HEAD_BATCH), n_threads)
    n_rows = 0 if head.features is None else head.features.n_rows
    extra = HeadDrafter.memory(plan.n_ctx, plan.n_batch, head.decoder.n_embd, planned.n_vocab, n_rows)
    extra["rows"] += kept_bytes(head)
    if draft_device != "auto":  # a head is so small that the CPU is done before another device has answered
        _plan_places(planned, file, head, plan, left - sum(extra.values()), draft_device, target=target)
    return head, own, extra


def _plan_places(
    planned: DraftPlan,
    file: ModelFile,
    spec: ModelSpec | HeadSpec,
    plan: MemoryPlan,
    left: int,
    draft_device: str,
    target: ModelFile | None = None,
) -> None:
    """Add the devices beside the CPU on which a draft model or a head fits to the plan, and the reasons for the others.

    target: of a head.
    """
    try:
        found = devices_named(draft_device)
    except BackendUnavailable as error:
        planned.dropped[draft_device] = str(error)
        return
    for place in found:
        try:
            place = place if target is None else _for_heads(place, target)
            own = place.backend.plan(file, spec, plan.n_ctx, plan.n_batch)
            if place.shares_memory and own.use.total > left:
                raise BudgetExceeded(f"{human_bytes(own.use.total)} are needed, {human_bytes(left)} are left")
        except EdgeInferError as error:
            planned.dropped[place.name] = str(error)
        else:
            planned.places.append((place, own))


def _for_heads(place: DraftDevice, target: ModelFile) -> DraftDevice:
    """The device with its backend for heads of a target. Raises UnsupportedModel."""
    if place.head_backend is None:
        raise UnsupportedModel(f"draft heads do not run on {place.title}")
    return replace(place, backend=place.head_backend(target, read_spec(target)))
