"""The factors of queries by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models import Attention, query_factors


@dataclass(frozen=True)
class QueryScales:
    """The factor of the queries at each position: the attention's scale, times what grows with the position."""

    # (n_runs,) float32, for the positions 0..n_positions - 1, n_positions..2 n_positions - 1, and so on. Queries are
    # multiplied after the rotation.
    values: NDArray[np.float32]
    n_positions: int

    @classmethod
    def of(cls, attention: Attention, n_ctx: int) -> QueryScales:
        """Those of positions below n_ctx. Both factors are multiplied in double precision and rounded once."""
        if attention.query_temperature is None:
            return cls(np.array([attention.scale], dtype=np.float32), n_ctx)
        factors = np.array(query_factors(attention.query_temperature, n_ctx))
        scales = (np.full(len(factors), attention.scale) * factors).astype(np.float32)
        return cls(scales, min(attention.query_temperature.n_positions, n_ctx))

    def at(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """The factors of some positions, an array of their shape."""
        factors: NDArray[np.float32] = self.values[positions // self.n_positions]
        return factors
