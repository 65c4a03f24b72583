"""What speculation did for a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Nodes that were checked, and those of them that were right and became text."""

    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """Share that was accepted, 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """Figures of a request after its first token.

    steps: forward passes of the model.  tokens: that they gave.  by_drafter, by_depth (the first entry: nodes right
    behind the text): what was checked.  draft_seconds: for making and choosing drafts and learning from them;
    waited_seconds: of these, for drafters that take time, little where they work while the model does.  verify_seconds:
    in forward passes.  plain_seconds: estimate, from the measured cost of one token, of what one by one would have
    taken instead of step_seconds, for all of it.  dropped: drafters that were not used to the end, and why.
    """

    steps: int
    tokens: int
    by_drafter: Mapping[str, DraftCounts]
    by_depth: Sequence[DraftCounts]
    draft_seconds: float
    waited_seconds: float
    verify_seconds: float
    step_seconds: float
    plain_seconds: float
    dropped: Mapping[str, str]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a forward pass, 0 without one."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rejected(self) -> int:
        """Drafted tokens that were checked for nothing."""
        return sum(of.drafted - of.accepted for of in self.by_depth)

    @property
    def speedup(self) -> float:
        """Estimated speed against one by one, 1 where nothing was done."""
        return self.plain_seconds / self.step_seconds if self.step_seconds else 1.0


class StatsCounter:
    """Counts while a request runs."""

    def __init__(self) -> None:
        self.draft_seconds = self.waited_seconds = self.verify_seconds = self.step_seconds = self.plain_seconds = 0.0
        self.dropped: dict[str, str] = {}
        self._steps = self._tokens = 0
        self._drafters: dict[str, list[int]] = {}
        self._depths: list[list[int]] = []

    def count(self, n_tokens: int, depths: Sequence[int], owners: Sequence[str], accepted: Sequence[int]) -> None:
        """A step gave n_tokens. depths, owners: of the nodes checked.  accepted: nodes that became text."""
        self._steps += 1
        self._tokens += n_tokens
        while depths and len(self._depths) <= max(depths):
            self._depths.append([0, 0])
        for depth, owner in zip(depths, owners, strict=True):
            self._depths[depth][0] += 1
            self._drafters.setdefault(owner, [0, 0])[0] += 1
        for node in accepted:
            self._depths[depths[node]][1] += 1
            self._drafters[owners[node]][1] += 1

    def figures(self) -> Speculation:
        """The figures until now."""
        return Speculation(
            self._steps,
            self._tokens,
            {name: DraftCounts(*counts) for name, counts in self._drafters.items()},
            tuple(DraftCounts(*counts) for counts in self._depths),
            self.draft_seconds,
            self.waited_seconds,
            self.verify_seconds,
            self.step_seconds,
            self.plain_seconds,
            dict(self.dropped),
        )
