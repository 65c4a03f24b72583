"""What rounding costs, as a number that adds up over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgeinfer.exporters.divergence import Reference, mean_distance
from edgeinfer.types import Logits


class Objective(Protocol):
    """A loss of logits, by window: 0 for those of the model that is measured against, and above for others."""

    def begin(self, logits: Sequence[Logits]) -> None:
        """Take the logits that others are compared with; they may be overwritten."""
        ...

    def loss(self, logits: Sequence[Logits]) -> float:
        """Of the windows' logits."""
        ...


class Divergence:
    """The mean Kullback-Leibler divergence of a token, in nats: the objective of models that answer."""

    def __init__(self) -> None:
        self._references: list[Reference] = []

    def begin(self, logits: Sequence[Logits]) -> None:
        """See Objective.begin."""
        self._references = [Reference(each) for each in logits]

    def loss(self, logits: Sequence[Logits]) -> float:
        """See Objective.loss."""
        return mean_distance(self._references, logits).divergence
