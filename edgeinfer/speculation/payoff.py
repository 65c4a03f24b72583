"""Whether drafting pays, measured as a whole: the speed with drafts against the speed without, under the same load.

Expected gains can be wrong in many ways: costs, acceptance, what drafters take. The time of whole steps cannot. Steps
without a draft tell what plain decoding takes; where there are none, one is made now and then. While drafts do not pay,
drafting rests, longer each time. Passes of several texts are measured by their number, which changes as texts begin and
end; where drafts do not pay with some of them, drafting rests with any.
"""

from __future__ import annotations

from dataclasses import dataclass

_ENOUGH = 2.5  # plain steps, decayed
_DECAY = 0.98  # of what was measured, with each step
_PROBE_EVERY, _FIRST_PROBES = 48, 4  # tokens without a plain step before one is made; while there were few of these
# Steps with drafts in a row before they are judged, at all, as usual, and where they did not pay the last time; by how
# many standard errors.
_LEAST_STEPS, _TRIAL, _SHORT_TRIAL = 6, 20, 8
_VERY_SURE, _SURE = 3.0, 1.0
# Tokens of a text without drafts: the first time, the same where several run, which gain less, and at most.
_REST, REST_OF_SEVERAL, _LONGEST_REST = 32, 128, 512


@dataclass(slots=True)
class _Mean:
    """A decayed mean of seconds a token, and how sure it is."""

    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of the deviation of each step
    steps: float = 0.0

    def add(self, n_tokens: int, seconds: float) -> None:
        deviation = seconds - n_tokens * self.value if self.steps >= 2.0 else 0.0
        self.tokens = _DECAY * self.tokens + n_tokens
        self.seconds = _DECAY * self.seconds + seconds
        self.squares = _DECAY * self.squares + deviation * deviation
        self.steps = _DECAY * self.steps + 1.0

    @property
    def value(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def error(self) -> float:
        """Standard error of the value."""
        return self.squares**0.5 / self.tokens if self.tokens else 0.0


class Rest:
    """How long drafting rests, in tokens of a text."""

    def __init__(self, first: int = _REST) -> None:
        """first: the first time."""
        self._first = self._length = first
        self._left = 0.0

    @property
    def is_on(self) -> bool:
        """Whether it rests now."""
        return self._left > 0

    @property
    def is_first(self) -> bool:
        """Whether drafts paid the last time that they were tried, or were never tried."""
        return self._length == self._first

    def begin(self) -> None:
        """Drafts did not pay: the next rest is longer."""
        self._left, self._length = self._length, min(2 * self._length, _LONGEST_REST)

    def pass_by(self, n_tokens: float) -> None:
        """So many tokens were made without."""
        self._left = max(0.0, self._left - n_tokens)

    def shorten(self) -> None:
        """Another text begins, which may suit drafts better."""
        self._length = max(self._first, self._length // 2)
        self._left = min(self._left, self._length)

    def forget(self) -> None:
        """Drafts paid."""
        self._length = self._first


class Payoff:
    """Measures steps with and without drafts, and says which step is to be made without."""

    def __init__(self, n_texts: int = 1, rest: Rest | None = None) -> None:
        """n_texts: in each step.  rest: that other numbers of texts share; None for one of its own."""
        self._n_texts = n_texts
        self._plain, self._drafted = _Mean(), _Mean()
        self._since_plain = 0.0  # tokens of a text
        self._rest = Rest() if rest is None else rest
        self._n_steps = 0  # with drafts since the last rest

    @property
    def plain_seconds(self) -> float | None:
        """Seconds that a token takes without drafts, None where no such step was measured yet."""
        return self._plain.value if self._plain.steps else None

    @property
    def is_resting(self) -> bool:
        """Whether drafting rests, as it does not pay."""
        return self._rest.is_on

    @property
    def needs_plain_step(self) -> bool:
        """Whether the next step is to be made without drafts, and without asking for any."""
        every = _PROBE_EVERY if self._plain.steps >= _ENOUGH else _FIRST_PROBES
        return self.is_resting or self._since_plain >= every

    def start_request(self, seconds: float) -> None:
        """Another text begins, which may suit drafts better. seconds: that drafters took for the prompt."""
        self._drafted.seconds += seconds
        self._rest.shorten()

    def count_plain(self, seconds: float, n_tokens: int = 1) -> None:
        """A step without drafts: of a token for each text, without what drafters took."""
        self._plain.add(n_tokens, seconds)
        self._since_plain = 0.0

    def count(self, n_tokens: int, seconds: float, asked: bool) -> None:
        """A step gave n_tokens. seconds: with all that drafters took.  asked: they were asked for drafts."""
        self._since_plain += n_tokens / self._n_texts
        if not asked:
            self._rest.pass_by(n_tokens / self._n_texts)
            return
        self._drafted.add(n_tokens, seconds)
        self._n_steps += 1
        if self._n_steps < _LEAST_STEPS or self._plain.steps < _ENOUGH:
            return
        trial = _TRIAL if self._rest.is_first else _SHORT_TRIAL
        sure = _SURE if self._n_steps >= trial else _VERY_SURE
        error = (self._plain.error**2 + self._drafted.error**2) ** 0.5
        if self._drafted.value > self._plain.value + sure * error:
            self._rest.begin()
            self._n_steps = 0
            self._drafted = _Mean()  # what comes may be another kind of text
        elif self._drafted.value < self._plain.value:
            self._rest.forget()
