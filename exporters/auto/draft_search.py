"""The search for the formats of a drafter: those with the most accepted tokens a millisecond beside its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgeinfer.common.other_work import LoadMeter, MachineClock
from edgeinfer.common.types import Device
from edgeinfer.exporters.auto.allocation import Allocation, Numbers, Options, small_mix
from edgeinfer.exporters.auto.candidates import Importance, Subject, uniform
from edgeinfer.exporters.auto.chains import Drafting, Expected, MarginNoise, Margins, acceptance, accepted
from edgeinfer.exporters.auto.progress import Pace, State
from edgeinfer.exporters.auto.search import Limits, Mix, Search
from edgeinfer.exporters.auto.target import TargetText
from edgeinfer.exporters.auto.trial import Measured, Types, digest_of
from edgeinfer.exporters.request import Told, untold
from edgeinfer.exporters.source import Source
from edgeinfer.models.gguf import GGMLType


class Drafter(Protocol):
    """A draft model or a draft head.

    n_tokens: of the passes in which it drafts.  subjects: the tensors chosen for.  importance: with which they are
    rounded.
    """

    n_tokens: int
    subjects: Sequence[Subject]
    importance: Importance

    def trials(self, texts: Sequence[TargetText], noise: MarginNoise, state: State, n_depths: int) -> Measured:
        """Losses of it with tensors rounded, along texts, by the noise in its margins."""
        ...

    def shapes(self, texts: Sequence[TargetText], n_depths: int) -> Sequence[tuple[int, int]]:
        """Of the margins by text that the noise is measured in."""
        ...

    def chains(self, margins: Sequence[Margins], n_depths: int) -> Margins:
        """The drafts in these margins, (n_starts, n_depths)."""
        ...

    def run(self, types: Types, texts: Sequence[TargetText], n_depths: int) -> tuple[Margins, float]:
        """The drafts of it in these types along texts, and seconds of a pass in which it drafts."""
        ...

    def seconds(self, types: Types) -> float:
        """The latter alone."""
        ...


@dataclass(frozen=True)
class Drafted:
    """What a drafter gives. acceptance: share of first draft tokens that the target chooses too.  accepted: (n_depths,)
    draft tokens of a step that are accepted, by the length of the draft.  draft_ms: of a draft token.
    """

    acceptance: float
    accepted: Sequence[float]
    draft_ms: float

    def best(self, drafting: Drafting) -> tuple[float, int]:
        """Tokens a millisecond, and the length of the draft that gives them."""
        rates, lengths = drafting.best(np.array([self.accepted]), self.draft_ms)
        return float(rates[0]), int(lengths[0])


class DraftSearch:
    """Losses and times of a drafter's tensors, and the types with the highest rate of tokens.

    texts: of the target, by which losses are measured.  state: measurements, which are kept.
    """

    def __init__(
        self,
        source: Source,
        drafter: Drafter,
        drafting: Drafting,
        texts: Sequence[TargetText],
        device: Device,
        state: State,
    ) -> None:
        self._drafter, self.drafting, self._texts, self._state = drafter, drafting, texts, state
        self._n_depths = max(drafting.lengths)
        self._noise = MarginNoise(state)
        trials = drafter.trials(texts, self._noise, state, self._n_depths)
        self._search = Search(
            source, drafter.subjects, drafter.importance, (), device, state=state, trials=trials, choose=self._best
        )
        self._expected: Expected | None = None
        self._overhead = 0.0  # seconds of a pass beside its products

    def measure(self, told: Told = untold) -> None:
        """Measure the loss of every tensor, and what a pass takes beside its products."""
        self._search.measure(told)
        self._overhead = self._measured_overhead()

    def choose(self, n_bytes: float, told: Told = untold) -> Mix:
        """The types with the highest rate in at most so many bytes; the closest decisions are measured again."""
        return self._search.refine(Limits(n_bytes, self._drafter.n_tokens), told)

    def allocate(self, n_bytes: float) -> Mix:
        """The same by the measurements so far."""
        return self._search.allocate(Limits(n_bytes, self._drafter.n_tokens))

    def close(self) -> None:
        """Give the drafter that was measured back."""
        self._search.close()

    def rates(self, losses: Numbers, seconds: Numbers) -> Numbers:
        """Tokens a millisecond of sums of losses and seconds of products, (n,)."""
        expected = self.expected().accepted(losses)
        return self.drafting.best(expected, 1e3 * (seconds + self._overhead))[0]

    def predicted(self, types: Types) -> Drafted:
        """What these types should give."""
        expected, variance = self.expected(), self._search.predicted(types)
        seconds = self._search.seconds(types, self._drafter.n_tokens) + self._overhead
        of_types = expected.accepted(np.array([variance]))[0]
        return Drafted(expected.acceptance(variance), of_types.tolist(), 1e3 * seconds)

    @property
    def subjects(self) -> Sequence[Subject]:
        """The tensors that are chosen for."""
        return self._drafter.subjects

    def n_bytes(self, types: Types) -> int:
        """Of the tensors that are chosen for."""
        return self._search.n_bytes(types)

    def uniform(self) -> dict[str, Types]:
        """Every tensor in one format, by its name, in the formats that all of them may have."""
        subjects = self._drafter.subjects
        shared = set.intersection(*(set(subject.formats) for subject in subjects))
        names = [type for type in self._search.formats if type in shared and type.name[0] == "Q"]
        return {type.name: uniform(subjects, type) for type in names}

    def compare(
        self, mixes: Mapping[str, Types], texts: Sequence[TargetText], told: Told = untold
    ) -> dict[str, tuple[Drafted, float]]:
        """What each of some mixes gives on other texts, and how many cores others used while it was timed."""
        pace, found = Pace("other texts", "drafters", [1.0] * len(mixes), told), {}
        for name, types in mixes.items():
            key = f"drafted {digest_of(types)}"
            known = self._known(key)
            found[name] = known or self._kept(key, *self._run(types, texts))
            pace.done(was_known=known is not None)
        return found

    def _run(self, types: Types, texts: Sequence[TargetText]) -> tuple[Drafted, float]:
        meter = LoadMeter(MachineClock())
        chains, seconds = self._drafter.run(types, texts, self._n_depths)
        return Drafted(acceptance(chains), accepted(chains).tolist(), 1e3 * seconds), meter.load()

    def _known(self, key: str) -> tuple[Drafted, float] | None:
        names = ["acceptance", "draft_ms", "load", *map(str, range(1, self._n_depths + 1))]
        values = [self._state.get(f"{key} {name}") for name in names]
        known = [value for value in values if value is not None]
        return (Drafted(known[0], known[3:], known[1]), known[2]) if len(known) == len(values) else None

    def _kept(self, key: str, drafted: Drafted, load: float) -> tuple[Drafted, float]:
        for name, value in (("acceptance", drafted.acceptance), ("draft_ms", drafted.draft_ms), ("load", load)):
            self._state.add(f"{key} {name}", value)
        for length, value in enumerate(drafted.accepted, start=1):
            self._state.add(f"{key} {length}", value)
        return drafted, load

    def _best(self, options: Options, limits: Limits) -> Allocation:
        return small_mix(options, self.rates, limits.n_bytes)

    def expected(self) -> Expected:
        """What its drafts are worth, of the noise in the margins. After `measure`."""
        if self._expected is None:
            shapes = self._drafter.shapes(self._texts, self._n_depths)
            self._expected = Expected(self._drafter.chains(self._noise.margins(shapes), self._n_depths))
        return self._expected

    def _measured_overhead(self) -> float:
        known = self._state.get("overhead")
        if known is not None:
            return known
        types = uniform(self._drafter.subjects, GGMLType.Q8_0)
        products = self._search.seconds(types, self._drafter.n_tokens)
        return self._state.add("overhead", max(0.0, self._drafter.seconds(types) - products))
