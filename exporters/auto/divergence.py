"""How far logits are from those of the unrounded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.types import Logits


class Distance(NamedTuple):
    """Means over tokens. divergence: Kullback-Leibler, in nats.  agreement: share with the same likeliest token."""

    divergence: float
    agreement: float


class Reference:
    """The distributions that a model is to have. logits: (n, n_vocab); they are overwritten."""

    def __init__(self, logits: Logits) -> None:
        self._likeliest = logits.argmax(axis=1)
        # Of KL(p, q) = sum p log p - sum p log q, the first sum.
        self._sums = np.empty(len(logits))
        for i, row in enumerate(logits):
            total = _log_sum(row)
            p = np.exp(row - np.float32(total))
            self._sums[i] = float(np.dot(p, row)) - total
            logits[i] = p
        self._p = logits

    def distances(self, logits: Logits) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """(n,) divergences and whether the likeliest tokens agree."""
        found = np.array([float(np.dot(p, row)) - _log_sum(row) for p, row in zip(self._p, logits, strict=True)])
        return self._sums - found, logits.argmax(axis=1) == self._likeliest


def mean_distance(references: Sequence[Reference], logits: Sequence[Logits]) -> Distance:
    """Over the tokens of several texts."""
    found = [reference.distances(rows) for reference, rows in zip(references, logits, strict=True)]
    divergence, agreement = (np.concatenate(each) for each in zip(*found, strict=True))
    return Distance(float(divergence.mean()), float(agreement.mean()))


def _log_sum(row: NDArray[np.float32]) -> float:
    """log sum exp."""
    largest = float(row.max())
    return largest + float(np.log(np.exp(row - np.float32(largest)).sum()))
