"""Weights of 1 to 8 bits in words of 32, as compressed-tensors packs them; see `compressed`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.checkpoint.quantized.bits import (
    Places,
    as_words,
    in_a_stream,
    whole_in_words,
    words_of_stream,
    words_of_whole,
)
from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.quantized.scales import SCALES, Scales, scales_of, stored_scales
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import Floats
from edgeinfer.models.gguf import GGMLType

PlacesOf: TypeAlias = Callable[[int, int], Places]

# How codes lie, and in how many words; for 1, 2, 4 and 8 bits these are the same.
_LAYOUTS: dict[PlacesOf, Callable[[int, int], int]] = {in_a_stream: words_of_stream, whole_in_words: words_of_whole}
_MOST = 1 << 24  # inputs or outputs of a layer


class PackedTensor:
    """A weight (n_out, n_in), see edgeinfer.exporters.checkpoint.tensor.Tensor.

    places_of: where codes lie.  zeros: less half the range of the codes, as the codes are.  groups: of each input, None
    where they are runs.
    """

    dtype = "I32"
    type = GGMLType.F32

    def __init__(
        self,
        codes: StoredTensor,
        shape: tuple[int, int],
        bits: int,
        places_of: PlacesOf,
        scales: Scales,
        zeros: Scales | None,
        groups: StoredTensor | None,
    ) -> None:
        self._codes, self._bits, self._places_of = codes, bits, places_of
        self._scales, self._zeros, self._groups = scales, zeros, groups
        self.shape = shape

    def rows(self, first: int, last: int) -> Floats:
        """See Tensor.rows."""
        words = self._codes.read(first, last).view("<u4").reshape(last - first, self._codes.shape[1])
        codes = self._places_of(self.shape[1], self._bits).codes(np.ascontiguousarray(words.T, np.uint32))
        weights = np.ascontiguousarray(codes.T).astype(np.float32) - np.float32(1 << self._bits - 1)
        order = None if self._groups is None else _order(self._groups)
        if self._zeros is not None:
            weights -= _of_inputs(self._zeros.rows(first, last), order)
        weights *= _of_inputs(self._scales.rows(first, last), order)
        return weights

    def release(self) -> None:
        """See Tensor.release."""
        self._scales.release()
        if self._zeros is not None:
            self._zeros.release()


def _of_inputs(values: Floats, order: NDArray[np.int64] | None) -> Floats:
    return values if order is None or values.shape[1] == 1 else values[:, order]


def packed(module: str, widths: Iterable[int], blocks: Sequence[int], parts: Parts) -> PackedTensor:
    """The weight of a layer. widths: in bits, that the configuration names.  blocks: see scales_of.

    Raises ModelFileError.
    """
    name = f"{module}.weight_packed"
    codes = parts.take(name, ("I32",), 2)
    shape = _shape(module, parts)
    fitting = [
        (bits, places_of)
        for bits in sorted(widths)
        for places_of, n_words in _LAYOUTS.items()
        if codes.shape == (shape[0], n_words(shape[1], bits))
    ]
    if not fitting:
        parts.refuse(name, f"must hold {shape} weights of {sorted(widths)} bits: found {codes.shape} words")
    bits, places_of = fitting[0]
    scales = stored_scales(parts.take(f"{module}.weight_scale", SCALES), shape, blocks, parts)
    zeros = _zeros(module, shape, bits, places_of, blocks, parts)
    return PackedTensor(codes, shape, bits, places_of, scales, zeros, _groups(module, shape[1], parts))


def _shape(module: str, parts: Parts) -> tuple[int, int]:
    name = f"{module}.weight_shape"
    stored = parts.take(name, ("I64", "I32"), 1)
    found = stored.read().view("<i8" if stored.dtype == "I64" else "<i4").tolist()
    if len(found) != 2 or not all(0 < size <= _MOST for size in found):
        parts.refuse(name, f"must be the two sizes of a matrix, up to {_MOST}: found {found!r:.80}")
    return found[0], found[1]


def _zeros(
    module: str, shape: tuple[int, int], bits: int, places_of: PlacesOf, blocks: Sequence[int], parts: Parts
) -> Scales | None:
    name = f"{module}.weight_zero_point"
    stored = parts.take_if_there(name, ("I32",), 2)
    if stored is None:
        return None
    if stored.shape[0] != _LAYOUTS[places_of](shape[0], bits):
        parts.refuse(name, f"must hold zeros of {shape[0]} rows: found {stored.shape}")

    def read() -> Floats:
        codes = places_of(shape[0], bits).codes(as_words(stored))
        return codes.astype(np.float32) - np.float32(1 << bits - 1)

    return scales_of(name, read, (shape[0], stored.shape[1]), shape, blocks, parts)


def _groups(module: str, n_in: int, parts: Parts) -> StoredTensor | None:
    name = f"{module}.weight_g_idx"
    stored = parts.take_if_there(name, ("I32", "I64"), 1)
    if stored is not None and stored.shape != (n_in,):
        parts.refuse(name, f"must give {n_in} inputs a group: found {stored.shape}")
    return stored


def _order(stored: StoredTensor) -> NDArray[np.int64] | None:
    """For each input its place among the inputs ordered by group; None where groups are runs of inputs."""
    groups = stored.read().view("<i4" if stored.dtype == "I32" else "<i8")
    if (groups < 0).any():  # says that they are runs
        return None
    places = np.empty(len(groups), np.int64)
    places[np.argsort(groups, kind="stable")] = np.arange(len(groups))
    return places
