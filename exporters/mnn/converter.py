"""MNN's converter, which makes a graph of MNN out of one of ONNX, and JSON out of that and back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeinfer.backends.driver_probe import interpreter
from edgeinfer.common.errors import BackendUnavailable, UnsupportedModel
from edgeinfer.exporters.identity import stable_uuid

# The compiled module alone: what the package MNN.tools does besides installs other packages and reports home.
_PROGRAM = "import sys, _tools; _tools.mnnconvert(['mnnconvert', *sys.argv[1:]])"
_PATIENCE_SECONDS = 600


def check_installed() -> None:
    """Raises BackendUnavailable where MNN is missing."""
    if importlib.util.find_spec("_tools") is None or importlib.util.find_spec("_mnncengine") is None:
        raise BackendUnavailable("packages for MNN are made with its converter: pip install 'edgeinfer[mnn]'")


def from_onnx(graph: Path, folder: Path) -> dict[str, Any]:
    """A graph as MNN's JSON, whose larger constants are in the file converted.mnn.weight of the folder.

    Raises BackendUnavailable, UnsupportedModel where the converter refuses it.
    """
    made, text = folder / "converted.mnn", folder / "converted.json"
    options = ("--allowCustomOp", "--saveExternalData")
    _convert("-f", "ONNX", "--modelFile", str(graph), "--MNNModel", str(made), *options, written=made)
    _convert("-f", "MNN", "--modelFile", str(made), "--JsonFile", str(text), written=text)
    content: dict[str, Any] = json.loads(text.read_text())
    return content


def identified(content: dict[str, Any], weights: Sequence[str]) -> dict[str, Any]:
    """A graph with an identity that follows from it and from the hashes of its weights.

    The converter takes a random one. MNN names files that it makes of the weights by it, so other weights need another.
    """
    same = content | {"mnn_uuid": ""}
    parts = (json.dumps(same, sort_keys=True), *weights)
    return same | {"mnn_uuid": stable_uuid(*(part.encode() for part in parts))}


def to_mnn(content: dict[str, Any], path: Path) -> None:
    """Write a graph in JSON as an .mnn file. Raises BackendUnavailable, UnsupportedModel, OSError."""
    text = path.with_suffix(".json")
    text.write_text(json.dumps(content))
    _convert("-f", "JSON", "--modelFile", str(text), "--MNNModel", str(path), written=path)
    text.unlink()


def _convert(*arguments: str, written: Path) -> None:
    command = [interpreter(), "-P", "-c", _PROGRAM, *arguments]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedModel(f"MNN's converter was not done within {_PATIENCE_SECONDS} s") from None
    if run.returncode or not written.exists():
        words = " ".join((run.stdout + run.stderr).split())[-400:] or "without a word"
        raise UnsupportedModel(f"MNN's converter ended with exit code {run.returncode}: {words}")
