"""Graphs as files, and the check that one is what it should be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.onnx.graph import Graph, beside, within
from edgeinfer.backends.onnx.library import CPU, errors_translated, open_library, open_onnx
from edgeinfer.backends.onnx.matrices import Constant
from edgeinfer.common.errors import ModelFileError
from edgeinfer.common.files import utf8_name

_ALIGNMENT = 4096  # of each constant: so that a file can be mapped
_WITHIN_BYTES = 1024  # ONNX Runtime wants shapes and the like in the graph itself
_CHECKED_TOKENS = 4


def write_graph(
    graph: Graph, path: Path, data: str | None, progress: Progress | None = None, max_bytes: int | None = None
) -> list[Path]:
    """Write a model; gives the files, the model first.

    data: name of the file beside it that gets the constants, None to have them in the model.  max_bytes: of such a
    file, after which another begins, data.1, data.2 and so on; a larger constant has one of its own.
    One constant is in memory at a time where they go into files of their own. Raises BackendUnavailable, OSError.
    """
    total, done, tensors = max(1, graph.constant_bytes), 0, []
    files = None if data is None else _DataFiles(path.with_name(data), max_bytes)
    try:
        for name, constant in graph.constants.items():
            if files is None or constant.n_bytes <= _WITHIN_BYTES:
                tensors.append(within(name, constant))
            else:
                tensors.append(files.add(name, constant))
            done += constant.n_bytes
            if progress is not None:
                progress(done / total)
    finally:
        if files is not None:
            files.close()
    with path.open("xb") as file:
        file.write(graph.model(tensors).SerializeToString())
    return [path, *(files.paths if files is not None else ())]


def data_names(data: str, constants: Sequence[Constant], max_bytes: int | None = None) -> dict[str, int]:
    """The files of constants that write_graph would write, with their bytes."""
    sizes: list[int] = []
    for n_bytes in (each.n_bytes for each in constants if each.n_bytes > _WITHIN_BYTES):
        if not sizes or _is_full(sizes[-1], n_bytes, max_bytes):
            sizes.append(0)
        sizes[-1] += -sizes[-1] % _ALIGNMENT + n_bytes
    return {_numbered(data, number): size for number, size in enumerate(sizes)}


class _DataFiles:
    """Files with constants, one behind the other."""

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self.paths: list[Path] = []
        self._first, self._max_bytes = path, max_bytes
        self._file: BinaryIO | None = None

    def add(self, name: str, constant: Constant) -> Any:
        """Write a constant; gives its TensorProto."""
        if self._file is None or _is_full(self._file.tell(), constant.n_bytes, self._max_bytes):
            self.close()
            path = self._first.with_name(_numbered(self._first.name, len(self.paths)))
            self._file = path.open("xb")
            self.paths.append(path)
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        tensor = beside(name, constant, self.paths[-1].name, self._file.tell())
        self._file.write(np.ascontiguousarray(constant.make()).data)
        return tensor

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _is_full(n_bytes: int, more: int, max_bytes: int | None) -> bool:
    """Whether a file of so many bytes has no room for more of them."""
    return max_bytes is not None and n_bytes > 0 and n_bytes + _ALIGNMENT + more > max_bytes


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name


def check_file(path: Path) -> None:
    """Check a file by the rules of ONNX, load it, and run some tokens.

    Raises ModelFileError if it is not sound or gives no numbers, UnsupportedModel if ONNX Runtime does not take it.
    """
    onnx = open_onnx()
    try:
        with utf8_name(path) as name:
            onnx.checker.check_model(str(name))
    except onnx.checker.ValidationError as error:
        raise ModelFileError(f"{path}: not a sound ONNX model: {' '.join(str(error).split())[:600]}") from error
    session = open_file(path)
    with errors_translated(f"running {path.name}", load=True):
        given = _some_input(session)
        logits = session.run(["logits"], given)[0]
    if logits.shape[0] != len(given["logit_rows"]) or not np.isfinite(logits).all():
        raise ModelFileError(f"{path}: gives logits {logits.shape} that are not all numbers: the source is damaged")


def open_file(path: Path) -> Any:
    """A session of onnxruntime of a file, on the CPU. Raises UnsupportedModel if ONNX Runtime does not take it."""
    library = open_library()
    options = library.SessionOptions()
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with errors_translated(f"loading {path.name}", load=True), utf8_name(path) as name:
        return library.InferenceSession(str(name), options, [CPU])


def _some_input(session: Any) -> dict[str, NDArray[Any]]:
    """Inputs of a session for a text of some tokens."""
    facts = json.loads(session.get_modelmeta().custom_metadata_map["edgeinfer"])
    n = min(_CHECKED_TOKENS, facts["n_ctx"])
    sizes = {"n": n, "m": n, "t": n, "capacity": n}
    kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
    given: dict[str, NDArray[Any]] = {
        value.name: np.zeros([sizes.get(size, size) for size in value.shape], dtype=kinds[value.type])
        for value in session.get_inputs()
    }
    for name, array in given.items():
        if name in ("position_ids", "logit_rows", "cache_slots"):
            array[...] = np.arange(n)
        elif name.startswith("attention_bias"):
            array[...] = np.where(np.tri(n, array.shape[3], dtype=np.bool_), 0, facts["hidden_bias"])
    return given
