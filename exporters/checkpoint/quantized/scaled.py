"""Weights of eight bits with scales beside them: float8, and int8.

w = scale code, or scale (code - zero). `weight_scale_inv` of FP8 checkpoints is the scale all the same, one for each
block of 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.quantized.scales import SCALES, Scales, stored_scales
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import Floats, floats_of
from edgeinfer.models.gguf import GGMLType

FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# Ends of the names of scales, and what stands there in the name of the weight. transformers, fbgemm, Mistral.
_ENDS = {"_scale_inv": "", ".weight_scale": ".weight", ".qscale_weight": ".weight"}


class ScaledTensor:
    """A weight, see edgeinfer.exporters.checkpoint.tensor.Tensor."""

    type = GGMLType.F32

    def __init__(self, codes: StoredTensor, scales: Scales, zeros: Scales | None = None) -> None:
        self._codes, self._scales, self._zeros = codes, scales, zeros
        self.shape, self.dtype = codes.shape, codes.dtype

    def rows(self, first: int, last: int) -> Floats:
        """See Tensor.rows."""
        if self.dtype == "I8":
            codes = self._codes.read(first, last).view(np.int8).astype(np.float32).reshape(last - first, self.shape[-1])
        else:
            codes = floats_of(self._codes, first, last)
        if self._zeros is not None:
            codes = codes - self._zeros.rows(first, last)
        return codes * self._scales.rows(first, last)

    def release(self) -> None:
        """See Tensor.release."""
        self._scales.release()
        if self._zeros is not None:
            self._zeros.release()


def read_fp8(settings: Config, parts: Parts) -> dict[str, ScaledTensor]:
    """The float8 weights with scales. Raises ModelFileError."""
    blocks = settings.integers("weight_block_size", 2, least=1) if "weight_block_size" in settings else []
    made = {}
    for end, instead in _ENDS.items():
        for name in parts.ending(end):
            if parts.dtype(name + instead) in FLOAT8:
                made[name + instead] = scaled(name + instead, name + end, FLOAT8, blocks, parts)
    parts.drop_activations()
    return made


def scaled(weight: str, scale: str, dtypes: Sequence[str], blocks: Sequence[int], parts: Parts) -> ScaledTensor:
    """A weight of one of these types, with its scales. blocks: see scales_of. Raises ModelFileError."""
    codes, stored = parts.take(weight, dtypes), parts.take(scale, SCALES)
    return ScaledTensor(codes, stored_scales(stored, codes.shape, blocks, parts))
