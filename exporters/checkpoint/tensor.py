"""A tensor of a checkpoint, whatever it is stored as."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ModelFileError
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType

Floats = NDArray[np.float32]

READ = "F32, F16, BF16, F64 or float8 (F8_E4M3, F8_E5M2)"  # for messages
_SAME = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}


class Tensor(Protocol):
    """Weights that are read some rows at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights."""
        ...

    @property
    def dtype(self) -> str:
        """What is stored, as safetensors calls it."""
        ...

    @property
    def type(self) -> GGMLType | None:
        """What holds the weights without loss, None if they are no floats."""
        ...

    def rows(self, first: int, last: int) -> Floats:
        """Rows first..last-1, (last - first, n_in). Raises ModelFileError."""
        ...

    def release(self) -> None:
        """Give back what reading keeps in memory."""
        ...


class PlainTensor:
    """A tensor that is stored as floats, see Tensor; or as anything, of which there are only bytes."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.shape = stored.shape
        self.dtype = stored.dtype

    @property
    def type(self) -> GGMLType | None:
        """See Tensor."""
        if self.dtype in ("F64", "F8_E8M0"):
            return GGMLType.F32
        return GGMLType.F16 if self.dtype in _TABLES else _SAME.get(self.dtype)

    def rows(self, first: int, last: int) -> Floats:
        """See Tensor. Raises ModelFileError, also where they are no floats."""
        return floats_of(self.stored, first, last)

    def release(self) -> None:
        """See Tensor."""


def floats_of(stored: StoredTensor, first: int, last: int) -> Floats:
    """Rows first..last-1 of a tensor that is stored as floats: (last - first, n_in). Raises ModelFileError."""
    data, shape = stored.read(first, last), (last - first, stored.shape[-1] if stored.shape else 1)
    if stored.dtype in _TABLES:
        return _TABLES[stored.dtype][data].reshape(shape)
    if stored.dtype == "F64":
        return data.view("<f8").astype(np.float32).reshape(shape)
    if stored.dtype not in _SAME:
        raise ModelFileError(f"{stored.file.path}: tensor {stored.name} must be {READ}: found {stored.dtype}")
    return dequantize(_SAME[stored.dtype], data, shape)


def all_floats(stored: StoredTensor) -> Floats:
    """A whole tensor that is stored as floats, in its shape. Raises ModelFileError."""
    return floats_of(stored, 0, stored.n_rows).reshape(stored.shape)


def _table(exponent_bits: int, bias: int, not_numbers: str) -> Floats:
    """The 256 numbers of a float of 8 bits (Micikevicius et al., arXiv:2209.05433).

    not_numbers: "ieee": the largest exponent holds infinity and NaN.  "fn": only the largest code of each sign is NaN.
    "fnuz": only the code of -0 is NaN.
    """
    codes = np.arange(256)
    fraction_bits = 7 - exponent_bits
    exponents = codes >> fraction_bits & (1 << exponent_bits) - 1
    fractions = (codes & (1 << fraction_bits) - 1) / (1 << fraction_bits)
    sizes = np.where(exponents > 0, 1 + fractions, fractions) * 2.0 ** (np.maximum(exponents, 1) - bias)
    values: Floats = np.where(codes < 128, sizes, -sizes).astype(np.float32)
    if not_numbers == "ieee":
        largest = exponents == (1 << exponent_bits) - 1
        values[largest] = np.where(fractions[largest] > 0, np.nan, np.where(codes[largest] < 128, np.inf, -np.inf))
    else:
        values[[127, 255] if not_numbers == "fn" else [128]] = np.nan
    return values


_TABLES = {
    "F8_E4M3": _table(4, 7, "fn"),
    "F8_E5M2": _table(5, 15, "ieee"),
    "F8_E4M3FNUZ": _table(4, 8, "fnuz"),
    "F8_E5M2FNUZ": _table(5, 16, "fnuz"),
    "F8_E8M0": np.append(np.float32(2) ** np.arange(-127, 128, dtype=np.float32), np.float32(np.nan)),
}
