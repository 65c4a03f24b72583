"""Rotary frequencies and factors of queries, in decimal arithmetic, as libm differs by CPU and every bit counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext

from edgeinfer.models.spec import QueryTemperature

_PRECISION = 30  # digits
_TWO_PI = Decimal("6.283185307179586476925286766559")


def inverse_frequencies(base: float, n_dims: int) -> list[float]:
    """base ** (-2i / n_dims) for each of the n_dims / 2 pairs."""
    with localcontext(prec=_PRECISION + 10):  # for the factors that gather errors
        each = Decimal(base) ** (Decimal(-2) / Decimal(n_dims))
        frequencies = [Decimal(1)]
        while len(frequencies) < n_dims // 2:
            frequencies.append(frequencies[-1] * each)
    return [float(frequency) for frequency in frequencies[: n_dims // 2]]


def yarn_frequencies(
    frequencies: Sequence[float], base: float, factor: float, n_ctx: int, whole_pairs: bool = True
) -> list[float]:
    """Frequencies after YaRN (Peng et al., arXiv:2309.00071, section 3.2), beta_fast 32, beta_slow 1.

    n_ctx: the context that the model was first trained with.  whole_pairs: whether the ramp begins and ends at whole
    pairs, as in YaRN's own code and in llama.cpp; gpt-oss was trained with a ramp that does not.
    """
    n_dims = 2 * len(frequencies)
    with localcontext(prec=_PRECISION):
        log_base = Decimal(base).ln()

        def correction(n_rotations: int) -> float:
            return float(n_dims * (Decimal(n_ctx) / (n_rotations * _TWO_PI)).ln() / (2 * log_base))

        first, last = correction(32), correction(1)
    if whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, n_dims - 1)
    scaled = []
    for i, frequency in enumerate(frequencies):
        extrapolated = 1.0 - min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        scaled.append(frequency / factor * (1.0 - extrapolated) + frequency * extrapolated)
    return scaled


def yarn_magnitude(factor: float, log_multiplier: float = 0.0) -> float:
    """Factor on queries and keys both, so the square root of the paper's on their product (section 3.4).

    m(1) / m(log_multiplier) with m(t) = 1 + 0.1 t ln(factor), or 1 for factors below 1: DeepSeek's mscale over its
    mscale_all_dim, where the former is 1.
    """
    with localcontext(prec=_PRECISION):
        growth = max(Decimal(factor).ln(), Decimal(0)) / 10
        return float((1 + growth) / (1 + Decimal(log_multiplier) * growth))


def query_factors(temperature: QueryTemperature, n_ctx: int) -> list[float]:
    """Factor of the queries at position p, as element p // n_positions, for positions below n_ctx."""
    n_runs = -(-n_ctx // temperature.n_positions)
    with localcontext(prec=_PRECISION):
        return [float(1 + Decimal(temperature.scale) * Decimal(1 + run).ln()) for run in range(n_runs)]
