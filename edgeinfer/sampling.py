"""From logits to a token: `SamplingParams` and `sample`.

The chain is llama.cpp's default one: logit_bias, penalties, DRY, top_k, top_p, min_p, temperature, draw. So top_p and
min_p look at the probabilities at temperature 1, whatever the temperature is.

The draw is Gumbel-max: the token with the largest (logit - largest logit) / temperature + noise, which follows the
softmax (Maddison et al., arXiv:1411.0030). The noise of a token is a function of (seed, position, token id) alone:

    mix(x)  = SplitMix64's finaliser (Steele, Lea and Flood 2014; Stafford's variant 13), modulo 2**64
    key     = mix(mix(seed + G) + (position + 1) * G)           G = 0x9e3779b97f4a7c15
    bits    = mix(key + (id + 1) * G)
    u       = (bits // 2**12 + 0.5) / 2**52                     in [2**-53, 1 - 2**-53], exact in float64
    noise   = -log(-log(u))                                     in (-3.61, 36.74)

so a token drawn on its own is the token drawn while a draft is checked.

Every bit of the choice is defined: comparisons, IEEE + - * / rounded to float64, sums from left to right, and a log and
an exp of our own (sampler.cpp). numpy's log, exp and sum are not used: they differ by CPU.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeAlias, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from edgeinfer import _sampler
from edgeinfer.common.arguments import MAX_INT32, check_integer, check_number, check_text, shown
from edgeinfer.common.errors import InvalidArgument, NumericalError, ShapeError
from edgeinfer.repetition import Breakers, dry_penalties

Logits: TypeAlias = NDArray[np.float32]  # (n_vocab,) or (m,)
Ids: TypeAlias = NDArray[np.intp]
# Token id, as a number or in decimal digits, and what is added to its logit.
LogitBias: TypeAlias = Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int | str, float]]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MOST_DIGITS = len(str(MAX_INT32))
_NAMES = {  # that other libraries have
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "n_predict", "num_predict"), "max_tokens"),
    **dict.fromkeys(("repetition_penalty", "penalty_repeat"), "repeat_penalty"),
    **dict.fromkeys(("repeat_last_n", "last_n_tokens_size"), "penalty_last_n"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
}


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments; None is as if it were not given, a seed of None draws one."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    penalty_last_n: int | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    logit_bias: LogitBias | None
    loop_guard: int | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from the logits. Raises InvalidArgument if a value is out of range."""

    temperature: float = 0.8  # logits are divided by it before the draw; 0 takes the largest one
    top_k: int = 40  # keeps the k largest logits; 0 or -1 keeps all
    top_p: float = 0.95  # of these keeps the smallest set with this probability, most likely tokens first; 1 keeps all
    min_p: float = 0.05  # of these keeps tokens at least this many times as likely as the first
    # positive logits of recent tokens are divided by it, negative ones multiplied; 1 is off
    repeat_penalty: float = 1.0
    # frequency_penalty, presence_penalty: subtracted from the logit, once per occurrence and once in all; 0 is off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64  # how many tokens are recent, prompt included; 0 switches the penalties off, -1 is all
    # 0..2**64 - 1; None or -1 draws one for each request. A field of None has its default, as OpenAI's clients send it.
    seed: int | None = None
    # DRY ("don't repeat yourself") subtracts dry_multiplier * dry_base ** (n - dry_allowed_length) from the logit of a
    # token that would continue a repetition of n tokens, where n >= dry_allowed_length; 0 is off
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # how many tokens DRY looks back, prompt included; 0 is off, -1 is all
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")  # texts that end a repetition
    # token ids and what is added to their logits before all else, as a mapping or as pairs; -inf or False bans a token.
    # An id may be in decimal digits, as JSON has it ({"260": -100}). Kept as a tuple of pairs, by id.
    logit_bias: LogitBias = ()
    # an answer whose last `loop_guard` tokens or more only repeat themselves ends with "repetition"; at least 64, or 0
    # for off; see edgeinfer.repetition.LoopGuard
    loop_guard: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None:
                object.__setattr__(self, field.name, field.default)
        for name, value in (("top_k", 0), ("seed", None)):
            if _is_minus_one(getattr(self, name)):
                object.__setattr__(self, name, value)
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
        self._check(check_number, "dry_multiplier", 0.0, 1e6)
        self._check(check_number, "dry_base", 1.0, 1e6)
        self._check(check_integer, "dry_allowed_length", 0, 1 << 31)
        self._check(check_integer, "dry_penalty_last_n", -1, 1 << 31)
        object.__setattr__(self, "dry_sequence_breakers", _checked_breakers(self.dry_sequence_breakers))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.loop_guard != 0 or isinstance(self.loop_guard, bool):
            self._check(check_integer, "loop_guard", 64, 1 << 31)

    def _check(self, check: Callable[..., float], name: str, least: float, most: float) -> None:
        object.__setattr__(self, name, check(name, getattr(self, name), least, most))

    def changed(self, options: Mapping[str, Any]) -> SamplingParams:
        """The same parameters but for these (SamplingOptions). Raises TypeError for a name that is none of them."""
        for name in options:
            if name not in SamplingOptions.__annotations__:
                hint = _NAMES.get(name) or next(iter(get_close_matches(name, SamplingOptions.__annotations__, n=1)), "")
                known = f": {hint} is what it is called here" if hint else ""
                raise TypeError(f"there is no sampling parameter {name!r:.80}{known}")
        given = {name: value for name, value in options.items() if value is not None or name == "seed"}
        return replace(self, **given)

    def with_seed(self) -> SamplingParams:
        """The same parameters, with a seed of 32 random bits drawn where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        neutral = self.repeat_penalty == 1.0 and self.frequency_penalty == 0.0 and self.presence_penalty == 0.0
        return self.penalty_last_n != 0 and not neutral

    @property
    def has_dry(self) -> bool:
        """Whether DRY changes logits."""
        return self.dry_multiplier != 0.0 and self.dry_penalty_last_n != 0

    @property
    def changes_logits(self) -> bool:
        """Whether the choice is among other logits than the model's own."""
        return bool(self.logit_bias) or self.has_penalties or self.has_dry

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def without_bans(self) -> SamplingParams:
        """The same, but no token is banned."""
        return replace(self, logit_bias=tuple(pair for pair in self.biases if pair[1] != -math.inf))

    def to_json(self) -> dict[str, object]:
        """The fields as JSON can hold them: logit_bias as {"id": bias}, with false for a banned token."""
        banned = -math.inf
        bias = {str(id): False if value == banned else value for id, value in self.biases}
        return asdict(self) | {"dry_sequence_breakers": list(self.dry_sequence_breakers), "logit_bias": bias}


def sample(
    logits: Logits,
    params: SamplingParams,
    position: int,
    previous: Sequence[int] = (),
    breakers: Breakers | None = None,
) -> int:
    """Id of the token at `position`, its index in the whole text.

    logits: (n_vocab,) float32, not changed.  previous: the tokens before it, prompt included; used by the penalties and
    DRY only.  breakers: dry_sequence_breakers as tokens. Of equal values the lower id is taken. Where logit_bias bans
    all tokens that a constraint leaves, its bans give way. Raises NumericalError if the largest logit is not a finite
    number or any is NaN, ShapeError, and InvalidArgument without a seed for a draw, or if logit_bias bans every token.
    """
    if logits.ndim != 1 or logits.size == 0 or logits.dtype != np.float32:
        raise ShapeError(f"logits must be (n_vocab,) float32: found {logits.shape} {logits.dtype}")
    recent: Sequence[int] = ()
    given = logits
    if params.biases or params.has_dry:
        logits = adjusted(logits, params, previous, breakers)
    elif params.has_penalties:
        recent = _recent(params, previous)
    if params.is_greedy and len(recent) == 0:
        id = int(logits.argmax())  # the first NaN, if there is one
        largest = float(logits[id])
    else:
        id, largest = _chosen(logits, params, position, recent)
    if not math.isfinite(largest):
        if largest == -math.inf and len(params.biases) >= logits.size:
            raise InvalidArgument(f"logit_bias bans every one of {logits.size} tokens: leave at least one")
        if largest == -math.inf and math.isfinite(given.max()) and len(params.without_bans.biases) < len(params.biases):
            return sample(given, params.without_bans, position, previous, breakers)
        raise NumericalError(
            f"the largest of {logits.size} logits at position {position} is {largest} (token {id}): the model "
            "file is damaged or does not fit its hyper-parameters"
        )
    if params.seed is None and not params.is_greedy:
        raise InvalidArgument("a draw at a temperature above 0 needs a seed: use params.with_seed()")
    return id


def _chosen(logits: Logits, params: SamplingParams, position: int, recent: Sequence[int]) -> tuple[int, float]:
    """The token at a position and the largest logit, after penalties on recent tokens; see _sampler.choose."""
    if not (logits.flags.c_contiguous and logits.flags.writeable):  # the penalties are written to it for a moment
        logits = np.array(logits)
    temperature = 0.0 if params.is_greedy else params.temperature
    key = 0 if params.seed is None else stream_key(params.seed, position)
    penalties = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
    filters = params.top_k, params.top_p, params.min_p
    chosen: tuple[int, float] = _sampler.choose(logits, list(recent), *penalties, *filters, temperature, key)
    return chosen


def adjusted(
    logits: Logits, params: SamplingParams, previous: Sequence[int], breakers: Breakers | None = None
) -> Logits:
    """The logits after logit_bias, penalties and DRY; a copy if anything changes.

    logits: (n_vocab,) float32, or those of a drafter, for the first tokens only.
    """
    if params.biases:
        ids, biases = (np.array(values) for values in zip(*params.biases, strict=True))
        logits = _added(logits, ids, biases)
    if params.has_penalties:
        logits = penalize(logits, params, previous)
    if params.has_dry:
        length, last_n = params.dry_allowed_length, params.dry_penalty_last_n
        penalties = dry_penalties(previous, params.dry_multiplier, params.dry_base, length, last_n, breakers or {})
        if penalties:
            logits = _added(logits, np.array(list(penalties)), -np.array(list(penalties.values())))
    return logits


def _added(logits: Logits, ids: Ids, changes: NDArray[np.float64]) -> Logits:
    """Copy of the logits with changes (m,) added to those of ids (m,); ids past the end are left out."""
    changed = logits.copy()
    changes, ids = changes[ids < logits.size], ids[ids < logits.size]
    changed[ids] = logits[ids] + changes  # in float64
    return changed


def penalize(logits: Logits, params: SamplingParams, previous: Sequence[int]) -> Logits:
    """Copy of the logits in which the last `penalty_last_n` tokens are less likely, as llama.cpp defines it.

    logits: (n_vocab,) float32, or a drafter's for the first tokens alone.
    """
    recent = _recent(params, previous)
    if len(recent) == 0:
        return logits
    penalized = np.array(logits)
    _sampler.penalize(penalized, list(recent), params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
    return penalized


def _recent(params: SamplingParams, previous: Sequence[int]) -> Sequence[int]:
    """The tokens that penalties look at."""
    return previous if params.penalty_last_n < 0 else previous[-params.penalty_last_n :]


def candidates(logits: Logits, params: SamplingParams) -> Ids:
    """Ids that top_k, top_p and min_p leave, (m,), m >= 1, in no particular order.

    logits: (n_vocab,) float32 with a finite maximum. Probabilities are those among the tokens that top_k leaves.
    """
    ids = _sampler.candidates(np.ascontiguousarray(logits), params.top_k, params.top_p, params.min_p)
    return np.array(ids, dtype=np.intp)


def _is_minus_one(value: object) -> bool:
    """Whether it is the integer with which llama.cpp says "none" or "all"."""
    return isinstance(value, (int, np.integer)) and int(value) == -1


def _mix(x: int) -> int:
    """SplitMix64's finaliser on one integer, modulo 2**64."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


def stream_key(seed: int, position: int) -> int:
    """Key of the noise at one position; see the module's docstring."""
    return _mix((_mix((seed + _GOLDEN) & _WORD) + (position + 1) * _GOLDEN) & _WORD)


def _checked_breakers(breakers: object) -> tuple[str, ...]:
    """Texts of at least one character, as a tuple; one text stands for itself."""
    if isinstance(breakers, str):
        breakers = (breakers,)
    if not isinstance(breakers, Sequence) or isinstance(breakers, bytes):
        raise InvalidArgument(f"dry_sequence_breakers must be several texts: found {shown(breakers)}")
    if any(check_text("a sequence breaker", text) == "" for text in breakers):
        raise InvalidArgument("a sequence breaker must have at least one character: found an empty text")
    return tuple(breakers)


def _checked_bias(bias: object) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs, sorted by id, of a mapping or of pairs."""
    try:
        entries: Any = bias.items() if isinstance(bias, Mapping) else bias
        pairs = [(id, value) for id, value in entries]
    except (TypeError, ValueError):
        raise InvalidArgument(f"logit_bias must be token ids and their biases: found {shown(bias)}") from None
    found = {}
    for id, value in pairs:
        is_ban = value is False or value == -math.inf
        checked = -math.inf if is_ban else check_number("a bias of logit_bias", value, -1e6, 1e6)
        is_written = isinstance(id, str) and id.isascii() and id.isdecimal() and len(id) <= _MOST_DIGITS
        found[check_integer("a token of logit_bias", int(id) if is_written else id, 0, MAX_INT32)] = checked
    return tuple(sorted(found.items()))
