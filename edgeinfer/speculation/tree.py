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
    """Draft tokens that may follow the text: several candidates for the next token, for the one after each, and so on.

    tokens: (n,) ids.  parents: (n,) index of the node that each follows, smaller than its own, or -1 for the end of the
    text.  p: (n,) the drafter's estimate, 0..1, of the probability that a node is accepted if its parent is.  buckets:
    (n,) in 0..N_BUCKETS - 1, the drafter's classes of nodes (a match length, a confidence); the acceptance rate is
    learnt for each bucket.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    p: Sequence[float]
    buckets: Sequence[int]

    def __len__(self) -> int:
        return len(self.tokens)


def no_draft() -> DraftTree:
    """A tree without nodes."""
    return DraftTree([], [], [], [])


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
