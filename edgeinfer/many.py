"""Several texts from one thread: texts as they end, samples of one prompt, and the vote among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from edgeinfer.common.arguments import check_integer
from edgeinfer.completion import Completion
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer.stream import Stream

MOST_SAMPLES = 1024
_SEEDS = 1 << 64

Choice = TypeVar("Choice", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Vote(Generic[Choice]):
    """What most samples of a prompt say (self-consistency, Wang et al., arXiv:2203.11171).

    counts: how many samples said what, the most frequent first; texts that say nothing (None) are not counted.
    """

    choice: Choice | None  # the most frequent one, of the smallest seed where several are; None if none says anything
    counts: tuple[tuple[Choice, int], ...]
    completions: tuple[Completion, ...]  # of those that were read to their end, in that order


def as_they_end(scheduler: Scheduler, streams: Iterable[Stream], at_once: int) -> Generator[Stream, None, None]:
    """Read streams side by side in this thread; gives each when it has ended, or failed.

    streams: taken when there is room, at most at_once are read at a time. All are closed when the iterator is.
    """
    coming, reading = iter(streams), list[Stream]()
    try:
        while True:
            for stream in islice(coming, max(0, at_once - len(reading))):
                reading.append(stream)
                stream.start()
            if not reading:
                return
            sequences = [stream.sequence for stream in reading if stream.sequence is not None]
            if len(sequences) == len(reading):  # else one has ended already
                scheduler.wait_for(*sequences)
            for stream in [stream for stream in reading if _has_ended(stream)]:
                reading.remove(stream)
                yield stream
    finally:
        for stream in reading:
            stream.close()


def _has_ended(stream: Stream) -> bool:
    """Read what is ready of a stream; whether that was the last."""
    while stream.is_ready:
        try:
            next(stream)
        except StopIteration:
            return True
        except Exception:
            if not stream.failed:  # not its own error
                raise
            return True
    return False


def in_order(numbered: Iterable[tuple[int, Completion]]) -> Iterator[Completion]:
    """Completions by their numbers 0, 1, ..., each as soon as those before it are there."""
    found: dict[int, Completion] = {}
    following = 0
    for number, completion in numbered:
        found[number] = completion
        while following in found:
            yield found.pop(following)
            following += 1


def check_samples(name: str, value: object) -> int:
    """A number of samples. Raises InvalidArgument."""
    return check_integer(name, value, 1, MOST_SAMPLES)


def seed_of_sample(seed: int, number: int) -> int:
    """The seed of a sample: the text is the one that a request with this seed gives."""
    return (seed + number) % _SEEDS


def count_votes(said: Sequence[Choice | None]) -> list[tuple[Choice, int]]:
    """How often each choice was made, the most frequent first, the first of equally frequent ones before the others."""
    return Counter(each for each in said if each is not None).most_common()


def is_decided(said: Sequence[Choice | None], n_left: int) -> bool:
    """Whether the samples that have not ended cannot change which choice is the most frequent."""
    counts = count_votes(said)
    if not counts:
        return n_left == 0
    second = counts[1][1] if len(counts) > 1 else 0
    return counts[0][1] > second + n_left


Key = Callable[[str], Choice | None]
