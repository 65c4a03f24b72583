"""Ternary matrices apart from any format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import UnsupportedModel

Trits = NDArray[np.int8]
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PART = 64  # weights that have one scale in every format that is read


@dataclass(frozen=True)
class TernaryMatrix:
    """weight = trit * scale. trits: (n_out, n_in).

    scales: (n_out, n_parts), of equal parts of each row; (1, 1) where the matrix has one.
    """

    trits: Trits
    scales: Floats

    @classmethod
    def of_one_scale(cls, trits: Trits, scale: float) -> TernaryMatrix:
        """A matrix whose weights are all -scale, 0 or scale."""
        return cls(trits, np.array([[scale]], dtype=np.float32))

    @classmethod
    def of_weights(cls, name: str, weights: Floats) -> TernaryMatrix:
        """The trits of weights (n_out, n_in) that are -s, 0 or s, with s for each 64 or the inputs of a row.

        Raises UnsupportedModel, naming the tensor, for others.
        """
        n_out, n_in = weights.shape
        parts = weights.reshape(n_out, -1, PART if n_in % PART == 0 else n_in)
        magnitudes = np.abs(parts)
        scales = magnitudes.max(axis=2)
        if not ((magnitudes == scales[:, :, None]) | (magnitudes == 0)).all() or not np.isfinite(scales).all():
            raise UnsupportedModel(
                f"tensor {name}: each {parts.shape[2]} weights of a row must be -s, 0 or s: found others; this matrix "
                f"is not ternary"
            )
        return cls(np.sign(weights).astype(np.int8), scales)

    @classmethod
    def of_codes(cls, name: str, codes: Trits, scales: Floats) -> TernaryMatrix:
        """The trits of weights code * scale. codes: int8 (n_out, n_in).  scales: one of each run of codes, or of all.

        Raises UnsupportedModel, naming the tensor, for codes that are no trits, and scales that are no numbers.
        """
        n_out = len(codes)
        scales = scales.reshape((1, 1) if scales.size == 1 else (n_out, -1))
        if codes.size and (codes.min() < -1 or codes.max() > 1):
            raise UnsupportedModel(
                f"tensor {name}: codes must be -1, 0 or 1: found {codes.min()}..{codes.max()}; this matrix is not "
                "ternary"
            )
        if not np.isfinite(scales).all():
            raise UnsupportedModel(f"tensor {name}: scales must be finite numbers: found others; the file is damaged")
        if (scales > 0).all():
            return cls(codes, scales)
        signs = np.sign(scales).astype(np.int8)
        turned = codes.reshape(*scales.shape, -1) * signs[:, :, None]
        return cls(turned.reshape(codes.shape), np.abs(scales))

    def weights(self) -> Floats:
        """(n_out, n_in) float32."""
        n_out, n_parts = len(self.trits), self.scales.shape[1]
        weights: Floats = self.trits.reshape(n_out, n_parts, -1) * self.scales[:, :, None]
        return weights.reshape(self.trits.shape)

    def row_scales(self, name: str) -> Floats:
        """The scale of each row, (n_out,). Raises UnsupportedModel, naming the tensor, for a row with several."""
        used = np.where(self._uses(), self.scales, 0)
        largest: Floats = used.max(axis=1)
        several = np.flatnonzero(((used != largest[:, None]) & (used != 0)).any(axis=1))
        if len(several):
            found = np.unique(used[several[0]][used[several[0]] != 0])
            raise UnsupportedModel(
                f"tensor {name}: each row must have one scale: found {len(found)} in row {several[0]}, such as "
                f"{found[0]:.6g} and {found[-1]:.6g}"
            )
        scales = np.where(largest > 0, largest, self.scales.max(axis=1))  # of a row without weights any will do
        return np.broadcast_to(scales, (len(self.trits),)).astype(np.float32)

    def codes(self) -> Codes:
        """Trits plus one, (n_out, n_in), in 0..2."""
        return (self.trits + np.int8(1)).view(np.uint8)

    def one_scale(self, name: str) -> float:
        """The scale of all. Raises UnsupportedModel where there are several."""
        found = np.unique(self._in_use())
        if len(found) > 1:
            raise UnsupportedModel(
                f"tensor {name}: i2_s has one scale a matrix: found {len(found)}; write tq1_0 or tq2_0, which have one "
                f"for each 256 inputs"
            )
        return float(found[0]) if len(found) else 1.0

    def scales_of(self, name: str, n_inputs: int) -> Floats:
        """Scales (n_out, n_in / n_inputs), rounded to float16. Raises UnsupportedModel where that cannot be."""
        n_out, n_in = self.trits.shape
        if n_in % n_inputs:
            raise UnsupportedModel(f"tensor {name}: rows must be a multiple of {n_inputs} inputs: found {n_in}")
        used = np.where(self._uses(), self.scales, 0)
        width = n_in // used.shape[1]
        if width >= n_inputs and width % n_inputs == 0:
            found = np.repeat(np.broadcast_to(used, (n_out, used.shape[1])), width // n_inputs, axis=1)
        else:
            found = self._joined(name, used, n_inputs // width)
        with np.errstate(over="ignore"):
            half = found.astype(np.float16).astype(np.float32)
        if not np.isfinite(half).all() or ((half == 0) != (found == 0)).any():
            raise UnsupportedModel(f"tensor {name}: scales must be float16 numbers: found {found.max()}, {found.min()}")
        return half

    def _joined(self, name: str, used: Floats, n_parts: int) -> Floats:
        """The scales of runs of n_parts parts; those of parts without weights do not count."""
        runs = used.reshape(len(used), -1, n_parts)
        found: Floats = runs.max(axis=2)
        if ((runs != found[:, :, None]) & (runs != 0)).any():
            raise UnsupportedModel(f"tensor {name}: the scales of 256 inputs differ; tq1_0 and tq2_0 have one for them")
        return found

    def _uses(self) -> NDArray[np.bool_]:
        """Whether a part has a weight that is not 0."""
        if self.scales.size == 1:
            return np.ones((1, 1), dtype=np.bool_)
        n_out, n_parts = self.scales.shape
        used: NDArray[np.bool_] = (self.trits != 0).reshape(n_out, n_parts, -1).max(axis=2)
        return used

    def _in_use(self) -> Floats:
        return self.scales[self._uses()]
