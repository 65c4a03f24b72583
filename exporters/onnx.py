"""A GGUF file's model or draft head as an ONNX file; edgeinfer.backends.onnx.decoder has its inputs and outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from edgeinfer import devices
from edgeinfer.arguments import human_bytes
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.onnx import build_head, build_model, check_file, write_graph
from edgeinfer.backends.onnx.files import CHECKED_TOKENS
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.backends.onnx.library import Style
from edgeinfer.errors import BudgetExceeded, InvalidArgument, UnsupportedModel
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.request import Plan, Request, Result
from edgeinfer.files import behind_links, folder_beside, is_utf8, take_over
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import GatedFusion, is_draft_head, read_head
from edgeinfer.models.gguf import ModelFile

Progress: TypeAlias = Callable[[float], None]

DATA_ENDING = ".data"  # of the file beside the model, with its weights
MAX_WITHIN_BYTES = 1 << 30  # protobuf ends at 2 GiB, and all of it is in memory when it is written
_DEFAULT_N_CTX = 4096
_KEPT_KEYS = ("general.name", "general.license", "tokenizer.chat_template")
_KEPT_PREFIXES = ("tokenizer.ggml.bos_", "tokenizer.ggml.eos_", "tokenizer.ggml.eot_", "tokenizer.ggml.add_")


class OnnxTarget:
    """`--to onnx`, see Target. Options: model, the target of a draft head; operators; external_data."""

    def plan(self, request: Request) -> Plan:
        """See Target.plan."""
        with _opened(request) as (source, model, n_ctx):
            style = request.more.get("operators", "contrib")
            graph = _graph(source, model, n_ctx, style)
            path, is_beside = _file_of(request.out), _is_beside(graph, request.more.get("external_data", False))
            files = {path: 0 if is_beside else graph.constant_bytes}
            if is_beside:
                files[path.with_name(path.name + DATA_ENDING)] = graph.constant_bytes
            largest = max((constant.n_bytes for constant in graph.constants.values()), default=0)
            # What goes into the file itself is in memory twice: as arrays, and as what protobuf makes of them.
            peak = 5 * _table_bytes(graph, source, model, style)
            peak += 6 * largest if is_beside else 3 * graph.constant_bytes
        return Plan((), files, peak, sum(files.values()))

    def write(self, request: Request, progress: Progress) -> Result:
        """See Target.write. What is written is always checked and run."""
        with _opened(request) as (source, model, n_ctx):
            style, beside = request.more.get("operators", "contrib"), request.more.get("external_data", False)
            files = export_onnx(source, request.out, model, n_ctx=n_ctx, style=style, beside=beside, progress=progress)
        return Result(files, "ONNX Runtime loads it and gives finite logits", {"n_ctx": n_ctx})


def export_onnx(
    source: ModelFile,
    path: Path,
    draft_target: ModelFile | None = None,
    *,
    n_ctx: int,
    style: Style = "contrib",
    beside: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model, or a head for a target; gives the files, which are whole or not there.

    path: of the file, or a folder for a model.onnx.  n_ctx: positions that it has rotations for.  style: with operators
    of ONNX Runtime, or those of the standard alone.  beside: weights in a file of their own beside it, as above 1 GiB.
    The vocabulary is not in it. What is written is checked and run before it gets its name.
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
    path = _file_of(path)
    beside = _is_beside(graph, beside)
    if beside and not is_utf8(path.name):
        raise InvalidArgument(f"{path}: the model names the file of its weights, so its own name must be UTF-8")
    with folder_beside(path) as folder:
        written = folder / path.name
        _, *data = write_graph(graph, written, path.name + DATA_ENDING if beside else None, progress)
        check_file(written)
        names = [each.name for each in data]
        for name in (*names, path.name):
            take_over(folder / name, path.with_name(name))
        path.unlink(missing_ok=True)  # the old one does not go with the new weights
        for name in (*names, path.name):
            os.replace(folder / name, path.with_name(name))
    return [path.with_name(name) for name in (path.name, *names)]


def trained_context(source: ModelFile) -> int:
    """Positions that a model or a head was trained with. Raises UnsupportedModel."""
    return (read_head(source).decoder if is_draft_head(source) else read_spec(source)).n_ctx_train


@contextmanager
def _opened(request: Request) -> Iterator[tuple[ModelFile, ModelFile | None, int]]:
    """The source, the target of a draft head, and the context. Raises InvalidArgument for one that is too small."""
    with ExitStack() as opened:
        source = opened.enter_context(FiniteFile.open(request.source))
        model = request.more.get("model")
        target = opened.enter_context(FiniteFile.open(model)) if model is not None else None
        n_ctx = request.n_ctx or min(trained_context(source), _DEFAULT_N_CTX)
        if n_ctx < CHECKED_TOKENS:
            raise InvalidArgument(
                f"the {CHECKED_TOKENS} tokens of the check do not fit into {n_ctx} tokens (-c): take at least "
                f"{CHECKED_TOKENS}"
            )
        yield source, target, n_ctx


def _file_of(path: Path) -> Path:
    return behind_links(path / "model.onnx" if path.is_dir() else path)


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
