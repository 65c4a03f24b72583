"""`--to gguf`: a model in a GGUF file, in the types of llama.cpp's file types, of its source, or chosen by loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.overriding import override
from edgeinfer.exporters.calibration.imatrix import Imatrix, read_imatrix
from edgeinfer.exporters.checks.comparison import Checked, compare
from edgeinfer.exporters.checks.head import compare_heads
from edgeinfer.exporters.drafters.draft_vocab import DraftVocabSource, draft_vocab_source
from edgeinfer.exporters.gguf.file_types import (
    QUANTIZATION_VERSION,
    file_type,
    file_type_number,
    is_quantised,
    source_types,
    tensor_types,
)
from edgeinfer.exporters.gguf.partial import partial_file, partial_path
from edgeinfer.exporters.gguf.weights import is_copied, peak_bytes, written_tensor
from edgeinfer.exporters.gguf.writer import Layout, Tensor, layout
from edgeinfer.exporters.manifest import record, sha256_of, tool_version
from edgeinfer.exporters.request import ExportTarget, Plan, PlannedTensor, Progress, Request, Result, TypeChoice
from edgeinfer.exporters.source import GgufSource, Source, SourceTensor, open_source
from edgeinfer.models.draft_head import ASSISTANT, HEADS
from edgeinfer.models.formats import check_type
from edgeinfer.models.gguf import GGMLType, MetadataValue

AUTO = "auto"
_EXACT = {  # what holds all weights of a type
    GGMLType.F32: {GGMLType.F32, GGMLType.F16, GGMLType.BF16},
    GGMLType.F16: {GGMLType.F16},
    GGMLType.BF16: {GGMLType.BF16},
}
_FLOATS = frozenset(_EXACT)


class Choices:
    """The types that were measured for a request (`--type auto`): its plan and what is then written share them."""

    def __init__(self) -> None:
        self._known: tuple[Request, TypeChoice] | None = None

    def measured(self, source: Source, request: Request, imatrix: Imatrix | None) -> TypeChoice:
        """The types of all tensors of a source. Raises what choose_types raises."""
        asked = replace(request, resume=False)
        if self._known is None or self._known[0] != asked:
            from edgeinfer.exporters import auto

            choose = auto.choose_types if _target_of(request) is None else auto.choose_draft_types
            chosen = choose(source, request, imatrix)
            types = {**source_types(source.tensors), **chosen.types}
            self._known = asked, TypeChoice(types, chosen.notes, chosen.facts, chosen.keys)
        return self._known[1]


class GgufTarget(ExportTarget):
    """See ExportTarget."""

    def __init__(self) -> None:
        self._choices = Choices()

    @override
    def plan(self, request: Request) -> Plan:
        """See ExportTarget.plan. With `--type auto` or `--imatrix auto` it measures what the plan depends on."""
        with _opened(request) as source:
            return prepare(source, request, self._choices).plan()

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        with _opened(request) as source:
            job = prepare(source, request, self._choices)
            with partial_file(request.out, job.identity(), job.layout, request.resume) as partial:
                partial.write(job.tensors, progress)
                checked = _checked(job, partial.path) if request.check else None
                partial.finish()
        facts = {**job.facts, **(checked.facts if checked else {})}
        return Result([request.out], checked.sentence if checked else None, facts)


def write_file(request: Request, path: Path, choices: Choices, progress: Progress) -> Mapping[str, Any]:
    """Write the file of a request under another name, without a check; gives the facts for the manifest."""
    with _opened(request) as source:
        job = prepare(source, request, choices)
        with partial_file(path, job.identity(), job.layout, resume=False) as partial:
            partial.write(job.tensors, progress)
            partial.finish()
    return job.facts


@contextmanager
def _opened(request: Request) -> Iterator[Source]:
    """What is written: the source, or the draft model that is made of it."""
    with open_source(request.source, _target_of(request)) as source:
        if _target_of(request) is not None and not _is_head(source) and not _is_auto(request):
            raise InvalidArgument(
                f"{request.source} is no draft head: --target goes with draft heads, and with draft models whose "
                f"types are chosen for it (--type auto)"
            )
        requested = request.more.get("draft_vocab")
        yield source if requested is None else draft_vocab_source(source, requested, request.more.get("draft_text"))


def _target_of(request: Request) -> Path | None:
    """The model that a draft head is for."""
    target: Path | None = request.more.get("model")
    return target


def _checked(job: GgufJob, written: Path) -> Checked:
    """What running the written file shows."""
    if _is_head(job.source):
        return compare_heads(job.source, written, _target_of(job.request))
    writes_text = not isinstance(job.source, DraftVocabSource)
    return compare(job.source, written, job.is_lossless and writes_text)


@dataclass(frozen=True)
class GgufJob:
    """A file that is to be written."""

    request: Request
    source: Source
    types: Mapping[str, GGMLType]  # of each tensor
    tensors: Sequence[Tensor]
    layout: Layout
    imatrix: Path | None = None  # the file of the importance matrix
    imatrix_bytes: int = 0  # what it takes in memory
    # notes, facts: for the plan and the manifest
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_lossless(self) -> bool:
        """Whether the file has the weights of the source."""
        return all(_is_exact(tensor, self.types[tensor.name]) for tensor in self.source.tensors)

    def identity(self) -> dict[str, Any]:
        """What the bytes of the file are a function of, but for its header."""
        files = [path.stat() for path in self.source.files]
        return {
            "tool": tool_version(),
            "source": [
                [path.name, stat.st_size, stat.st_mtime_ns] for path, stat in zip(self.source.files, files, strict=True)
            ],
            "imatrix": None if self.imatrix is None else sha256_of(self.imatrix),
            "draft_vocab": self.source.digest if isinstance(self.source, DraftVocabSource) else None,
        }

    def plan(self) -> Plan:
        """See Plan."""
        planned = [
            PlannedTensor(tensor.name, tensor.type, written.type, written.n_bytes)
            for tensor, written in zip(self.source.tensors, self.tensors, strict=True)
        ]
        pairs = zip(self.source.tensors, self.tensors, strict=True)
        peak = max((peak_bytes(tensor, written.type) for tensor, written in pairs), default=0) + self.imatrix_bytes
        n_bytes = self.layout.n_bytes
        return Plan(planned, {self.request.out: n_bytes}, peak, n_bytes - _there(self.request), self.notes)


def prepare(source: Source, request: Request, choices: Choices) -> GgufJob:
    """What a request makes of a source. Raises InvalidArgument, UnsupportedModel, ModelFileError."""
    _check_measured(source, request)
    imatrix, path = _imatrix(source, request)
    choice = _types(source, request, imatrix, choices)
    tensors = []
    for tensor in source.tensors:
        type = choice.types[tensor.name]
        if not is_copied(tensor, type) and tensor.stored is not None:
            check_type(tensor.type)
        means = None if imatrix is None or type in _FLOATS else imatrix.means(tensor.name, math.prod(tensor.shape[:-2]))
        tensors.append(written_tensor(source, tensor, type, means))
    facts = {**choice.facts, **({} if path is None else {"imatrix": record(path)})}
    metadata = {**source.metadata, **_keys(source, request, choice), **_imatrix_keys(imatrix, path)}
    return GgufJob(
        request,
        source,
        choice.types,
        tensors,
        layout(metadata, tensors),
        path,
        0 if imatrix is None else imatrix.n_bytes,
        [*choice.notes, *_notes(request, source, choice.types, imatrix)],
        facts,
    )


def _check_measured(source: Source, request: Request) -> None:
    """Raises InvalidArgument for a drafter that would have to be measured as a model is."""
    if request.imatrix == AUTO and _is_head(source):
        raise InvalidArgument(f"{request.source}: --imatrix auto measures whole models, not draft heads")
    if _is_auto(request) and source.metadata.get("general.architecture") == ASSISTANT:
        raise InvalidArgument(
            f"{request.source} is an assistant of a Gemma 4, for which --type auto has no measurement: name a type, "
            "such as q8_0"
        )
    if _is_auto(request) and _target_of(request) is None and (_is_head(source) or _is_cut(source)):
        what = "a draft head" if _is_head(source) else "a model with --draft-vocab"
        raise InvalidArgument(
            f"{request.source} is {what}: --type auto needs --target, the model that it drafts for, to measure it there"
        )


def _is_auto(request: Request) -> bool:
    return request.type is not None and request.type.lower() == AUTO


def _is_head(source: Source) -> bool:
    return source.metadata.get("general.architecture") in HEADS


def _is_cut(source: Source) -> bool:
    return isinstance(source, DraftVocabSource)


def _types(source: Source, request: Request, imatrix: Imatrix | None, choices: Choices) -> TypeChoice:
    if request.type is None:
        return TypeChoice(source_types(source.tensors))
    if _is_auto(request):
        return choices.measured(source, request, imatrix)
    kind = file_type(request.type)
    return TypeChoice(tensor_types(kind, source.metadata, source.tensors, imatrix is not None))


def _keys(source: Source, request: Request, choice: TypeChoice) -> dict[str, MetadataValue]:
    """The keys that say how the file is written."""
    number = file_type_number(choice.types, source.tensors)
    if request.type is not None and not _is_auto(request):
        number = file_type(request.type).number
    elif request.type is None and isinstance(source, GgufSource):
        found = source.file.metadata.get("general.file_type")
        number = found if isinstance(found, int) else number
    keys: dict[str, MetadataValue] = {"general.file_type": number, **choice.keys}
    return {"general.quantization_version": QUANTIZATION_VERSION, **keys}


def _imatrix(source: Source, request: Request) -> tuple[Imatrix | None, Path | None]:
    """The importance matrix of a request, and its file. With --type auto one is made where none is named."""
    if request.imatrix is None and (not _is_auto(request) or _is_head(source)):
        return None, None
    path = request.imatrix if isinstance(request.imatrix, Path) else _made_imatrix(source, request)
    imatrix = read_imatrix(path)
    if not any(tensor.name in imatrix.of for tensor in source.tensors):
        raise InvalidArgument(f"{path}: is of another model: it has no tensor of {request.source}")
    return imatrix, path


def _made_imatrix(source: Source, request: Request) -> Path:
    """The importance matrix beside the output, which is made where it is not there."""
    from edgeinfer.exporters.calibration.collect import imatrix_beside

    whole = source.whole if isinstance(source, DraftVocabSource) else source
    return imatrix_beside(whole, request.out, request.calibration, request.report)


def _imatrix_keys(imatrix: Imatrix | None, path: Path | None) -> dict[str, MetadataValue]:
    """The keys that llama-quantize adds."""
    if imatrix is None or path is None:
        return {}
    keys: dict[str, MetadataValue] = {"quantize.imatrix.file": path.name}
    if imatrix.datasets:
        keys["quantize.imatrix.dataset"] = imatrix.datasets[0]
    keys["quantize.imatrix.entries_count"] = len(imatrix.of)
    if imatrix.n_chunks:
        keys["quantize.imatrix.chunks_count"] = imatrix.n_chunks
    return keys


def _notes(request: Request, source: Source, types: Mapping[str, GGMLType], imatrix: Imatrix | None) -> list[str]:
    """What the user should know of the types."""
    notes, quantised = list(source.notes), [tensor for tensor in source.tensors if is_quantised(tensor)]
    lossy = [tensor for tensor in quantised if tensor.type not in _FLOATS and not _is_exact(tensor, types[tensor.name])]
    if lossy:
        names = ", ".join(sorted({tensor.type.name for tensor in lossy}))
        loss = "a float type makes them larger, not better"
        if any(types[tensor.name] not in _FLOATS for tensor in lossy):
            loss = "quantising them again loses twice; export from the F16 or BF16 model where there is one"
        notes.append(f"{len(lossy)} tensors are quantised already ({names}): {loss}")
    kept = sorted({types[t.name].name for t in quantised if t.type == types[t.name] and t.type not in _FLOATS})
    if lossy and kept:
        notes.append(f"tensors that are {' or '.join(kept)} already are copied")
    if imatrix is not None:
        missing = [t for t in quantised if t.name.startswith("blk.") and t.name not in imatrix.of]
        if missing:
            notes.append(f"{len(missing)} matrices are not in the importance matrix, such as {missing[0].name}")
    requested = None if request.type is None or _is_auto(request) else file_type(request.type).type
    fallen = [t for t in quantised if requested is not None and t.n_in % requested.block_elements]
    if fallen and requested is not None:
        notes.append(
            f"{len(fallen)} matrices have rows that are no multiple of {requested.block_elements}, such as "
            f"{fallen[0].name} ({fallen[0].n_in}): they get a type of smaller blocks"
        )
    return notes


def _is_exact(tensor: SourceTensor, type: GGMLType) -> bool:
    return is_copied(tensor, type) or tensor.type in _EXACT.get(type, {type})


def _there(request: Request) -> int:
    """Bytes on disk that an export which goes on need not write again."""
    if not request.resume:
        return 0
    path = partial_path(request.out)
    return path.stat().st_size if path.exists() else 0
