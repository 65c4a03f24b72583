"""The chain of edgeinfer.sampling in numpy, with nothing left out to be fast: what sampler.cpp is checked against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.sampling import SamplingParams, stream_key

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def simply_drawn(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The token at a position.  logits: (n_vocab,)."""
    assert params.seed is not None
    ids = simple_candidates(logits, params)
    noise = gumbel(noise_bits(ids, stream_key(params.seed, position)))
    with np.errstate(over="ignore"):
        scores = (logits[ids].astype(np.float64) - float(logits.max())) / params.temperature + noise
    return int(ids[scores == scores.max()].min())


def simple_candidates(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.intp]:
    """Ids that top_k, top_p and min_p leave, the most likely first."""
    ids = np.argsort(-logits, kind="stable")
    if 0 < params.top_k < logits.size:
        ids = ids[: params.top_k]
        summed = ids
    else:
        summed = np.sort(ids)  # the order of the sum is the order that the tokens are found in
    weights = exp(logits[summed], logits.max())
    total = np.cumsum(weights)[-1]
    order = np.argsort(-weights, kind="stable")
    ids, weights = summed[order], weights[order]
    if params.top_p < 1.0:
        enough = np.flatnonzero(np.cumsum(weights) >= params.top_p * total)
        end = int(enough[0]) + 1 if enough.size else ids.size
        ids, weights = ids[:end], weights[:end]
    kept: NDArray[np.intp] = ids[weights >= params.min_p]
    return kept


def noise_bits(ids: NDArray[np.intp], key: int) -> NDArray[np.uint64]:
    """64 random bits for each id; see edgeinfer.sampling.  ids: (m,)."""
    x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def gumbel(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Gumbel noise from 64 random bits; see edgeinfer.sampling.  bits: (m,)."""
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -log(-log(uniform))


def exp(x: NDArray[np.float32], largest: np.float32) -> NDArray[np.float64]:
    """e**(x - largest), to within 1 ulp for differences in -700..0; below as at -700.  x: (m,)."""
    # Longer temporaries come from fresh pages at each step: 5 times slower.
    chunks = [x[start : start + 4096] for start in range(0, x.size, 4096)]
    return np.concatenate([_exp(np.maximum(chunk.astype(np.float64) - float(largest), -700.0)) for chunk in chunks])


def _exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e**x by the method and constants of fdlibm's e_exp.c.

    x: (m,). x = k ln 2 + r with |r| <= ln(2) / 2; then exp(r) by a rational approximation.
    """
    k = np.rint(x * 1.44269504088896338700e00)
    high = x - k * 6.93147180369123816490e-01
    low = k * 1.90821492927058770002e-10
    r = high - low
    t = r * r
    p = 6.61375632143793436117e-05 + t * (-1.65339022054652515390e-06 + t * 4.13813679705723846039e-08)
    c = r - t * (1.66666666666666019037e-01 + t * (-2.77777777770155933842e-03 + t * p))
    y = 1.0 - ((low - (r * c) / (2.0 - c)) - high)
    return np.ldexp(y, k.astype(np.int32))


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm to within 1 ulp for normal x > 0, by the method and constants of fdlibm's e_log.c.

    x: (m,). x = 2**k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); then a polynomial in s = f / (2 + f).
    """
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.70710678118654752440
    k = (exponent - small).astype(np.float64)
    f = np.where(small, mantissa + mantissa, mantissa) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = 1.818357216161805012e-01 + z * (1.531383769920937332e-01 + z * 1.479819860511658591e-01)
    p = 2.857142874366239149e-01 + z * (2.222219843214978396e-01 + z * p)
    p = z * (6.666666666666735130e-01 + z * (3.999999999940941908e-01 + z * p))
    half = 0.5 * f * f
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + p) + k * 1.90821492927058770002e-10)) - f)
