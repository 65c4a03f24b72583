"""Scales of a weight, and its zeros: one, one a row, one a block of 128 x 128, or one a run of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import Floats, all_floats

SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # U8: exponents as in F8_E8M0


class Scales:
    """Numbers that stand for blocks of a weight; they are read with the first rows, and kept until release.

    name: of the tensor that holds them.  read: gives them.  shape: of the weight.  found: of the numbers, for each axis
    of the weight ceil(size / block).  blocks: their sizes.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Floats],
        shape: tuple[int, ...],
        found: tuple[int, ...],
        blocks: Sequence[int],
        parts: Parts,
    ) -> None:
        self._name, self._read, self._shape = name, read, shape
        self._found, self._blocks, self._parts = found, blocks, parts
        self._values: Floats | None = None

    def rows(self, first: int, last: int) -> Floats:
        """For rows first..last-1 of the weight, (last - first, n_in) or (last - first, 1). Raises ModelFileError."""
        if self._values is None:
            values = self._read().reshape(self._found)
            if not np.isfinite(values).all():
                self._parts.refuse(self._name, f"must be finite: found {values[~np.isfinite(values)].flat[0]}")
            self._values = values
        index = np.unravel_index(np.arange(first, last), self._shape[:-1]) if len(self._shape) > 1 else ()
        places = tuple(each // block for each, block in zip(index, self._blocks[:-1], strict=True))
        found = self._values[places] if places else self._values[None]
        if found.shape[1] == 1:
            return found
        return np.repeat(found, self._blocks[-1], axis=1)[:, : self._shape[-1]]

    def release(self) -> None:
        """Forget the numbers until they are needed again."""
        self._values = None


def stored_scales(stored: StoredTensor, shape: tuple[int, ...], blocks: Sequence[int], parts: Parts) -> Scales:
    """The scales of a weight as they are stored, in one of SCALES; see scales_of. Raises ModelFileError."""
    exponents = replace(stored, dtype="F8_E8M0") if stored.dtype == "U8" else stored
    return scales_of(stored.name, partial(all_floats, exponents), stored.shape, shape, blocks, parts)


def scales_of(
    name: str,
    read: Callable[[], Floats],
    found: tuple[int, ...],
    shape: tuple[int, ...],
    blocks: Sequence[int],
    parts: Parts,
) -> Scales:
    """Find which block of a weight each number stands for.

    found: shape of the numbers: one, or for each axis of the weight one, as many as the axis has, or one a block; axes
    that are missing at the end are one.  blocks: sizes that the configuration names, for the last axes.  Others: see
    Scales. Raises ModelFileError.
    """
    n_axes = len(shape)
    expected = (1,) * n_axes if all(size == 1 for size in found) else (*found, *(1,) * (n_axes - len(found)))
    named = ([0] * n_axes + list(blocks))[-n_axes:]
    fits = len(expected) == n_axes and n_axes > 0
    sizes = [_block(*each) for each in zip(shape, expected, named, strict=True)] if fits else [0]
    if not all(sizes):
        parts.refuse(name, f"must have a scale for all of {shape}, each row or each block: found {found}")
    return Scales(name, read, shape, expected, sizes, parts)


def _block(size: int, n: int, named: int) -> int:
    """How many numbers of an axis a scale stands for; 0 where that cannot be."""
    if n == 1 or n == size:
        return max(1, size // n) if n else 0
    if named > 0 and -(-size // named) == n:
        return named
    return size // n if n and size % n == 0 else 0
