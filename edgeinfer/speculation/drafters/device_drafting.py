"""Levels of a draft that its device makes by itself, and when one call for several is the cheaper way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from edgeinfer.backends.base import DraftingHead, DraftingSession
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.drafters.base import AcceptanceModel

CALL = 100.0  # milliseconds that a call for several levels may take, as nothing may stop it
_DECAY = 0.98  # of the chances of levels, with each new one
_USUAL = (3.4, 4.0)  # sum of the chances of levels, and their number, before any is known

_Session = TypeVar("_Session", DraftingSession, DraftingHead)


class DeviceDrafting(Generic[_Session]):
    """What a session's device makes by itself.

    costs: of a draft behind one token, by number of levels.
    """

    def __init__(self, session: _Session, costs: CostModel) -> None:
        self.session: _Session = session
        self.costs = costs
        self._right, self._all = _USUAL

    def milliseconds(self) -> list[float]:
        """Of a draft by number of levels."""
        return self.costs.milliseconds(self.session.n_past)

    def learn(self, probability: float) -> None:
        """The first node of a level has that chance to be right."""
        self._right, self._all = _DECAY * self._right + probability, _DECAY * self._all + 1.0

    def best_n_levels(self, one: float, most: int, milliseconds: float = CALL) -> int:
        """Levels of which one that will be right costs least; 1 for those that the host makes one by one.

        one: milliseconds of such a level.  most: levels.  milliseconds: that they may take.
        """
        costs = self.milliseconds()
        best_n_levels, best, expected = 1, one, 1.0
        for n in range(2, min(most, MAX_TOKENS) + 1):
            expected += (self._right / self._all) ** (n - 1)
            if costs[n] < best * expected and costs[n] <= milliseconds:
                best_n_levels, best = n, costs[n] / expected
        return best_n_levels

    def n_useful_levels(self, n: int, path_probability: Sequence[float], acceptance: AcceptanceModel) -> int:
        """Of n levels behind those of a chain, how many will pay if they are as likely as others were."""
        longer = list(path_probability)
        while len(longer) < len(path_probability) + n and acceptance.should_extend(longer):
            longer.append((longer[-1] if longer else 1.0) * self._right / self._all)
        return len(longer) - len(path_probability)
