"""Prefetch tuning: how products with a few tokens read their weights, measured at the first load and kept on disk.

A pass of up to eight tokens takes as long as reading the weights from memory. The best prefetch distance, cache level
and number of row groups side by side differ by CPU; the time differs by up to a factor of two. All choices give the
same bits. The search starts from the best choice on known CPUs and leaves it only for a gain beyond noise.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

from edgeinfer.common import devices
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.models.gguf import ModelFile
from edgeinfer.record_cache import read_record, record_folder, record_key, write_record

MOST_TOKENS = 8  # of a pass that is tuned
LEAST_BYTES = 32 << 20  # of weights: smaller ones are read from caches, not from memory
BUDGET_SECONDS = 0.8
VARIABLE = "EDGEINFER_TUNE"
Wanted = Literal["auto", "off", "again"]
_KIND, _FORMAT = "tuning", 1
_ORIGINS = {"known": "on known CPUs", "measured": "measured now", "kept": "measured before"}

GAIN = 0.04  # of a pass's time, for which a choice is changed
_GAIN_OF_LARGER = 0.015  # for which a pass is made as a larger one is
_TURNS, _TURNS_OF_OTHERS, _TURNS_AT_LAST = 3, 2, 5
_LEFT = 4  # candidates that are tried again
_FOR_ONE, _FOR_OTHERS = 0.4, 0.85  # of the budget, for what ends then
_PART_BYTES, _THREAD_BYTES = 48 << 20, 12 << 20  # that one trial reads at least, and each thread of it
_LEAST_ELAPSED = 0.02  # seconds of trials, before it is said that they were disturbed
_LEAST_BUSY = 0.8  # of the threads' time must be spent at work, else others had the cores

ALL_CACHES, FROM_L2, AROUND_L3 = range(3)
_AHEAD = (0, 2048, 4736, 7104, 12288, 20480, 32768)
_SHORT, _LONG = 192 << 10, 800 << 10
_TASKS = ((_SHORT, 4, True), (_SHORT, 2, False), (_LONG, 2, True), (_LONG, 2, False), (48 << 10, 4, True), (0, 1, True))


class Prefetch(NamedTuple):
    """The fields of Prefetch in matrix.h."""

    ahead: int
    easy: bool
    hint: int
    at_once: int
    tokens: int
    task: int
    tasks_each: int
    eager: bool


Fields: TypeAlias = tuple[int, bool, int, int, int, int, int, bool]


class Tunable(Protocol):
    """What of the C++ decoder is tuned."""

    streams_at_once: int  # see Search
    groups_at_once: int
    weight_bytes: int  # of the weights that a token reads

    def prefetch(self, is_ternary: bool, n: int) -> Fields:
        """The fields of the choice for n tokens."""
        ...

    def set_prefetch(self, is_ternary: bool, n: int, fields: Fields) -> None:
        """Make another choice. Raises ValueError for one that does not exist."""
        ...

    def seconds_of_part(self, n: int, n_parts: int, part: int) -> float:
        """Seconds that a part of a pass takes."""
        ...

    def part_bytes(self, n_parts: int, part: int) -> int:
        """Bytes of weights that it reads, of experts those of one token."""
        ...


@dataclass(frozen=True)
class Tuning:
    """The choices of a session by number of tokens. origin: "known" CPUs' values, "measured" now, or "kept"."""

    origin: Literal["known", "measured", "kept"]
    streams: Mapping[int, Prefetch]

    def __str__(self) -> str:
        one = self.streams[1]
        ahead = f"{one.ahead} bytes ahead" if one.ahead and one.easy else "as the CPU fetches them"
        groups = f"{one.at_once} row groups" if one.at_once > 1 else "1 row group"
        return f"read {ahead}, {groups} at once, as {_ORIGINS[self.origin]}"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"origin": self.origin, "streams": {n: stream._asdict() for n, stream in self.streams.items()}}


def wanted_by_user() -> Wanted:
    """What EDGEINFER_TUNE asks for. Raises InvalidArgument."""
    value = os.environ.get(VARIABLE) or "auto"
    for known in get_args(Wanted):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise InvalidArgument(f"{VARIABLE} must be {', '.join(get_args(Wanted))}: found {value!r:.80}")


def tune(
    decoder: Tunable,
    file: ModelFile,
    n_layers: int,
    n_tokens: int,
    n_threads: int,
    is_ternary: bool,
    *facts: object,
) -> Tuning:
    """Choose how a decoder reads its weights, from the kept result or by measuring now.

    n_tokens: most tokens of a pass.  facts: what else the choice depends on, besides the model, the CPU and the
    threads. A measurement during which other processes had the cores is not used. Raises InvalidArgument.
    """
    sizes = range(1, min(MOST_TOKENS, n_tokens) + 1)
    known = {n: Prefetch(*decoder.prefetch(is_ternary, n)) for n in sizes}
    what = wanted_by_user()
    if what == "off" or decoder.weight_bytes < LEAST_BYTES:
        return Tuning("known", known)
    key = _key(file, n_threads, len(sizes), facts)
    kept = None if what == "again" else _streams_of(read_record(record_folder(_KIND), key))
    if kept is not None and _use(decoder, is_ternary, {n: kept.get(n, known[n]) for n in sizes}):
        return Tuning("kept", {n: kept.get(n, known[n]) for n in sizes})
    trials = Trials(decoder, n_layers, n_threads, is_ternary)
    search = Search(
        trials.seconds, decoder.streams_at_once, decoder.groups_at_once, disturbed=lambda: trials.were_disturbed
    )
    chosen = search.run(known)
    if trials.were_disturbed:
        _use(decoder, is_ternary, known)
        return Tuning("known", known)
    _use(decoder, is_ternary, chosen)
    write_record(record_folder(_KIND), key, {"streams": {str(n): list(stream) for n, stream in chosen.items()}})
    return Tuning("measured", chosen)


def kept_choices(file: ModelFile, n_threads: int, *facts: object) -> dict[int, Prefetch] | None:
    """The choices that `tune` made for a model here, by number of tokens, None if it did not yet.  facts: as there."""
    if wanted_by_user() != "auto":
        return None
    return _streams_of(read_record(record_folder(_KIND), _key(file, n_threads, MOST_TOKENS, facts)))


def _key(file: ModelFile, n_threads: int, n_sizes: int, facts: tuple[object, ...]) -> str:
    return record_key(file, _FORMAT, devices.cpu_name(), n_threads, n_sizes, *facts)


def _use(decoder: Tunable, is_ternary: bool, streams: Mapping[int, Prefetch]) -> bool:
    """Whether the decoder has all these choices, and now uses them."""
    before = {n: decoder.prefetch(is_ternary, n) for n in streams}
    try:
        for n, stream in streams.items():
            decoder.set_prefetch(is_ternary, n, stream)
    except (ValueError, TypeError):
        for n, fields in before.items():
            decoder.set_prefetch(is_ternary, n, fields)
        return False
    return True


def _streams_of(record: Any) -> dict[int, Prefetch] | None:
    """The choices in a record, None if it is not as `tune` writes it."""
    try:
        return {int(n): Prefetch(*fields) for n, fields in record["streams"].items()}
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


class Trials:
    """Times parts of passes, another part each time, so that none is in the caches."""

    def __init__(self, decoder: Tunable, n_layers: int, n_threads: int, is_ternary: bool) -> None:
        self._decoder = decoder
        part_bytes = max(_PART_BYTES, n_threads * _THREAD_BYTES)
        n_parts = max(1, min(n_layers // 2, decoder.weight_bytes // part_bytes))
        self._parts = [decoder.part_bytes(n_parts, part) for part in range(n_parts)]
        for part in range(min(2, n_parts)):  # maps what is still to be mapped, and wakes the threads
            decoder.seconds_of_part(1, n_parts, part)
        self._next = 0
        self._n_threads = n_threads
        self._is_ternary = is_ternary
        self._elapsed = self._worked = 0.0

    def seconds(self, n: int, stream: Prefetch) -> float:
        """Of an average part of a pass of n tokens."""
        self._decoder.set_prefetch(self._is_ternary, n, stream)
        part, n_parts = self._next, len(self._parts)
        self._next = (part + 1) % n_parts
        worked, started = time.process_time(), time.perf_counter()
        seconds = self._decoder.seconds_of_part(n, n_parts, part)
        self._elapsed += time.perf_counter() - started
        self._worked += time.process_time() - worked
        return seconds * sum(self._parts) / (n_parts * self._parts[part])

    @property
    def were_disturbed(self) -> bool:
        """Whether other processes had the cores for some of the time."""
        if self._elapsed < _LEAST_ELAPSED:
            return False
        return self._worked < _LEAST_BUSY * self._n_threads * self._elapsed


class Search:
    """Finds the choices with which passes take the least time.

    seconds: of a trial of n tokens.  streams_at_once, groups_at_once:
    row groups that kernels take side by side with one token, and with more.  disturbed: whether trials say
    nothing any more, and the search may end.
    """

    def __init__(
        self,
        seconds: Callable[[int, Prefetch], float],
        streams_at_once: int,
        groups_at_once: int,
        budget_seconds: float = BUDGET_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        disturbed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._seconds = seconds
        self._at_once = streams_at_once, groups_at_once
        self._budget = budget_seconds
        self._clock = clock
        self._disturbed = disturbed
        self._deadline = 0.0

    def run(self, known: Mapping[int, Prefetch]) -> dict[int, Prefetch]:
        """The best choice for each size, those of `known` where nothing is better by more than noise."""
        chosen = dict(known)
        started = self._clock()
        self._deadline = started + _FOR_ONE * self._budget
        found = self._descend(1, self.better(1, known[1], self._diverse(1, known[1])))
        self._deadline = started + _FOR_OTHERS * self._budget
        chosen[1] = self.better(1, known[1], [found], GAIN / 2, _TURNS_AT_LAST)
        for n in (size for size in (2, 4, 3, 8, 6, 5, 7) if size in known):
            chosen[n] = self.better(n, chosen[n], self._of_others(n, chosen), turns=_TURNS_OF_OTHERS)
        self._deadline = started + self._budget
        self._make_rise(chosen)
        return chosen

    def better(
        self, n: int, current: Prefetch, others: Iterable[Prefetch], gain: float = GAIN, turns: int = _TURNS
    ) -> Prefetch:
        """The best of the others if it gains so much by the median of some turns, else the current one."""
        left = [each for each in dict.fromkeys(others) if each != current]
        ratios: dict[Prefetch, list[float]] = {each: [] for each in left}
        for turn in range(turns):
            if not left:
                return current
            seconds = self._compare(n, current, left if turn % 2 else left[::-1])
            if seconds is None:
                return current
            for each in left:
                ratios[each].append(seconds[each] / seconds[current])
            medians = {each: statistics.median(ratios[each]) for each in left}
            left = sorted((each for each in left if medians[each] < 1.0 - gain / 2), key=medians.__getitem__)[:_LEFT]
        if left and statistics.median(ratios[left[0]]) < 1.0 - gain:
            return left[0]
        return current

    def _compare(self, n: int, current: Prefetch, others: Sequence[Prefetch]) -> dict[Prefetch, float] | None:
        """Seconds of one trial each, and of the better one of the current choice's two; None when time is up."""
        seconds: dict[Prefetch, float] = {}
        for each in (current, *others, current):
            if self._is_over():
                return None
            elapsed = self._seconds(n, each)
            seconds[each] = min(elapsed, seconds.get(each, elapsed))
        return seconds

    def _descend(self, n: int, current: Prefetch) -> Prefetch:
        """One field after the other."""
        for neighbours in (self._by_reach, self._by_side, self._by_task, self._by_tokens, self._by_reach):
            current = self.better(n, current, neighbours(n, current))
        return current

    def _diverse(self, n: int, known: Prefetch) -> list[Prefetch]:
        """What was best on some CPU, or may be on another: first tries from all over the space."""
        streams = [
            known._replace(ahead=7104, easy=True, hint=AROUND_L3, task=_LONG, tasks_each=2, eager=True),
            known._replace(ahead=4736, easy=True, hint=ALL_CACHES, task=_SHORT, tasks_each=4, eager=True),
            known._replace(ahead=0, easy=False, hint=ALL_CACHES, eager=False),
            known._replace(ahead=12288, easy=True, hint=FROM_L2, eager=True),
        ]
        for at_once in self._sides(n):
            streams.append(known._replace(at_once=at_once))
            streams.append(known._replace(at_once=at_once, ahead=2048, easy=True, hint=ALL_CACHES, eager=True))
            streams.append(known._replace(at_once=at_once, ahead=12288, easy=True, hint=FROM_L2, eager=True))
            streams.append(known._replace(at_once=at_once, ahead=0, easy=False, eager=False))
        if self._at_once[1] > 1:  # as a pass of many tokens is made
            streams.append(known._replace(at_once=self._at_once[1], tokens=4, task=0, tasks_each=1))
        return streams

    def _of_others(self, n: int, chosen: Mapping[int, Prefetch]) -> list[Prefetch]:
        """What was chosen for one token and for neighbours, with as many row groups as this size can have."""
        most = max(self._sides(n), default=1)
        near = [chosen[size] for size in (1, n - 1, n + 1) if size in chosen]
        streams = [each._replace(at_once=min(each.at_once, most)) for each in near]
        return [*streams, streams[0]._replace(at_once=most), streams[0]._replace(at_once=most, task=0, tasks_each=1)]

    def _sides(self, n: int) -> list[int]:
        """Numbers of row groups beside one that n tokens can have at once."""
        few, many = self._at_once
        return sorted({side for side in (2, few, many) if 1 < side <= (few if n == 1 else many)})

    def _by_reach(self, n: int, current: Prefetch) -> list[Prefetch]:
        reach = [current._replace(ahead=ahead, easy=ahead > 0) for ahead in _AHEAD]
        return reach + [current._replace(hint=hint) for hint in (ALL_CACHES, FROM_L2, AROUND_L3) if current.ahead]

    def _by_side(self, n: int, current: Prefetch) -> list[Prefetch]:
        return [current._replace(at_once=side) for side in (1, *self._sides(n))]

    def _by_task(self, n: int, current: Prefetch) -> list[Prefetch]:
        return [current._replace(task=task, tasks_each=each, eager=eager) for task, each, eager in _TASKS]

    def _by_tokens(self, n: int, current: Prefetch) -> list[Prefetch]:
        return [current._replace(tokens=tokens) for tokens in (1, 2, 4) if tokens == 1 or tokens > n]

    def _make_rise(self, chosen: dict[int, Prefetch]) -> None:
        """Where a pass of n tokens takes longer than one of n + 1, make it as that one is."""
        for n in sorted(chosen, reverse=True)[1:]:
            above = chosen[n + 1]
            alike = [above, above._replace(tokens=max(above.tokens, n + 1))]
            chosen[n] = self.better(n, chosen[n], alike, _GAIN_OF_LARGER)

    def _is_over(self) -> bool:
        return self._clock() > self._deadline or self._disturbed()
