"""Device drafting: a device makes several levels of a draft in one call, where that is cheaper than one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from edgeinfer.backends.base import DraftingHead, DraftingSession, HeadSession, Session
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.drafters.base import AcceptanceModel

MAX_CALL_MS = 100.0  # of a call for several levels, which cannot be interrupted
_DECAY = 0.98  # of the observed probabilities of levels, with each new one
_PRIOR = (3.4, 4.0)  # sum of the probabilities of levels, and their number, before any is observed

_Session = TypeVar("_Session", DraftingSession, DraftingHead)


class DeviceDrafting(Generic[_Session]):
    """Drafts of a session's device in one call, and their costs.

    costs: of a draft after one token, by number of levels.
    """

    def __init__(self, session: _Session, costs: CostModel) -> None:
        self.session: _Session = session
        self.costs = costs
        self._accepted, self._all = _PRIOR

    def milliseconds(self) -> list[float]:
        """Milliseconds of a draft, by number of levels."""
        return self.costs.milliseconds(self.session.n_past)

    def learn(self, probability: float) -> None:
        """Observe the acceptance probability of the first node of a level."""
        self._accepted, self._all = _DECAY * self._accepted + probability, _DECAY * self._all + 1.0

    def best_n_levels(self, one_ms: float, max_levels: int, max_ms: float = MAX_CALL_MS) -> int:
        """Number of levels with the least cost per accepted level; 1 means that the host makes levels one by one.

        one_ms: cost of a level made by the host.  max_ms: longest call.
        """
        costs = self.milliseconds()
        best_n, best_ms, expected = 1, one_ms, 1.0
        for n in range(2, min(max_levels, MAX_TOKENS) + 1):
            expected += (self._accepted / self._all) ** (n - 1)
            if costs[n] < best_ms * expected and costs[n] <= max_ms:
                best_n, best_ms = n, costs[n] / expected
        return best_n

    def n_useful_levels(self, n: int, path_probabilities: Sequence[float], acceptance: AcceptanceModel) -> int:
        """How many of n levels after a chain are worth making, at the mean acceptance rate of levels."""
        longer = list(path_probabilities)
        while len(longer) < len(path_probabilities) + n and acceptance.should_extend(longer):
            longer.append((longer[-1] if longer else 1.0) * self._accepted / self._all)
        return len(longer) - len(path_probabilities)


def close_drafter(
    session: Session | HeadSession, costs: CostModel, device_drafting: DeviceDrafting[Any] | None
) -> None:
    """Free the session and the model of a drafter, and keep the corrected cost curves."""
    costs.close()
    if device_drafting is not None:
        device_drafting.costs.close()
    session.close()
    session.model.close()
