"""GPTQ (Frantar et al., arXiv:2210.17323), as AutoGPTQ and GPTQModel write it.

Of a layer (n_in, n_out): qweight, codes down the columns, (n_in bits / 32, n_out); scales (n_groups, n_out); qzeros,
codes along the rows, (n_groups, n_out bits / 32); g_idx (n_in,), the group of each input.
w[out, in] = scale[g, out] (code[in, out] - zero[g, out]), g = g_idx[in]. Format "gptq" stores zero - 1 in as many bits
as a code has, "gptq_v2" zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.quantized.bits import Words, as_words, in_a_stream
from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.tensor import Floats, all_floats
from edgeinfer.models.gguf import GGMLType

_BITS = (2, 3, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}  # and what is added to the zeros that are stored
_SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class _Loaded:
    """What is stored of a tensor."""

    words: Words  # see bits
    # scales, zeros: (n_out, n_groups)
    scales: Floats
    zeros: Floats
    groups: NDArray[np.int64]  # (n_in,)


class GptqTensor:
    """A weight (n_out, n_in), see edgeinfer.exporters.checkpoint.tensor.Tensor.

    Its rows are columns of what is stored: all of that stays in memory until release.
    """

    dtype = "I32"
    type = GGMLType.F32

    def __init__(self, module: str, bits: int, added: int, group_size: int, parts: Parts) -> None:
        """Takes the parts. bits: of a code.  added: to the zeros.  group_size: where no g_idx is stored."""
        self._module, self._bits, self._added, self._group_size, self._parts = module, bits, added, group_size, parts
        self._codes = parts.take(f"{module}.qweight", ("I32",), 2)
        self._zeros = parts.take(f"{module}.qzeros", ("I32",), 2)
        self._scales = parts.take(f"{module}.scales", _SCALES, 2)
        self._groups = parts.take_if_there(f"{module}.g_idx", ("I32", "I64"), 1)
        (n_words, n_out), n_groups = self._codes.shape, self._scales.shape[0]
        self.shape = (n_out, n_words * 32 // bits)
        if (
            self._zeros.shape != (n_groups, -(-n_out * bits // 32))
            or self._scales.shape[1] != n_out
            or n_words * 32 % bits
            or not all((*self.shape, n_groups))
        ):
            parts.refuse(
                f"{module}.qweight",
                f"with {bits} bits must be (n_in {bits} / 32, n_out), scales (n_groups, n_out), qzeros (n_groups, "
                f"n_out {bits} / 32): found {self._codes.shape}, {self._scales.shape}, {self._zeros.shape}",
            )
        self._loaded: _Loaded | None = None

    def rows(self, first: int, last: int) -> Floats:
        """See Tensor.rows."""
        if self._loaded is None:
            self._loaded = self._load()
        loaded = self._loaded
        codes = in_a_stream(self.shape[1], self._bits).codes(loaded.words[:, first:last])
        weights = np.ascontiguousarray(codes.T).astype(np.float32)
        weights -= loaded.zeros[first:last][:, loaded.groups]
        weights *= loaded.scales[first:last][:, loaded.groups]
        return weights

    def release(self) -> None:
        """See Tensor.release."""
        self._loaded = None

    def _load(self) -> _Loaded:
        zeros = as_words(self._zeros)
        stored = in_a_stream(self.shape[0], self._bits).codes(np.ascontiguousarray(zeros.T))
        scales = np.ascontiguousarray(all_floats(self._scales).T)
        if not np.isfinite(scales).all():
            self._parts.refuse(f"{self._module}.scales", "must be finite: found others")
        n_groups = scales.shape[1]
        found = stored + np.uint8(self._added) & np.uint8((1 << self._bits) - 1)
        return _Loaded(as_words(self._codes), scales, found.astype(np.float32), self._group_of(n_groups))

    def _group_of(self, n_groups: int) -> NDArray[np.int64]:
        """The group of each input (n_in,). Raises ModelFileError."""
        n_in = self.shape[1]
        if self._groups is None:
            size = self._group_size if self._group_size > 0 else n_in
            groups = np.arange(n_in) // size
        else:
            groups = self._groups.read().view("<i4" if self._groups.dtype == "I32" else "<i8").astype(np.int64)
        if len(groups) != n_in or groups.min() < 0 or groups.max() >= n_groups:
            self._parts.refuse(
                f"{self._module}.g_idx",
                f"must give {n_in} inputs a group in 0..{n_groups - 1}: found {len(groups)} in "
                f"{groups.min(initial=0)}..{groups.max(initial=0)}",
            )
        return groups


def read(settings: Config, parts: Parts) -> dict[str, GptqTensor]:
    """The weights of all layers with a qweight. Raises ModelFileError, UnsupportedModel."""
    if settings.flag("is_marlin_format", False):
        settings.refuse("is_marlin_format", "must be false: weights of this layout are not read")
    key = "checkpoint_format" if "checkpoint_format" in settings else "format"
    added = _FORMATS[settings.choice(key, tuple(_FORMATS), "gptq")]
    settings.choice("pack_dtype", ("int32",), "int32")
    group_size = settings.integer("group_size", -1, least=-1)
    bits = settings.integer("bits")
    return {
        f"{module}.weight": GptqTensor(module, _bits(module, bits, settings, parts), added, group_size, parts)
        for module in parts.ending(".qweight")
    }


def _bits(module: str, named: int, settings: Config, parts: Parts) -> int:
    """The bits of a layer, which may differ from those that are named (GPTQModel's "dynamic"): its zeros tell.

    Raises UnsupportedModel for a number that nobody packs.
    """
    if named not in _BITS:
        settings.refuse("bits", f"must be one of {_BITS}")
    scales, zeros = parts.shape(f"{module}.scales"), parts.shape(f"{module}.qzeros")
    if not settings.get("dynamic") or len(scales) != 2 or len(zeros) != 2:
        return named
    return next((bits for bits in _BITS if zeros[1] == -(-scales[1] * bits // 32)), named)
