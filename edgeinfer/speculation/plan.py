"""Which drafters can be used beside a target, and the bytes that they take. Loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeinfer.backends.head_weights import kept_bytes, read_head_beside, read_nextn_beside
from edgeinfer.backends.native import NativeBackend, most_rows_of_tree, plan_head
from edgeinfer.common.errors import BackendUnavailable, EdgeInferError, InvalidArgument, UnsupportedModel
from edgeinfer.common.settings import DEFAULT_DRAFT_MAX, LoadSettings
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.common.types import MemoryPlan
from edgeinfer.library.names import find_model
from edgeinfer.memory.fit import DraftPlaces
from edgeinfer.models import ModelSpec, read_draft_spec, read_spec
from edgeinfer.models.draft_head import HeadSpec, fingerprint, is_draft_head
from edgeinfer.models.draft_vocab import has_draft_vocab
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.draft_names import OWN_BLOCK, drafters_named
from edgeinfer.speculation.drafters.answer_file import AnswerFile
from edgeinfer.speculation.drafters.answers import LEAST_TOKENS as LEAST_ANSWER_TOKENS
from edgeinfer.speculation.drafters.answers import MOST_TOKENS as MOST_ANSWER_TOKENS
from edgeinfer.speculation.drafters.answers import AnswersDrafter
from edgeinfer.speculation.drafters.base import held_by
from edgeinfer.speculation.drafters.cross_vocabulary import check_vocabulary
from edgeinfer.speculation.drafters.head import HeadDrafter
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.drafters.recycling import LEAST_ROWS, MOST_ROWS, RecyclingDrafter
from edgeinfer.speculation.drafters.suffix import LEAST_TOKENS, SuffixDrafter
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.expert_passes import experts_in
from edgeinfer.speculation.placement import DraftDevice, devices_named

_LOGITS_BYTES = 12 << 20  # of a pass: 12 MiB are 32 rows for 98,000 tokens, 11 for 262,000; longer drafts are rare
_LEAST_DRAFTED = 7
_HEAD_BATCH = 128  # rows: a larger batch makes the prefill of a head no faster


@dataclass
class DraftPlan:
    """The drafters to use and their bytes, before anything is loaded."""

    tables: dict[str, int]  # the model-free drafters, by name, and the size of their tables in tokens or rows
    n_vocab: int  # tokens that the target has
    # bytes of all drafters, by part: "weights", "caches", "rows", "features", "tables"
    parts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # those that cannot be used, with the reason
    # file, spec: of the draft model or the head, None without one
    file: ModelFile | None = None
    spec: ModelSpec | HeadSpec | None = None
    plan: MemoryPlan | None = None  # of it on the CPU, None where it is not to run there
    # other devices for it, with a plan for each
    places: list[tuple[DraftDevice, MemoryPlan]] = field(default_factory=list)
    is_auto: bool = True  # they are used only where they are faster than the CPU
    draft_max: int = DEFAULT_DRAFT_MAX  # most draft tokens that a pass verifies
    answers: AnswerFile | None = None  # that keeps earlier answers, None for none

    @property
    def n_bytes(self) -> int:
        """Bytes of all drafters."""
        return sum(self.parts.values())

    def add(self, parts: Mapping[str, int]) -> None:
        """Count bytes of another drafter, by part."""
        for part, n_bytes in parts.items():
            self.parts[part] = self.parts.get(part, 0) + n_bytes


@dataclass
class DraftChoice:
    """What can draft beside a target, before it is known how much memory there is."""

    model_free: tuple[str, ...]  # names of model-free drafters
    n_vocab: int
    # target, n_threads: of the target
    target: ModelFile
    n_threads: int
    is_auto: bool
    draft_max: int = DEFAULT_DRAFT_MAX
    dropped: dict[str, str] = field(default_factory=dict)
    # file, spec: of the draft model or the head, None without one
    file: ModelFile | None = None
    spec: ModelSpec | HeadSpec | None = None
    # devices beside the CPU that it can run on
    places: list[DraftDevice] = field(default_factory=list)
    answers: AnswerFile | None = None
    n_texts: int = 1  # that run at once

    def close(self) -> None:
        """Close the file of the draft model or the head."""
        if self.file is not None:
            self.file.close()

    @property
    def file_name(self) -> str:
        """The drafter of the file, "" without one."""
        return "" if self.file is None else drafter_name(self.file, self.spec)

    def table_steps(self, n_ctx: int) -> list[int | None]:
        """Values of FitSettings.tables, the largest tables first, down to the least that are of use, and to none."""
        if not self.model_free:
            return [0]
        steps = 0
        while self.table_sizes(n_ctx, steps + 1) != self.table_sizes(n_ctx, steps):
            steps += 1
        return [*range(steps + 1), None]

    def table_sizes(self, n_ctx: int, tables: int | None) -> dict[str, int]:
        """Tokens or rows of the tables by drafter, see FitSettings.tables."""
        if tables is None:
            return {}
        most = {
            SuffixDrafter.name: SuffixDrafter.most_tokens(n_ctx),
            AnswersDrafter.name: MOST_ANSWER_TOKENS,
            RecyclingDrafter.name: MOST_ROWS,
        }
        return {name: max(most[name] >> tables, min(most[name], _LEAST[name])) for name in self.model_free}

    def table_bytes(self, n_ctx: int, tables: int | None) -> int:
        """Bytes of these tables."""
        return _table_bytes(self.table_sizes(n_ctx, tables), n_ctx, self.n_texts)

    def place_steps(self) -> list[DraftPlaces]:
        """Values of FitSettings.places: everywhere, without devices that use main memory, only elsewhere, nowhere."""
        if self.file is None:
            return ["all"]
        steps: list[DraftPlaces] = ["all"]
        if any(place.shares_memory for place in self.places):
            steps.append("cpu")
        if any(not place.shares_memory for place in self.places):
            steps.append("own memory")
        return [*steps, "none"]

    def plan(self, plan: MemoryPlan, tables: int | None = 0, places: DraftPlaces = "all") -> DraftPlan:
        """The drafters beside a target with that plan. Raises EdgeInferError where the file cannot be used with it.

        tables, places: see FitSettings.
        """
        sizes = self.table_sizes(plan.n_ctx, tables)
        planned = DraftPlan(sizes, self.n_vocab, is_auto=self.is_auto, draft_max=self.draft_max, answers=self.answers)
        planned.dropped.update(self.dropped)
        n_bytes = _table_bytes(sizes, plan.n_ctx, plan.n_sequences)
        if self.file is not None and places != "none":
            self._plan_file(planned, self.file, plan, places)
        if plan.expert_cache is not None and (sizes or planned.file is not None):
            # It comes with drafters and an expert cache.
            layers = experts_in(read_spec(self.target))
            n_bytes += ExpertForecast.memory(len(layers) * max(layers.values(), default=0))
        planned.add({"tables": n_bytes} if n_bytes else {})
        return planned

    def _plan_file(self, planned: DraftPlan, file: ModelFile, plan: MemoryPlan, where: DraftPlaces) -> None:
        """Add the draft model or the head."""
        assert self.spec is not None
        if isinstance(self.spec, HeadSpec):
            own, extra = _head_parts(file, self.spec, plan, self.n_threads, self.n_vocab)
        else:
            backend = NativeBackend(for_drafts=True, resident=True)
            own = backend.plan(file, self.spec, _sizes_on_cpu(plan, self.n_threads))
            n_vocab = max(self.n_vocab, self.spec.n_vocab) if has_draft_vocab(file) else 0
            extra = {part: plan.n_sequences * each for part, each in ModelDrafter.memory(n_vocab).items()}
        planned.file, planned.spec = file, self.spec
        planned.plan = None if where == "own memory" else own
        for place in self.places:
            if where == "all" or not place.shares_memory:
                there = place.backend.plan(file, self.spec, _sizes_of(plan))
                planned.places.append((place, there))
        choices = [_parts_of(there, extra) for place, there in planned.places if place.shares_memory]
        if planned.plan is not None:
            choices.append(_parts_of(own, extra))
        planned.add(max(choices, key=lambda each: sum(each.values()), default={}))


_LEAST = {
    SuffixDrafter.name: LEAST_TOKENS,
    AnswersDrafter.name: LEAST_ANSWER_TOKENS,
    RecyclingDrafter.name: LEAST_ROWS,
}
"""Tokens or rows below which a table drafts too little to pay: the lower bound that SpecMemo (Yildirim and Chen,
arXiv:2506.01986) asks of each drafter. A draft model or a head has no smaller size: it is used whole or not at all.
"""


def find_drafters(
    draft: str | Sequence[str],
    target: ModelFile,
    n_vocab: int,
    plan: MemoryPlan,
    n_threads: int,
    draft_device: str = "auto",
    draft_max: int = DEFAULT_DRAFT_MAX,
    draft_memory: Path | None = None,
) -> DraftChoice:
    """What can draft beside a target. Opens the file of the draft model or the head; closed by the caller.

    plan: of the target as it is requested.  draft_device: where a draft model is to run; see
    edgeinfer.speculation.placement.  draft_max: most draft tokens that a pass is to verify.  draft_memory: file that
    keeps earlier answers.
    """
    free, name = drafters_named(draft)
    of_target = read_spec(target)
    most = min(draft_max, draft_max_of(of_target.n_vocab), most_rows_of_tree(of_target) - 1)
    found = DraftChoice(free, n_vocab, target, n_threads, draft_device == "auto", most, n_texts=plan.n_sequences)
    if draft_memory is not None and AnswersDrafter.name in free:
        found.answers = AnswerFile(draft_memory, fingerprint(target, by_tokens=True), n_vocab)
    elif draft_memory is not None:
        found.dropped["answers"] = f"{draft_memory} is for them, and `draft` leaves them out"
    if name in (None, OWN_BLOCK):
        if draft_device not in ("auto", "cpu"):
            found.dropped[draft_device] = "there is no draft model (-md) to run there"
        if name is not None or draft == "auto":
            _add_own_block(found, plan, is_named=name is not None)
        return found
    try:
        file = ModelFile.open(find_model(name, "draft"))
    except InvalidArgument:
        raise
    except (EdgeInferError, OSError) as error:
        if is_from_handler(error):
            raise
        found.dropped["model"] = str(error)
        return found
    try:
        _add_file(found, file, plan, draft_device)
    except BaseException as error:
        file.close()
        if not isinstance(error, (EdgeInferError, OSError)) or is_from_handler(error):
            raise
        found.dropped[drafter_name(file)] = str(error)
        found.file, found.places = None, []
    return found


def draft_max_of(n_vocab: int) -> int:
    """Most draft tokens that a pass verifies: as many as leave their logits within _LOGITS_BYTES, and at least 7."""
    return max(_LEAST_DRAFTED, min(DEFAULT_DRAFT_MAX, _LOGITS_BYTES // (4 * n_vocab) - 1))


def drafter_name(file: ModelFile, spec: ModelSpec | HeadSpec | None = None) -> str:
    """Name of the drafter that uses a file. spec: of what drafts in it, where that is known."""
    return HeadDrafter.name if isinstance(spec, HeadSpec) or is_draft_head(file) else ModelDrafter.name


def _table_bytes(tables: Mapping[str, int], n_ctx: int, n_texts: int) -> int:
    """Bytes of tables by drafter, for so many texts at once."""
    memory: dict[str, Callable[[int], int]] = {
        SuffixDrafter.name: lambda n: SuffixDrafter.memory(n, n_ctx, n_texts),
        AnswersDrafter.name: lambda n: AnswersDrafter.memory(n, n_ctx, n_texts),
        RecyclingDrafter.name: RecyclingDrafter.memory,
    }
    return sum(memory[name](size) for name, size in tables.items())


def _add_file(found: DraftChoice, file: ModelFile, plan: MemoryPlan, draft_device: str) -> None:
    """Add a draft model or a head. Raises EdgeInferError where it cannot be used."""
    if is_draft_head(file):
        found.spec = read_head_beside(file, found.target, read_spec(found.target))
    else:
        found.spec = read_draft_spec(file)
        check_vocabulary(file, found.target, found.n_vocab)
        if has_draft_vocab(file):
            _check_on_cpu(file, draft_device)
            draft_device = "cpu"
    found.file = file
    _add_places(found, file, found.spec, plan, draft_device)
    found.plan(plan)


def _add_own_block(found: DraftChoice, plan: MemoryPlan, is_named: bool) -> None:
    """Add the block of the target's own file that drafts, on the CPU. Where it is not named, it may be missing."""
    of_target = read_spec(found.target)
    file = ModelFile.open(found.target.path)
    try:
        found.spec, found.file = read_nextn_beside(file, of_target), file
        found.plan(plan)
    except BaseException as error:
        file.close()
        found.spec = found.file = None
        if not isinstance(error, (EdgeInferError, OSError)) or is_from_handler(error):
            raise
        if is_named:
            found.dropped[OWN_BLOCK] = str(error)


def _sizes_of(plan: MemoryPlan) -> LoadSettings:
    """What a draft model or a head beside a target with that plan is given: as long a context, and as large a batch."""
    return LoadSettings(plan.n_ctx, n_batch=plan.n_batch)


def _sizes_on_cpu(plan: MemoryPlan, n_threads: int) -> LoadSettings:
    """The same on the CPU, where it drafts for as many texts at once as the target has."""
    return replace(_sizes_of(plan), n_threads=n_threads, parallel=plan.n_sequences)


def _check_on_cpu(file: ModelFile, draft_device: str) -> None:
    """Raises UnsupportedModel where a draft model with logits for some tokens only is to run on another device."""
    if draft_device not in ("auto", "cpu"):
        raise UnsupportedModel(
            f"{file.path}: has logits for some of its tokens only, which runs on the CPU, not on {draft_device}"
        )


def _parts_of(plan: MemoryPlan, extra: Mapping[str, int]) -> dict[str, int]:
    """Bytes of a draft model or a head by part. extra: of its drafter."""
    parts = held_by(plan.use)
    return {part: parts.get(part, 0) + extra.get(part, 0) for part in {**parts, **extra}}


def _head_parts(
    file: ModelFile, head: HeadSpec, plan: MemoryPlan, n_threads: int, n_vocab: int
) -> tuple[MemoryPlan, dict[str, int]]:
    """The plan of a head on the CPU, and bytes of its drafter."""
    own = plan_head(file, head, _sizes_on_cpu(plan, n_threads).with_batch(_HEAD_BATCH))
    n_rows = 0 if head.features is None else head.features.n_rows
    sizes = plan.n_ctx, plan.n_batch, head.n_embd, n_vocab, n_rows, head.n_logits
    extra = HeadDrafter.memory(*sizes, plan.n_sequences, head.reads_target)
    extra["rows"] += kept_bytes(head)
    return own, extra


def _add_places(
    found: DraftChoice, file: ModelFile, spec: ModelSpec | HeadSpec, plan: MemoryPlan, draft_device: str
) -> None:
    """Add the devices beside the CPU that run a draft model or a head, and the reasons for the others."""
    try:
        listed = devices_named(draft_device)
    except BackendUnavailable as error:
        found.dropped[draft_device] = str(error)
        return
    for place in listed:
        try:
            place = _for_heads(place, found.target) if isinstance(spec, HeadSpec) else place
            place.backend.plan(file, spec, _sizes_of(plan))
        except EdgeInferError as error:
            found.dropped[place.name] = str(error)
        else:
            found.places.append(place)


def _for_heads(place: DraftDevice, target: ModelFile) -> DraftDevice:
    """The device with its backend for heads of a target. Raises UnsupportedModel."""
    if place.head_backend is None:
        raise UnsupportedModel(f"draft heads do not run on {place.title}")
    return replace(place, backend=place.head_backend(target, read_spec(target)))
