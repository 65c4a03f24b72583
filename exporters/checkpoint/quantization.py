"""Quantised checkpoints: which method made the weights, and what reads them."""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.folder import Folder
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import PlainTensor, Tensor

_AS_STORED = ("bitnet", "mxfp4")  # read by what knows the architecture


def read_tensors(folder: Folder, config: Config, stored: Mapping[str, StoredTensor]) -> tuple[str, dict[str, Tensor]]:
    """(method, tensors by their plain names) of what a folder stores. Raises UnsupportedModel, ModelFileError."""
    settings = config.part("quantization_config") or config.language().part("quantization_config")
    plain: dict[str, Tensor] = {name: PlainTensor(tensor) for name, tensor in stored.items()}
    if settings is None:
        return "", plain
    method = settings.text("quant_method", "")
    if method in _AS_STORED:
        return method, plain
    raise UnsupportedModel(f"{folder.path}: weights quantised by {method!r:.80} cannot be read")
