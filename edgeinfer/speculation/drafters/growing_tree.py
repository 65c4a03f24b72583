"""The draft tree of a head while it grows level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgeinfer.common.types import Features
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.tree import DraftTree


class Node(NamedTuple):
    """A node that may get children."""

    place: int  # index in the tree
    path_probability: float
    path: list[int]  # tokens of the tree up to it
    row: int  # pending row of its parent in the head's session, -1 for the end of the text
    feature: Features  # (n_embd,), predicted for its parent's position


@dataclass(slots=True)
class GrowingTree:
    """A tree that grows."""

    context: Context
    text: list[int]  # the context's tokens, with the path of a node after them
    limit: int  # most nodes
    n_pending: int = 0  # rows of the tree in the head's session
    tokens: list[int] = field(default_factory=list)  # by node, as the following
    parents: list[int] = field(default_factory=list)  # -1 for the end of the text
    p: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)

    def add(
        self, parent: int, path_probability: float, depth: int, candidates: Sequence[tuple[int, float, int]]
    ) -> list[tuple[int, float]]:
        """Add candidates (token, p, bucket) as children of a node; returns (place, path probability) of those that fit.

        path_probability: of the parent.  depth: of the children.
        """
        new: list[tuple[int, float]] = []
        for token, p, bucket in candidates[: self.limit - len(self.tokens)]:
            of_node = path_probability * self.context.acceptance.probability(bucket, depth, p)
            new.append((len(self.tokens), of_node))
            self.tokens.append(token)
            self.parents.append(parent)
            self.p.append(p)
            self.buckets.append(bucket)
        return new

    def take_best(self, whole: GrowingTree, path_probabilities: Sequence[float]) -> None:
        """Become the `limit` most probable nodes of another tree. path_probabilities: of its nodes."""
        # No node has a higher path probability than its parent, and each comes after it; the sort is stable. So the
        # nodes that are kept are a tree.
        order = sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)
        kept = sorted(order[: self.limit])
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        self.tokens = [whole.tokens[node] for node in kept]
        self.parents = [place[whole.parents[node]] for node in kept]
        self.p = [whole.p[node] for node in kept]
        self.buckets = [whole.buckets[node] for node in kept]

    def tree(self) -> DraftTree:
        """The tree as it is now."""
        return DraftTree(self.tokens, self.parents, self.p, self.buckets)
