"""A draft tree of several chains, which share their common beginnings."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.tree import DraftTree


class Chains:
    """The chains of one draft. limit: most nodes."""

    def __init__(self, context: Context, limit: int) -> None:
        self._acceptance = context.acceptance
        self._limit = limit
        self._tokens, self._parents = list[int](), list[int]()
        self._p, self._buckets = list[float](), list[int]()
        self._path_probabilities: list[float] = []
        self._places: dict[tuple[int, int], int] = {}  # node with (parent, token)

    def add(self, tokens: Sequence[int], buckets: Sequence[int], priors: Sequence[tuple[float, float]]) -> None:
        """Add a chain up to its last useful node. The very first node is always added, to learn its acceptance.

        A node that another chain has already gets the likelier bucket.

        priors: acceptance probabilities of each node, (as the first after the text, elsewhere).
        """
        probability, least = self._acceptance.probability, self._acceptance.min_probability
        parent, reached = -1, 1.0
        for depth, (token, bucket, (first, later)) in enumerate(zip(tokens, buckets, priors, strict=True)):
            node, p = self._places.get((parent, token)), later if depth else first
            reached *= probability(bucket, depth, p)
            if node is not None:
                if reached > self._path_probabilities[node]:
                    self._p[node], self._buckets[node], self._path_probabilities[node] = p, bucket, reached
            else:
                if len(self._tokens) >= self._limit or (self._tokens and reached < least):
                    return
                node = self._places[parent, token] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(parent)
                self._p.append(p)
                self._buckets.append(bucket)
                self._path_probabilities.append(reached)
            parent, reached = node, self._path_probabilities[node]

    def tree(self) -> DraftTree:
        """The tree of all chains."""
        return DraftTree(self._tokens, self._parents, self._p, self._buckets)
