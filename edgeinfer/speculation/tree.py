"""Draft trees, and the check that keeps a malformed one away from the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from edgeinfer.common.errors import ShapeError

N_BUCKETS = 128


@dataclass(slots=True)
class DraftTree:
    """Draft tokens that may follow the text: several candidates for the next token, for the one after, and so on."""

    tokens: Sequence[int]  # (n,) ids
    # (n,) index of the node that each follows, smaller than its own, or -1 for the end of the text
    parents: Sequence[int]
    # (n,) 0..1, the drafter's estimate of the probability that a node is accepted if its parent is
    p: Sequence[float]
    # (n,) in 0..N_BUCKETS - 1, the drafter's classes of nodes (a match length, a confidence); the acceptance rate is
    # learnt for each bucket
    buckets: Sequence[int]

    def __len__(self) -> int:
        return len(self.tokens)


def no_draft() -> DraftTree:
    """A tree without nodes."""
    return DraftTree([], [], [], [])


def part_of(tree: DraftTree, nodes: Sequence[int]) -> DraftTree:
    """Some nodes of a tree, in their order, among them the parents of all of them."""
    place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    return DraftTree(
        [tree.tokens[node] for node in nodes],
        [place[tree.parents[node]] for node in nodes],
        [tree.p[node] for node in nodes],
        [tree.buckets[node] for node in nodes],
    )


def checked(tree: DraftTree, n_vocab: int, limit: int) -> DraftTree:
    """The tree as lists of Python numbers. Raises ShapeError unless it has at most limit nodes, all of them valid."""
    tokens, parents, buckets = (
        [index(value) for value in values] for values in (tree.tokens, tree.parents, tree.buckets)
    )
    p = [float(value) for value in tree.p]
    if not len(tokens) == len(parents) == len(p) == len(buckets) <= limit:
        sizes = f"{len(tokens)} tokens, {len(parents)} parents, {len(p)} p, {len(buckets)} buckets"
        raise ShapeError(f"a draft must have as many of each, and at most {limit}: found {sizes}")
    if not tokens:
        return DraftTree(tokens, parents, p, buckets)
    if min(tokens) < 0 or max(tokens) >= n_vocab:
        raise ShapeError(f"a draft's tokens must be in 0..{n_vocab - 1}: found {min(tokens)}..{max(tokens)}")
    if min(buckets) < 0 or max(buckets) >= N_BUCKETS:
        raise ShapeError(f"a draft's buckets must be in 0..{N_BUCKETS - 1}: found {min(buckets)}..{max(buckets)}")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ShapeError(f"a draft's parent must be -1 or an earlier node: node {node} has parent {parent}")
        if not 0.0 <= p[node] <= 1.0:  # False for NaN
            what = "NaN" if math.isnan(p[node]) else f"{p[node]:g}"
            raise ShapeError(f"a draft's p must be in 0..1: node {node} has {what}")
    return DraftTree(tokens, parents, p, buckets)
