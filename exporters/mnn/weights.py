"""llm.mnn.weight: codes with their scales as a GGUF file has them, in MNN's order, one matrix after the other.

A matrix is a header, the codes, a scale (and base) for each run, and its bias:

    2 | rows, columns: int16 or int32 | n, -n/2 .. n/2 - 1: int8, what codes stand for | codes: high nibble first
    (base, scale) or scale: float32, one for each run | bias: float32

A weight is scale * (code - n/2) + base. MNN has codes of 4 and 8 bits for every format: see backends/onnx/matrices.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.onnx.matrices import Blocks, Floats, part_of, vector_of, weights_of
from edgeinfer.models import TensorRef
from edgeinfer.models.gguf import ModelFile

_LARGE = 1 << 15  # sizes that int16 does not hold


@dataclass(frozen=True)
class Placed:
    """A matrix in the file. Offsets and sizes are in bytes."""

    offset: int
    header: int
    codes: int
    scales: int
    bias: int
    bits: int  # 16 for half floats, else of a code
    block: int  # of a run
    shape: tuple[int, int]
    has_bases: bool

    @property
    def external(self) -> list[int]:
        """As an operator of MNN names its weights."""
        return [self.offset, self.header + self.codes, self.scales, self.bias, 0]

    @property
    def as_embeddings(self) -> list[int]:
        """As llm_config.json names the embeddings."""
        start = self.offset + self.header
        return [start, start + self.codes, self.scales, self.bits, self.block]

    @property
    def quantisation(self) -> dict[str, Any]:
        """The `quanParameter` of a convolution."""
        if self.bits == 16:
            return {"type": 3}
        n_out, n_in = self.shape
        return {
            "quantScale": 1.0,
            "scaleIn": 0.0,
            "scaleOut": 0.0,
            "useInt32": False,
            "has_scaleInt": False,
            "shapeInt32": max(self.shape) >= _LARGE,
            "type": 1,
            "aMaxOrBits": self.bits,
            "aMin": int(self.has_bases),
            "readType": n_out * (n_in // self.block) if self.has_bases else 0,
            "weightSize": 0,
        }


def place(file: ModelFile, matrix: TensorRef, bias: TensorRef | None, out: BinaryIO, with_bias: bool = True) -> Placed:
    """Write a matrix where the file ends; gives its place. with_bias: zeros where there is none, as operators need."""
    offset, part = out.tell(), part_of(file, matrix)
    weights, n_out, n_in = weights_of(part), part.shape[0], part.shape[1]
    if isinstance(weights, Floats):
        header, scales, bits, block, has_bases = 0, 0, 16, n_in, False
        codes = out.write(np.ascontiguousarray(weights.values.make(), np.float16).data)
    else:
        bits, block, has_bases = weights.bits, weights.size, weights.bases is not None
        header = out.write(_header(n_out, n_in, bits))
        codes = out.write(_codes(weights).data)
        scales = out.write(_scales(weights).data)
    n_bias = 0
    if with_bias:
        values = np.zeros(n_out, np.float32) if bias is None else vector_of(part_of(file, bias))
        n_bias = out.write(np.ascontiguousarray(values, np.float32).data)
    return Placed(offset, header, codes, scales, n_bias, bits, block, (n_out, n_in), has_bases)


def _header(n_out: int, n_in: int, bits: int) -> bytes:
    sizes = np.array([n_out, n_in], np.int32 if max(n_out, n_in) >= _LARGE else np.int16)
    half = 1 << bits - 1
    meanings = np.arange(-half, half).astype(np.int8)
    return b"\x02" + sizes.tobytes() + bytes([2 * half & 0xFF]) + meanings.tobytes()


def _codes(weights: Blocks) -> NDArray[np.uint8]:
    codes = np.asarray(weights.codes().make(), np.uint8)
    return codes if weights.bits == 8 else (codes << 4 | codes >> 4).astype(np.uint8)


def _scales(weights: Blocks) -> NDArray[np.float32]:
    scales = np.asarray(weights.scales.make(), np.float32)
    if weights.bases is None:
        return np.ascontiguousarray(scales)
    return np.stack((np.asarray(weights.bases.make(), np.float32), scales), axis=-1)
