"""The places of texts that run: sessions of the model, and what of earlier texts they still hold."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field

from edgeinfer.backends.base import Model, PooledModel, PooledSession, Session
from edgeinfer.backends.checks import common_length
from edgeinfer.common.errors import EdgeInferError
from edgeinfer.scheduling.sequence import Sequence


@dataclass
class Place:
    """A session, and the text that has it."""

    session: Session
    sequence: Sequence | None = None
    held: list[int] = field(default_factory=list)  # tokens of the last text, that may be found again
    used: int = 0  # when it was last taken, in the order of taking


class Places:
    """Sessions of a model, one for each text that may run at once.

    first: the session that there is already; others are opened when they are needed.
    """

    def __init__(self, first: Session, n: int) -> None:
        self.model: Model = first.model
        self.pool = first.model if isinstance(first.model, PooledModel) else None
        self.n = n if self.pool is not None else 1
        self._places = [Place(first)]
        self._n_taken = 0

    @property
    def has_several(self) -> bool:
        """Whether more than one text has had a place, so that memory may be short."""
        return len(self._places) > 1

    @property
    def has_free(self) -> bool:
        """Whether one more text may run."""
        return len(self._places) < self.n or any(place.sequence is None for place in self._places)

    @property
    def longest(self) -> int:
        """Tokens of the longest text that a session holds."""
        return max(place.session.n_past for place in self._places)

    def take(self, sequence: Sequence) -> None:
        """Give a text a place, and find what of it is held already."""
        free = [place for place in self._places if place.sequence is None]
        # The place with the longest beginning of it; else one of its own; else that which was not used for longest.
        common = {id(place): common_length(place.held, sequence.tokens) for place in free}
        best = max(free, key=lambda place: (common[id(place)], not place.held, -place.used), default=None)
        if best is None or (not common[id(best)] and best.held and len(self._places) < self.n):
            best = Place(self.model.session())
            self._places.append(best)
        self._n_taken += 1
        best.used, best.sequence = self._n_taken, sequence
        sequence.session = best.session
        n_cached = best.session.reuse_prefix(sequence.tokens[:-1])  # the last one's logits are not kept
        if sequence.n_cached is None:
            sequence.n_cached = min(n_cached, sequence.n_prompt)

    def give_back(self, sequence: Sequence) -> None:
        """The text runs no more. What it has in the cache stays as long as nobody needs the memory."""
        for place in self._places:
            if place.sequence is sequence:
                place.sequence, place.held = None, []
                with suppress(EdgeInferError):  # of a backend that is lost, which says so to who asks next
                    place.held = sequence.tokens[: place.session.n_past]
        sequence.session = None

    def park(self, sequence: Sequence) -> None:
        """The text makes room for others."""
        session = sequence.session
        self.give_back(sequence)
        if isinstance(session, PooledSession):
            session.park()
            next(place for place in self._places if place.session is session).held = []

    def has_room_for(self, wants: SequenceOf[tuple[Session, int]], n_more: int) -> bool:
        """As has_room, and for one more text of so many tokens."""
        free = next((place.session for place in self._places if place.sequence is None), None)
        if free is None:
            free = self.model.session()
            self._places.append(Place(free))
        held = next(place for place in self._places if place.session is free)
        if held.held and isinstance(free, PooledSession):
            free.park()
            held.held = []
        return self.has_room([*wants, (free, max(1, n_more))])

    def has_room(self, wants: SequenceOf[tuple[Session, int]]) -> bool:
        """Whether the cache has room for so many more tokens of each of these sessions."""
        if self.pool is None or len(self._places) == 1:
            return True
        idle = [place for place in self._places if place.sequence is None and place.held]
        while not self.pool.has_room(wants):
            if not idle:
                return False
            place = idle.pop(0)
            place.held = []
            if isinstance(place.session, PooledSession):
                place.session.park()  # what is parked goes where memory is needed
        return True

    def forget(self) -> None:
        """Let the cache hold nothing of texts that have ended."""
        for place in self._places:
            if place.sequence is None:
                place.held = []
                place.session.truncate(0)
        if self.pool is not None:
            self.pool.forget_parked()

    def close(self) -> None:
        """Close the sessions that were opened here."""
        for place in self._places[1:]:
            place.session.close()
