"""How many draft tokens a target accepts, of margins: how far a drafter's logits are from choosing otherwise.

The margin of a draft token is the logit of the target's token minus the largest other one: above 0 the drafter has
chosen as the target. Rounding moves margins by noise whose variance adds up over tensors, so that the chance to agree
is Phi(margin / deviation). Of a greedy draft that is all there is to know (Leviathan et al., arXiv:2211.17192,
section 3, without its assumption of independent tokens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.overriding import override
from edgeinfer.common.types import Logits
from edgeinfer.exporters.auto.progress import State
from edgeinfer.exporters.auto.trial import Objective

Numbers: TypeAlias = NDArray[np.float64]
# Of chains: (n_starts, n_depths), entry (i, d) of the token that is drafted at depth d behind start i if all before it
# are accepted.
Margins: TypeAlias = NDArray[np.float64]

NEVER = -1e9  # the margin of a token that the drafter has no logit for
_GRID = np.linspace(-6.0, 6.0, 2401)
_VARIANCES = np.concatenate([[0.0], np.geomspace(1e-6, 1e4, 300)])
_PHI = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in _GRID])
_CLOSE = 0.5  # share of the rows whose margins count: those that rounding may turn over


def of_rows(rows: NDArray[np.floating], n_depths: int) -> Margins:
    """The chains in consecutive rows of a text; shorter ones at the end are left out. (0, n_depths) of a short text."""
    if len(rows) < n_depths:
        return np.empty((0, n_depths))
    return np.lib.stride_tricks.sliding_window_view(np.asarray(rows, dtype=np.float64), n_depths).copy()


def accepted(margins: Margins, variance: float = 0.0) -> Numbers:
    """(n_depths,) mean number of draft tokens that are accepted, by the length of the draft from 1 on.

    variance: of the noise in the margins; 0 counts what is right.
    """
    return np.asarray(_agreeing(margins, variance).cumprod(axis=1).mean(axis=0).cumsum())


def acceptance(margins: Margins, variance: float = 0.0) -> float:
    """The share of first draft tokens that are right."""
    return float(_agreeing(margins[:, :1], variance).mean())


def _agreeing(margins: Margins, variance: float) -> Numbers:
    if variance <= 0.0:
        return (margins > 0.0).astype(np.float64)
    return np.asarray(np.interp(margins / math.sqrt(variance), _GRID, _PHI))


class Expected:
    """What the drafts of a drafter are worth when noise is added to its margins.

    Noise that makes drafts better, as it does those of a drafter that is mostly wrong, counts as none.
    """

    def __init__(self, margins: Margins) -> None:
        found = np.stack([accepted(margins, each) for each in _VARIANCES])
        self._accepted = np.minimum.accumulate(found, axis=0)
        self._first = np.minimum.accumulate([acceptance(margins, each) for each in _VARIANCES])

    def accepted(self, variances: Numbers) -> Numbers:
        """(n, n_depths) draft tokens that are accepted, by variance and length of the draft."""
        return np.stack([np.interp(variances, _VARIANCES, each) for each in self._accepted.T], axis=1)

    def acceptance(self, variance: float) -> float:
        """The share of first draft tokens that are right."""
        return float(np.interp(variance, _VARIANCES, self._first))


@dataclass(frozen=True)
class Drafting:
    """What drafting costs beside the draft model. verify_ms: (n + 1,) of the target's passes by number of tokens, from
    0 on.  lengths: draft tokens of a step that are considered.
    """

    verify_ms: Sequence[float]
    lengths: Sequence[int]

    def best(self, accepted: Numbers, draft_ms: float | Numbers) -> tuple[Numbers, NDArray[np.intp]]:
        """The most tokens a millisecond, and the length of draft that gives them, (n,) each.

        accepted: (n, n_depths), see above.  draft_ms: of a draft token, one number or (n,).
        """
        lengths = np.asarray(self.lengths)
        verify = np.asarray(self.verify_ms)[lengths + 1]
        ms = np.asarray(draft_ms, dtype=np.float64).reshape(-1, 1) * lengths + verify
        rates = (1.0 + np.atleast_2d(accepted)[:, lengths - 1]) / ms
        return rates.max(axis=1), lengths[rates.argmax(axis=1)]


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


class Agreement(Objective):
    """The objective (see Objective) of draft models. columns: of the target's token in the logits of each row that
    counts, by text; -1 where there is none.
    """

    def __init__(self, columns: Sequence[NDArray[np.intp]], noise: MarginNoise) -> None:
        self._columns, self._noise = columns, noise

    @override
    def begin(self, logits: Sequence[Logits]) -> None:
        self._noise.begin(self._margins(logits))

    @override
    def loss(self, logits: Sequence[Logits]) -> float:
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
