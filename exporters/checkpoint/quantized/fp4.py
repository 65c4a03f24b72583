"""Weights of four bits, E2M1, with a scale for each 16 (NVFP4) or 32 inputs (MXFP4).

Two to a byte, the first in the lower half. MXFP4 and its scales of 2^(e - 127) are of the OCP Microscaling Formats 1.0;
NVFP4 has scales in float8 and one float32 for the whole weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.quantized.scales import Scales, scales_of
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import Floats, all_floats
from edgeinfer.models.formats.mxfp4 import DOUBLED
from edgeinfer.models.gguf import GGMLType

_NUMBERS = DOUBLED.astype(np.float32) / np.float32(2)


class Fp4Tensor:
    """A weight, see edgeinfer.exporters.checkpoint.tensor.Tensor."""

    dtype = "F4"
    type = GGMLType.F32

    def __init__(self, codes: StoredTensor, scales: Scales) -> None:
        self._codes, self._scales = codes, scales
        self.shape = (*codes.shape[:-1], 2 * codes.shape[-1])

    def rows(self, first: int, last: int) -> Floats:
        """See Tensor.rows."""
        data = self._codes.read(first, last).reshape(last - first, self._codes.shape[-1])
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(last - first, self.shape[-1])
        return _NUMBERS[codes] * self._scales.rows(first, last)

    def release(self) -> None:
        """See Tensor.release."""
        self._scales.release()


def fp4(
    name: str, codes: StoredTensor, read: Callable[[], Floats], found: tuple[int, ...], n_in: int, parts: Parts
) -> Fp4Tensor:
    """A weight with a scale for each n_in inputs; see scales_of. Raises ModelFileError."""
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else ()
    if not shape or shape[-1] % n_in or found != (*shape[:-1], shape[-1] // n_in):
        parts.refuse(name, f"must have a scale for each {n_in} inputs of {shape}: found {found}")
    return Fp4Tensor(codes, scales_of(name, read, found, shape, [n_in], parts))


def nvfp4(codes: StoredTensor, scale: StoredTensor, whole: StoredTensor, divides: bool, parts: Parts) -> Fp4Tensor:
    """A weight with scales of 16 inputs, multiplied with that of the whole or divided by it. Raises ModelFileError."""
    if math.prod(whole.shape) != 1:
        parts.refuse(whole.name, f"must be one number: found {whole.shape}")

    def read() -> Floats:
        factor = all_floats(whole).reshape(())
        if divides and not factor:
            parts.refuse(whole.name, "must not be 0")
        return all_floats(scale) / factor if divides else all_floats(scale) * factor

    return fp4(scale.name, codes, read, scale.shape, 16, parts)


def mxfp4(codes: StoredTensor, scale: StoredTensor, parts: Parts) -> Fp4Tensor:
    """A weight with scales of 32 inputs, powers of two. Raises ModelFileError."""
    exponents = replace(scale, dtype="F8_E8M0")
    return fp4(scale.name, codes, partial(all_floats, exponents), scale.shape, 32, parts)
