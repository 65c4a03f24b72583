"""When what was done: checks, drafts, and waiting for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["verify", "draft", "wait"]


class Event(NamedTuple):
    """Something that lasted from start to end, in seconds of one clock. n: tokens of it."""

    kind: Kind
    start: float
    end: float
    n: int


@dataclass
class Timeline:
    """Events in the order in which they ended. verify: of the target.  draft: of drafters that take time.  wait: of the
    target for one of those, which is what their drafts cost where they run beside it.
    """

    events: list[Event] = field(default_factory=list)

    def add(self, kind: Kind, start: float, end: float, n: int) -> None:
        """Note an event; called from any thread."""
        self.events.append(Event(kind, start, end, n))

    def seconds(self, kind: Kind) -> float:
        """Of all events of a kind."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    def rounds(self, n: int, first: int | None = None) -> Sequence[Event]:
        """What was done in n rounds, from the beginning of the check of that index on; None: in the middle."""
        checks = [event for event in self.events if event.kind == "verify"]
        first = max(0, (len(checks) - n) // 2) if first is None else first
        checks = checks[first : first + n]
        if not checks:
            return []
        start, end = checks[0].start, checks[-1].end
        return [event for event in self.events if event.end > start and event.start < end]
