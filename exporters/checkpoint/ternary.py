"""Ternary checkpoints: BitNet's, and models whose weights are ternary as they stand.

A ternary matrix is packed, four rows to a byte, or unpacked. Packed, row i * (n_out / 4) + r has bits 2i and 2i + 1 of
row r as trit + 1, and `weight_scale` stands beside. What that means depends on the class of the linear layers
(transformers, integrations/bitnet.py): weight = trit * weight_scale in AutoBitLinear, trit / weight_scale in BitLinear.
Unpacked and "online", the weights are rounded when they are used: to the mean magnitude times -1, 0 or 1. Without a
quantization_config (TriLM) the weights must be ternary as they stand, with their scales in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint.checkpoint import Checkpoint
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix, Trits

Floats = NDArray[np.float32]

_SETTINGS = {
    "linear_class": ("bitlinear", "autobitlinear"),
    "quantization_mode": ("offline", "online"),
    "use_rms_norm": (False,),
}


class TernaryCheckpoint(Checkpoint):
    """A checkpoint with a ternary model."""

    @classmethod
    def open(cls, folder: str | Path) -> TernaryCheckpoint:
        """See Checkpoint.open. Raises UnsupportedModel, too, for weights that another method quantised."""
        found = Checkpoint.open(folder)
        settings = found.config.get("quantization_config") or {}
        if found.quantization not in ("", "bitnet"):
            raise UnsupportedModel(
                f"{found.path}: quantization_config must be that of bitnet: found {found.quantization!r:.80}"
            )
        for key, values in _SETTINGS.items():
            if settings.get(key, values[0]) not in values:
                raise UnsupportedModel(
                    f"{found.path}: quantization_config.{key} must be {' or '.join(map(repr, values))}: found "
                    f"{settings[key]!r:.80}"
                )
        return cls(found.folder, found.config, found._tensors, found.quantization)

    @property
    def _settings(self) -> Mapping[str, Any]:
        return self.config.get("quantization_config") or {}

    def ternary(self, module: str, shape: tuple[int, int]) -> TernaryMatrix:
        """The matrix of a linear layer, (n_out, n_in).

        Raises ModelFileError for what is not ternary, UnsupportedModel in a model that does not say that it is.
        """
        name = f"{module}.weight"
        if self.dtype(name) == "U8":
            return TernaryMatrix.of_one_scale(self._unpacked(name, shape), self._scale(module))
        self.check_shape(name, shape)
        weights = self.floats(name)
        if self._settings.get("quantization_mode") == "online":
            return _round(weights, self.dtype(name))
        if not self._settings:
            return TernaryMatrix.of_weights(f"{name} of {self.path}", weights)
        if not np.isin(weights, (-1, 0, 1)).all():
            self.refuse(name, "must be -1, 0 or 1: found other numbers; this matrix is not ternary")
        return TernaryMatrix.of_one_scale(weights.astype(np.int8), self._scale(module))

    def _unpacked(self, name: str, shape: tuple[int, int]) -> Trits:
        found = self.shape(name)
        if found != (shape[0] // 4, shape[1]) or shape[0] % 4:
            self.refuse(name, f"must be {shape} with four rows packed into one: found {found}")
        packed = self.data(name).reshape(found)
        codes = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)])
        if (codes == 3).any():
            self.refuse(name, "must have codes 0, 1 and 2: found 3; it is damaged, or not ternary")
        return codes.astype(np.int8) - np.int8(1)

    def _scale(self, module: str) -> float:
        name = f"{module}.weight_scale"
        scales = self.floats(name).reshape(-1)
        if len(scales) != 1 or not math.isfinite(scales[0]) or scales[0] <= 0:
            self.refuse(name, f"must be one positive number: found {len(scales)}, {scales[:4].tolist()}")
        divides = self._settings.get("linear_class", "bitlinear") == "bitlinear"
        return float(np.float32(1) / scales[0] if divides else scales[0])


def _round(weights: Floats, dtype: str) -> TernaryMatrix:
    """As AutoBitLinear rounds online: the mean magnitude, at least 1e-5; what is multiplied is rounded to dtype."""
    scale = np.float32(1) / max(np.abs(weights).mean(dtype=np.float32), np.float32(1e-5))
    trits = np.rint(weights * scale).clip(-1, 1).astype(np.int8)
    magnitude = np.array([np.float32(1) / scale], dtype=np.float32)
    if dtype == "F16":
        magnitude = magnitude.astype(np.float16).astype(np.float32)
    elif dtype == "BF16":
        bits = magnitude.view(np.uint32)
        magnitude = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return TernaryMatrix.of_one_scale(trits, float(magnitude[0]))
