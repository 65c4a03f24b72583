"""AWQ (Lin et al., arXiv:2306.00978), as AutoAWQ writes it in version "gemm".

Of a layer (n_in, n_out), with four bits: qweight (n_in, n_out / 8) and qzeros (n_groups, n_out / 8), codes along the
rows; scales (n_groups, n_out). w[out, in] = scale[g, out] (code[in, out] - zero[g, out]), g = in / group_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.quantized.bits import Words, as_words, interleaved
from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.tensor import Floats, all_floats
from edgeinfer.models.gguf import GGMLType

_SCALES = ("F16", "BF16", "F32")
_MIDDLE = 8  # the zero where none are stored


@dataclass(frozen=True)
class _Loaded:
    """What is stored of a tensor."""

    words: Words  # see bits
    # scales, zeros: (n_out, n_groups)
    scales: Floats
    zeros: Floats


class AwqTensor:
    """A weight (n_out, n_in), see edgeinfer.exporters.checkpoint.tensor.Tensor.

    Its rows are columns of what is stored: all of that stays in memory until release.
    """

    dtype = "I32"
    type = GGMLType.F32

    def __init__(self, module: str, parts: Parts) -> None:
        """Takes the parts."""
        self._module, self._parts = module, parts
        self._codes = parts.take(f"{module}.qweight", ("I32",), 2)
        self._scales = parts.take(f"{module}.scales", _SCALES, 2)
        self._zeros = parts.take_if_there(f"{module}.qzeros", ("I32",), 2)
        (n_in, n_words), (n_groups, n_out) = self._codes.shape, self._scales.shape
        zeros = (n_groups, n_words) if self._zeros is None else self._zeros.shape
        sizes = n_out == 8 * n_words and all((n_out, n_in, n_groups)) and n_in % n_groups == 0
        if not sizes or zeros != (n_groups, n_words):
            parts.refuse(
                f"{module}.qweight",
                f"must be (n_in, n_out / 8), with scales (n_groups, n_out) and qzeros (n_groups, n_out / 8): found "
                f"{self._codes.shape}, {self._scales.shape} and {zeros}",
            )
        self.shape = (n_out, n_in)
        self._group = n_in // n_groups
        self._loaded: _Loaded | None = None

    def rows(self, first: int, last: int) -> Floats:
        """See Tensor.rows."""
        if self._loaded is None:
            self._loaded = self._load()
        loaded, start, end = self._loaded, first // 8, -(-last // 8)
        places = interleaved(8 * (end - start)).part(first - 8 * start, last - 8 * start)
        weights = places.codes(np.ascontiguousarray(loaded.words[:, start:end].T)).astype(np.float32)
        weights -= np.repeat(loaded.zeros[first:last], self._group, axis=1)
        weights *= np.repeat(loaded.scales[first:last], self._group, axis=1)
        return weights

    def release(self) -> None:
        """See Tensor.release."""
        self._loaded = None

    def _load(self) -> _Loaded:
        scales = np.ascontiguousarray(all_floats(self._scales).T)
        if not np.isfinite(scales).all():
            self._parts.refuse(f"{self._module}.scales", "must be finite: found others")
        zeros = np.full(scales.shape, _MIDDLE, np.float32)
        if self._zeros is not None:
            words = np.ascontiguousarray(as_words(self._zeros).T)
            zeros = interleaved(self.shape[0]).codes(words).astype(np.float32)
        return _Loaded(as_words(self._codes), scales, zeros)


def read(settings: Config, parts: Parts) -> dict[str, AwqTensor]:
    """The weights of all layers with a qweight. Raises ModelFileError, UnsupportedModel."""
    key = "version" if "version" in settings else "format"
    if settings.text(key, "gemm").lower() != "gemm":
        settings.refuse(key, "must be gemm: weights of other layouts are not read")
    key = "bits" if "bits" in settings else "w_bit"
    if settings.integer(key, 4) != 4:
        settings.refuse(key, "must be 4")
    return {f"{module}.weight": AwqTensor(module, parts) for module in parts.ending(".qweight")}
