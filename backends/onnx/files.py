"""Graphs as files, and the check that one is what it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.onnx.graph import Graph, beside, within
from edgeinfer.backends.onnx.library import CPU, errors_translated, open_library, open_onnx
from edgeinfer.errors import ModelFileError

_ALIGNMENT = 4096  # of each constant: so that a file can be mapped
_WITHIN_BYTES = 1024  # ONNX Runtime wants shapes and the like in the graph itself
_CHECKED_TOKENS = 4


def write_graph(graph: Graph, path: Path, data: str | None, progress: Progress | None = None) -> None:
    """Write a model. data: name of the file beside it that gets the constants, None to have them in the model.

    One of them is in memory at a time where they go into a file of their own. Raises BackendUnavailable, OSError.
    """
    total, done, tensors = max(1, graph.constant_bytes), 0, []
    with path.with_name(data or path.name).open("xb") as file:
        for name, constant in graph.constants.items():
            if data is None or constant.n_bytes <= _WITHIN_BYTES:
                tensors.append(within(name, constant))
            else:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                tensors.append(beside(name, constant, data, file.tell()))
                file.write(np.ascontiguousarray(constant.make()).data)
            done += constant.n_bytes
            if progress is not None:
                progress(done / total)
        if data is None:
            file.write(graph.model(tensors).SerializeToString())
    if data is not None:
        path.write_bytes(graph.model(tensors).SerializeToString())


def check_file(path: Path) -> None:
    """Check a file by the rules of ONNX, load it, and run some tokens.

    Raises ModelFileError if it is not sound or gives no numbers, UnsupportedModel if ONNX Runtime does not take it.
    """
    onnx, library = open_onnx(), open_library()
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ModelFileError(f"{path}: not a sound ONNX model: {' '.join(str(error).split())[:600]}") from error
    options = library.SessionOptions()
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with errors_translated(f"loading {path.name}", load=True):
        session = library.InferenceSession(str(path), options, [CPU])
        given = _some_input(session)
        logits = session.run(["logits"], given)[0]
    if logits.shape[0] != _CHECKED_TOKENS or not np.isfinite(logits).all():
        raise ModelFileError(f"{path}: gives logits {logits.shape} that are not all numbers: the source is damaged")


def _some_input(session: Any) -> dict[str, NDArray[Any]]:
    """Inputs of a session for a text of some tokens."""
    n = _CHECKED_TOKENS
    sizes = {"n": n, "m": n, "t": n, "capacity": n}
    kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
    given: dict[str, NDArray[Any]] = {
        value.name: np.zeros([sizes.get(size, size) for size in value.shape], dtype=kinds[value.type])
        for value in session.get_inputs()
    }
    hidden = json.loads(session.get_modelmeta().custom_metadata_map["edgeinfer"])["hidden_bias"]
    for name, array in given.items():
        if name in ("position_ids", "logit_rows", "cache_slots"):
            array[...] = np.arange(n)
        elif name.startswith("attention_bias"):
            array[...] = np.where(np.tri(n, array.shape[3], dtype=np.bool_), 0, hidden)
    return given
