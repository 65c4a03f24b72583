"""The objective of drafters: how often they choose the target's token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.auto.chains import NEVER, Margins, of_rows
from edgeinfer.exporters.auto.state import State
from edgeinfer.types import Logits

_CLOSE = 0.5  # share of the rows whose margins count: those that rounding may turn over


class MarginNoise:
    """The mean squared change of margins, of those that are near to 0. It adds up over tensors.

    The margins of the drafter as it is are kept in the state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._margins: list[Margins] = []
        self._close: list[NDArray[np.bool_]] = []

    def begin(self, margins: Sequence[Margins]) -> None:
        """Take the margins of the drafter as it is, by text."""
        self._set(margins)
        for text, rows in enumerate(margins):
            for (start, depth), value in np.ndenumerate(rows):
                self._state.add(f"margin {text} {start} {depth}", float(value))

    def _set(self, margins: Sequence[Margins]) -> None:
        self._margins = list(margins)
        sizes = np.concatenate([np.abs(each[each != NEVER]).reshape(-1) for each in margins])
        most = float(np.quantile(sizes, _CLOSE)) if sizes.size else 0.0
        self._close = [np.abs(each) <= most for each in margins]

    def loss(self, margins: Sequence[Margins]) -> float:
        """See Objective.loss, from margins."""
        pairs = zip(margins, self._margins, self._close, strict=True)
        changes = np.concatenate([(now - before)[close] for now, before, close in pairs])
        return float(np.square(changes).mean()) if changes.size else 0.0

    def margins(self, shapes: Sequence[tuple[int, int]]) -> Sequence[Margins]:
        """Those of the drafter as it is, by text, measured now or before. shapes: of each text."""
        if not self._margins:
            self._set([self._known(text, shape) for text, shape in enumerate(shapes)])
        return self._margins

    def _known(self, text: int, shape: tuple[int, int]) -> Margins:
        values = [self._state.get(f"margin {text} {start} {depth}") for start, depth in np.ndindex(*shape)]
        return np.array([NEVER if each is None else each for each in values]).reshape(shape)


class Agreement:
    """The objective (see Objective) of draft models. columns: of the target's token in the logits of each row that
    counts, by text; -1 where there is none.
    """

    def __init__(self, columns: Sequence[NDArray[np.intp]], noise: MarginNoise) -> None:
        self._columns, self._noise = columns, noise

    def begin(self, logits: Sequence[Logits]) -> None:
        """See Objective.begin."""
        self._noise.begin(self._margins(logits))

    def loss(self, logits: Sequence[Logits]) -> float:
        """See Objective.loss."""
        return self._noise.loss(self._margins(logits))

    def _margins(self, logits: Sequence[Logits]) -> list[Margins]:
        return [of_rows(margins_of(rows, columns), 1) for rows, columns in zip(logits, self._columns, strict=True)]


def margins_of(logits: Logits, columns: NDArray[np.intp]) -> NDArray[np.float32]:
    """(n,) the logit of each row in a column minus the largest other one; NEVER where the column is -1."""
    rows = np.arange(len(logits))
    own = logits[rows, columns]
    others = np.partition(logits, -2, axis=1)[:, -2:]
    largest = np.where(own == others[:, 1], others[:, 0], others[:, 1])
    return np.where(columns < 0, np.float32(NEVER), own - largest)
