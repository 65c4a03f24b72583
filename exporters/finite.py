"""Weights that are no numbers: what an export reads is looked at as it is read, and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ModelFileError
from edgeinfer.models.formats.finite import first_not_finite
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType, ModelFile

_PIECE_BYTES = 8 << 20  # of a mapped tensor that are in memory at once while it is looked at


class FiniteFile(ModelFile):
    """A model file whose weights are numbers as far as they are read: reading others raises ModelFileError."""

    def data(self, name: str, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
        """See ModelFile.data. Raises ModelFileError too, for bytes in which a weight is NaN or infinite."""
        last = self.tensors[name].n_bytes if last is None else last
        if not self.makes(name):  # what is made is of other tensors, which were looked at
            self._check(name, first, last)
        return super().data(name, first, last)

    def check_tensor(self, name: str) -> None:
        """Raises ModelFileError for a tensor in which a weight is NaN or infinite."""
        self._check(name, 0, self.tensors[name].n_bytes)

    def _check(self, name: str, first: int, last: int) -> None:
        """Look at the blocks that bytes first..last-1 are in, some at a time."""
        info = self.tensors[name]
        if info.type == GGMLType.I2_S:
            first, last = info.n_bytes - I2_S_TAIL_BYTES, info.n_bytes  # one scale, behind all blocks
        n = info.type.block_bytes
        start, end = first // n * n, -(-last // n) * n
        step = _PIECE_BYTES // n * n
        for at in range(start, end, step):
            stop = min(end, at + step)
            found = first_not_finite(info.type, super().data(name, at, stop))
            if found is not None:
                weight = at // n * info.type.block_elements + found
                refuse(self.path, name, info.type.name, weight, info.shape[-1] if info.shape else 1)
            if end - start > step:
                self.release(name, at, stop)


def check_floats(path: Path, name: str, dtype: str, rows: NDArray[np.float32], first: int = 0) -> None:
    """Raises ModelFileError where weights (n, n_in), rows from first on, are not all numbers."""
    found = first_not_finite(GGMLType.F32, np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8))
    if found is not None:
        refuse(path, name, dtype, first * rows.shape[-1] + found, rows.shape[-1])


def refuse(path: Path, name: str, dtype: str, weight: int, n_in: int) -> NoReturn:
    """Raises ModelFileError about a weight, counted through all rows of a tensor of n_in columns."""
    row, column = divmod(weight, max(1, n_in))
    raise ModelFileError(
        f"{path}: tensor {name} ({dtype}) must have numbers: found NaN or infinity in row {row}, at column {column} or "
        "in the block that begins there: the file is damaged, or its training failed; get it anew"
    )
