"""When the target verified, when drafters drafted, and when the target waited for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["verify", "draft", "wait"]


class Event(NamedTuple):
    """Something that lasted from start to end, in seconds of one clock."""

    kind: Kind
    start: float
    end: float
    n: int  # its tokens


@dataclass
class Timeline:
    """Events in the order in which they ended.

    verify: a forward pass of the target.  draft: work of a model-based drafter.  wait: time that the target spent
    waiting for such a drafter; with overlapped drafting only this part of drafting costs anything.
    """

    events: list[Event] = field(default_factory=list)

    def add(self, kind: Kind, start: float, end: float, n: int) -> None:
        """Record an event; callable from any thread."""
        self.events.append(Event(kind, start, end, n))

    def seconds(self, kind: Kind) -> float:
        """Total duration of the events of one kind."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    def rounds(self, n: int, first: int | None = None) -> Sequence[Event]:
        """The events of n rounds, from the verify pass with index `first` on; None: n rounds in the middle."""
        passes = [event for event in self.events if event.kind == "verify"]
        first = max(0, (len(passes) - n) // 2) if first is None else first
        passes = passes[first : first + n]
        if not passes:
            return []
        start, end = passes[0].start, passes[-1].end
        return [event for event in self.events if event.end > start and event.start < end]
