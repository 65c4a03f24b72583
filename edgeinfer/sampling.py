"""From logits to a token: `SamplingParams` and `sample`.

The chain is llama.cpp's default one: penalties, top_k, top_p, min_p, temperature, draw. So top_p and min_p look at the
probabilities at temperature 1, whatever the temperature is.

The draw is Gumbel-max: the token with the largest (logit - largest logit) / temperature + noise, which follows the
softmax (Maddison et al., arXiv:1411.0030). The noise of a token is a function of (seed, position, token id) alone:

    mix(x)  = SplitMix64's finaliser (Steele, Lea and Flood 2014; Stafford's variant 13), modulo 2**64
    key     = mix(mix(seed + G) + (position + 1) * G)           G = 0x9e3779b97f4a7c15
    bits    = mix(key + (id + 1) * G)
    u       = (bits // 2**12 + 0.5) / 2**52                     in [2**-53, 1 - 2**-53], exact in float64
    noise   = -log(-log(u))                                     in (-3.61, 36.74)

so a token drawn on its own is the token drawn while a draft is checked.

Every bit of the choice is defined: comparisons, IEEE + - * / one by one in float64, sums by `cumsum` (left to right), a
log and an exp of our own. numpy's log, exp and sum are not used: they differ by CPU.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from edgeinfer.arguments import check_integer, check_number
from edgeinfer.errors import InvalidArgument, NumericalError, ShapeError

Logits: TypeAlias = NDArray[np.float32]  # (n_vocab,) or (m,)
Floats: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.intp]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from the logits. Raises InvalidArgument where a value is out of range.

    temperature: logits are divided by it before the draw; 0 takes the largest one.
    top_k: the k largest logits stay; 0 keeps all.  top_p: of these the smallest set, likeliest first, that holds this
    share of the probability; 1 keeps all.  min_p: of these the ones at least this share as likely as the likeliest.
    repeat_penalty: positive logits of tokens seen lately are divided by it, negative ones multiplied; 1 is off.
    frequency_penalty, presence_penalty: taken off the logit, once for each time seen and once in all; 0 is off.
    penalty_last_n: how many tokens back "lately" reaches, prompt included; 0 switches the penalties off, -1 is all.
    seed: 0..2**64 - 1; None means that one is drawn for each request.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check(check_number, "temperature", 0.0, 1e6)
        self._check(check_integer, "top_k", 0, 1 << 31)
        self._check(check_number, "top_p", 0.0, 1.0)
        self._check(check_number, "min_p", 0.0, 1.0)
        self._check(check_number, "repeat_penalty", 1e-6, 1e6)
        self._check(check_number, "frequency_penalty", -1e6, 1e6)
        self._check(check_number, "presence_penalty", -1e6, 1e6)
        self._check(check_integer, "penalty_last_n", -1, 1 << 31)
        if self.seed is not None:
            self._check(check_integer, "seed", 0, _WORD)

    def _check(self, check: Callable[..., float], name: str, least: float, most: float) -> None:
        object.__setattr__(self, name, check(name, getattr(self, name), least, most))

    def with_seed(self) -> SamplingParams:
        """The same parameters, with a seed of 32 random bits drawn where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the logits."""
        neutral = self.repeat_penalty == 1.0 and self.frequency_penalty == 0.0 and self.presence_penalty == 0.0
        return self.penalty_last_n != 0 and not neutral


def sample(logits: Logits, params: SamplingParams, position: int, previous: Sequence[int] = ()) -> int:
    """Id of the token at `position`, the index in the whole text of the token to be chosen.

    logits: (n_vocab,) float32, not changed.  previous: the tokens before it, prompt included; only the penalties look
    at them. Equal values are told apart by the lower id.
    Raises NumericalError if the largest logit is not a finite number or any is NaN, ShapeError, and InvalidArgument if
    a draw is wanted without a seed.
    """
    if logits.ndim != 1 or logits.size == 0 or logits.dtype != np.float32:
        raise ShapeError(f"logits must be (n_vocab,) float32: found {logits.shape} {logits.dtype}")
    if params.has_penalties:
        logits = penalize(logits, params, previous)
    likeliest = int(logits.argmax())  # the first NaN, if there is one
    largest = float(logits[likeliest])
    if not math.isfinite(largest):
        raise NumericalError(
            f"the largest of {logits.size} logits at position {position} is {largest} (token {likeliest}): the model "
            "file is damaged or does not fit its hyper-parameters"
        )
    if params.is_greedy:
        return likeliest
    if params.seed is None:
        raise InvalidArgument("a draw at a temperature above 0 needs a seed: use params.with_seed()")
    ids = candidates(logits, params)
    return _draw(ids, logits[ids], params.temperature, _stream_key(params.seed, position))


def penalize(logits: Logits, params: SamplingParams, previous: Sequence[int]) -> Logits:
    """Copy of the logits in which the last `penalty_last_n` tokens are less likely, as llama.cpp defines it.

    logits: (n_vocab,) float32, or a drafter's for the first tokens alone.
    """
    recent = previous if params.penalty_last_n < 0 else previous[-params.penalty_last_n :]
    if len(recent) == 0:
        return logits
    ids, counts = np.unique(np.asarray(recent, dtype=np.intp), return_counts=True)
    ids, counts = ids[ids < logits.size], counts[ids < logits.size]
    seen = logits[ids].astype(np.float64)
    seen = np.where(seen <= 0.0, seen * params.repeat_penalty, seen / params.repeat_penalty)
    seen = seen - (counts * params.frequency_penalty + params.presence_penalty)
    penalized = logits.copy()
    penalized[ids] = seen
    return penalized


def candidates(logits: Logits, params: SamplingParams) -> Ids:
    """Ids that top_k, top_p and min_p leave, (m,), m >= 1, in no particular order.

    logits: (n_vocab,) float32 with a finite maximum. Probabilities are those among the tokens that top_k leaves.
    """
    if 0 < params.top_k < logits.size:
        ids = _largest(logits, params.top_k)
        return ids[_likely(logits[ids], params.top_p, params.min_p)]
    return _likely(logits, params.top_p, params.min_p)


def _likely(logits: Logits, top_p: float, min_p: float) -> Ids:
    """Rows that top_p and then min_p leave.  logits: (n,)."""
    if top_p == 1.0 and min_p == 0.0:
        return np.arange(logits.size)
    largest = logits.max()
    # A superset of what min_p leaves: libm's log may be off by a rounding, not by a tenth.
    within = largest - np.float32(0.1 - math.log(min_p)) if min_p > 0.0 else -np.inf
    rows: Ids = np.flatnonzero(logits >= within)
    weights = exp(logits[rows], largest)
    likely = weights >= min_p
    rows, weights = rows[likely], weights[likely]
    if top_p == 1.0:
        return rows
    # The nucleus takes the likeliest first, so what min_p drops can only be its end, and need not be sorted.
    enough = top_p * float(np.cumsum(exp(logits, largest))[-1])
    for size in (256, 4096, 32768, rows.size):  # mostly a few suffice, and sorting 150 000 takes 15 ms
        nucleus = _largest(weights, min(size, rows.size))
        sums = np.cumsum(weights[nucleus])
        if sums[-1] >= enough:
            return rows[nucleus[: int(np.searchsorted(sums, enough)) + 1]]
    return rows


def _largest(values: Logits | Floats, k: int) -> Ids:
    """Indices of the k largest values, 1 <= k <= n, largest first, equal ones by index.  values: (n,)."""
    kept = np.flatnonzero(values >= _lower_bound(values, k))  # ascending, so the stable sort keeps ties by index
    order: Ids = kept[np.argsort(-values[kept], kind="stable")[:k]]
    return order


def _lower_bound(values: Logits | Floats, k: int) -> float:
    """A value that at least k of the values reach, close to the k-th largest.  values: (n,)."""
    n_groups = 1024
    if k > n_groups // 4 or values.size < 4 * n_groups:
        return float(np.partition(values, values.size - k)[values.size - k])
    # k groups whose largest value reaches the bound hold k such values. 40 times faster than to partition all.
    in_groups = values[: values.size - values.size % n_groups].reshape(-1, n_groups)
    return float(np.partition(in_groups.max(axis=0), n_groups - k)[n_groups - k])


def _draw(ids: Ids, logits: Logits, temperature: float, key: int) -> int:
    """Gumbel-max: the id with the largest score, the lowest of equals.  ids, logits: (m,)."""
    largest = logits.max()
    if ids.size > 1024:
        # Losing no winner, spare most ids the logarithms: outside of the 256 largest logits a token needs noise that
        # makes up for the best score so far. The margins are wider than the error of libm's exp.
        top = _largest(logits, 256)
        best = float(_scores(ids[top], logits[top], largest, temperature, key).max())
        needed = best - float(logits[top[-1]] - largest) / temperature - 1e-3
        least = math.exp(-math.exp(-needed)) * (2.0**64 - 2.0**32) - 2.0**12
        contends = _noise_bits(ids, key) >= np.uint64(max(least, 0.0))
        contends[top] = True
        ids, logits = ids[contends], logits[contends]
    scores = _scores(ids, logits, largest, temperature, key)
    return int(ids[scores == scores.max()].min())


def _scores(ids: Ids, logits: Logits, largest: np.float32, temperature: float, key: int) -> Floats:
    """What the draw compares.  ids, logits: (m,)."""
    return (logits.astype(np.float64) - float(largest)) / temperature + _gumbel(_noise_bits(ids, key))


def _mix(x: int) -> int:
    """SplitMix64's finaliser on one integer, modulo 2**64."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


def _stream_key(seed: int, position: int) -> int:
    """Key of the noise at one position; see the module's docstring."""
    return _mix((_mix((seed + _GOLDEN) & _WORD) + (position + 1) * _GOLDEN) & _WORD)


def _noise_bits(ids: Ids, key: int) -> NDArray[np.uint64]:
    """64 random bits for each id; see the module's docstring.  ids: (m,)."""
    x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _gumbel(bits: NDArray[np.uint64]) -> Floats:
    """Gumbel noise from 64 random bits; see the module's docstring.  bits: (m,)."""
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -log(-log(uniform))


def exp(x: Logits, largest: np.float32) -> Floats:
    """e**(x - largest), to within 1 ulp for differences in -700..0; below as at -700.  x: (m,)."""
    # Longer temporaries come from fresh pages at each step: 5 times slower.
    chunks = [x[start : start + 4096] for start in range(0, x.size, 4096)]
    return np.concatenate([_exp(np.maximum(chunk.astype(np.float64) - float(largest), -700.0)) for chunk in chunks])


def _exp(x: Floats) -> Floats:
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


def log(x: Floats) -> Floats:
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
