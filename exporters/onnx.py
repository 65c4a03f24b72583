"""A model or a draft head as an ONNX file; edgeinfer.backends.onnx.decoder has its inputs and outputs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from errno import EEXIST
from pathlib import Path
from typing import Any, TypeAlias

from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.onnx import build_head, build_model, check_file, write_graph
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.backends.onnx.library import Style
from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument, TokenizerError, UnsupportedModel
from edgeinfer.common.file_identity import check_sources
from edgeinfer.common.files import behind_links, check_folder, folder_beside, is_utf8, take_over, whole_folder
from edgeinfer.common.overriding import override
from edgeinfer.exporters.checks.comparison import Checked
from edgeinfer.exporters.checks.onnx_file import compare_head, compare_model
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.manifest import NAME as MANIFEST
from edgeinfer.exporters.request import ExportTarget, Plan, PlannedTensor, Progress, Request, Result
from edgeinfer.exporters.source import named_as
from edgeinfer.exporters.tokenizer_json import tokenizer_json, write_tokenizer
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import GatedFusion, is_draft_head, read_head
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

Check: TypeAlias = Callable[[Path], None]

DATA_ENDING = ".data"  # of the file beside the model, with its weights
MAX_WITHIN_BYTES = 1 << 30  # protobuf ends at 2 GiB, and all of it is in memory when it is written
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
NAMES = ("model.onnx*", *TOKENIZER, MANIFEST)  # of a folder
_MODEL, _ENDING = "model.onnx", ".onnx"
_DEFAULT_N_CTX = 4096
_PARTS = re.compile(r"(\[\d+:\d+\])?(\.codes\d|\.scales|\.bases)?$")  # of a tensor's name, as constants have them
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_KEPT_KEYS = ("general.name", "general.license", "tokenizer.chat_template")
_KEPT_PREFIXES = ("tokenizer.ggml.bos_", "tokenizer.ggml.eos_", "tokenizer.ggml.eot_", "tokenizer.ggml.add_")


class OnnxTarget(ExportTarget):
    """`--to onnx`, see ExportTarget. Options: model, the target of a draft head; operators; external_data."""

    @override
    def plan(self, request: Request) -> Plan:
        path = file_in(request.out)
        _check_place(request.out)
        with _opened(request) as (source, model, n_ctx):
            style = request.more.get("operators", "contrib")
            graph = _graph(source, model, n_ctx, style)
            is_beside = _is_beside(graph, request.more.get("external_data", False))
            files = {path: 0 if is_beside else graph.constant_bytes}
            if is_beside:
                files[path.with_name(path.name + DATA_ENDING)] = graph.constant_bytes
            largest = max((constant.n_bytes for constant in graph.constants.values()), default=0)
            # What goes into the file itself is in memory twice: as arrays, and as what protobuf makes of them.
            peak = 5 * _table_bytes(graph, source, model, style)
            peak += 6 * largest if is_beside else 3 * graph.constant_bytes
            tensors = planned_tensors(graph, source)
            texts = 80 * Tokenizer.size_in(source) if _has_tokenizer(source) else 0
            return Plan(tensors, files, peak, sum(files.values()) + texts, list(_notes(source, n_ctx, style)))

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. By the rules of ONNX it is always checked, and run on some tokens."""
        with _opened(request) as (source, model, n_ctx):
            style, beside = request.more.get("operators", "contrib"), request.more.get("external_data", False)
            found: list[tuple[Checked, int | None]] = []

            def check(written: Path) -> None:
                if request.check:
                    found.append(_compared(source, model, written, n_ctx))

            options: dict[str, Any] = {"n_ctx": n_ctx, "style": style, "beside": beside, "progress": progress}
            tokenizer = _has_tokenizer(source) and _tokenizer_problem(source) is None
            files = export_onnx(source, request.out, model, tokenizer=tokenizer, check=check, **options)
        checked, peak = found[0] if found else (Checked(""), None)
        return Result(files, checked.sentence or None, {"n_ctx": n_ctx, **checked.facts}, peak)


def export_onnx(
    source: ModelFile,
    path: Path,
    draft_target: ModelFile | None = None,
    *,
    n_ctx: int,
    style: Style = "contrib",
    beside: bool = False,
    tokenizer: bool = False,
    progress: Progress | None = None,
    check: Check | None = None,
) -> list[Path]:
    """Write a model, or a head for a target; gives the files, which are whole or not there, the model first.

    path: of the file, or a folder for a model.onnx; one that is not there and has another ending is made.
    n_ctx: positions that it has rotations for.  style: with operators of ONNX Runtime, or those of the standard alone.
    beside: weights in a file of their own beside it, as above 1 GiB.  tokenizer: with tokenizer.json and
    tokenizer_config.json, whose names begin with that of the file where that is no folder.  check: called with the
    model before it has its name, after it was checked by the rules of ONNX and run on some tokens.
    Raises UnsupportedModel, InvalidArgument, BudgetExceeded, BackendUnavailable without onnx and onnxruntime, OSError.
    """
    graph = _graph(source, draft_target, n_ctx, style)
    # Tables of rotations are made in double precision, and rounded.
    tables = _table_bytes(graph, source, draft_target, style)
    if 5 * tables > (available := devices.available_memory()):
        raise BudgetExceeded(
            f"{source.path}: tables of rotations for {n_ctx} positions take {human_bytes(5 * tables)} while they are "
            f"made, available are {human_bytes(available)}: a smaller context is needed (-c)"
        )
    with _place(path) as written:
        if _is_beside(graph, beside) and not is_utf8(written.name):
            raise InvalidArgument(f"{path}: the model names the file of its weights, so its own name must be UTF-8")
        data = written.name + DATA_ENDING if _is_beside(graph, beside) else None
        made = write_graph(graph, written, data, progress)
        if tokenizer:
            made += _write_tokenizer(source, written, path)
        with named_as(written, file_in(path)):
            check_file(written)
            if check is not None:
                check(written)
    return [file_in(path).with_name(each.name) for each in made]


def trained_context(source: ModelFile) -> int:
    """Positions that a model or a head was trained with. Raises UnsupportedModel."""
    return (read_head(source).decoder if is_draft_head(source) else read_spec(source)).n_ctx_train


def planned_tensors(graph: Graph, file: ModelFile) -> list[PlannedTensor]:
    """The tensors of a file with the bytes that a graph has for them: codes, scales and bases."""
    n_bytes: dict[str, int] = {}
    for name, constant in graph.constants.items():
        name = _PARTS.sub("", name)
        n_bytes[name] = n_bytes.get(name, 0) + constant.n_bytes
    types = {name: info.type for name, info in file.tensors.items()}
    return [PlannedTensor(name, type, type, n_bytes[name]) for name, type in types.items() if name in n_bytes]


# ---- Where it goes ---------------------------------------------------------------------------------------------------


def file_in(path: Path) -> Path:
    """The model's file: that of the name, or the one in a folder, which need not be there yet."""
    return behind_links(path / _MODEL if _is_folder(path) else path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() or (path.suffix != _ENDING and not path.exists())


def _check_place(path: Path) -> None:
    """Raises OSError where files of a folder would be replaced that no export wrote."""
    if not _is_folder(path):
        return
    if not path.exists():
        check_folder(path, NAMES)
        return
    other = next((name for name in TOKENIZER if (path / name).exists()), None)
    if other is not None and not (path / MANIFEST).exists():
        raise FileExistsError(EEXIST, f"This folder has a {other} that no export wrote", str(path))


@contextmanager
def _place(path: Path) -> Iterator[Path]:
    """Where the model is written, in a work folder. What is there in the end gets its place."""
    _check_place(path)
    if _is_folder(path) and not path.exists():
        with whole_folder(path, NAMES) as folder:
            yield folder / _MODEL
        return
    target = file_in(path)
    with folder_beside(target) as folder:
        yield folder / target.name
        others = sorted(each.name for each in folder.iterdir() if each.name != target.name)
        for name in (*others, target.name):
            take_over(folder / name, target.with_name(name))
        check_sources()
        target.unlink(missing_ok=True)  # the old one does not go with the new weights
        for name in (*others, target.name):
            os.replace(folder / name, target.with_name(name))


def _write_tokenizer(source: ModelFile, written: Path, path: Path) -> list[Path]:
    """Both files beside a model in its work folder. path: the place of the output."""
    made = write_tokenizer(source, written.parent)
    if _is_folder(path):
        return made
    return [each.rename(each.with_name(f"{written.name}.{each.name}")) for each in made]


def _has_tokenizer(source: ModelFile) -> bool:
    """A head has that of its target."""
    return not is_draft_head(source)


def _tokenizer_problem(source: ModelFile) -> str | None:
    """Why there is no tokenizer.json for a file, None where there is one."""
    try:
        tokenizer_json(source)
    except (TokenizerError, UnsupportedModel) as error:
        return str(error)
    return None


# ---- What it is ------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(request: Request) -> Iterator[tuple[ModelFile, ModelFile | None, int]]:
    """The source, the target of a draft head, and the context."""
    with ExitStack() as opened:
        source = opened.enter_context(FiniteFile.open(request.source))
        model = request.more.get("model")
        target = opened.enter_context(FiniteFile.open(model)) if model is not None else None
        yield source, target, request.n_ctx or min(trained_context(source), _DEFAULT_N_CTX)


def _notes(source: ModelFile, n_ctx: int, style: Style) -> Iterator[str]:
    yield f"The graph has rotations for {n_ctx} positions."
    if style == "contrib" and any(info.type not in _FLOATS for info in source.tensors.values()):
        yield "The codes of the file's formats are kept exactly; activations are rounded to 8 bits when it runs."
    problem = _tokenizer_problem(source) if _has_tokenizer(source) else None
    if problem is not None:
        yield f"There is no tokenizer.json for this vocabulary, and none is written: {problem}"


def _compared(source: ModelFile, target: ModelFile | None, written: Path, n_ctx: int) -> tuple[Checked, int | None]:
    """What a written file gives beside its source. Raises ModelFileError for another model."""
    try:
        if target is not None:
            return compare_head(source, target, written, n_ctx)
        return compare_model(source, written, n_ctx)
    except UnsupportedModel as error:
        return Checked(f"not run: {error}", {"checked": False}), None


def _is_beside(graph: Graph, wanted: bool) -> bool:
    """Whether the weights go into a file of their own."""
    return wanted or graph.constant_bytes > MAX_WITHIN_BYTES


def _table_bytes(graph: Graph, source: ModelFile, target: ModelFile | None, style: Style) -> int:
    """Bytes of the tables of rotations in a graph."""
    return graph.constant_bytes - _graph(source, target, 1, style).constant_bytes


def _graph(source: ModelFile, target: ModelFile | None, n_ctx: int, style: Style) -> Graph:
    """The graph of a model or a head, with what a user of the file must know."""
    if not is_draft_head(source):
        if target is not None:
            raise InvalidArgument(f"{source.path} is no draft head, which alone has a target: leave that out")
        graph = build_model(source, read_spec(source), n_ctx, style)
        kept = {key: value for key, value in source.metadata.items() if _is_kept(key)}
    else:
        if target is None:
            raise InvalidArgument(
                f"{source.path} is a draft head, which needs its target's embeddings: name that model"
            )
        of_target = read_spec(target)
        head = read_head_beside(source, target, of_target)
        if head.features is not None:
            kind = "a head with taps" if isinstance(head.front, GatedFusion) else "an EAGLE-3 head"
            raise UnsupportedModel(
                f"{source.path}: {kind} is fed by what several layers of its target give, and an ONNX file here gives "
                "the last row alone: run it on the native engine (-md)"
            )
        graph = build_head(source, head, target, of_target, n_ctx, style)
        kept = {"draft_vocab": head.draft_vocab.tolist(), "target.fingerprint": head.target.fingerprint}
    for key, value in kept.items():
        graph.metadata[key] = value if isinstance(value, str) else json.dumps(value, default=list)
    return graph


def _is_kept(key: str) -> bool:
    return key in _KEPT_KEYS or key.startswith(_KEPT_PREFIXES)
