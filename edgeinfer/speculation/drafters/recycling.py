"""Token Recycling (Luo et al., arXiv:2408.08696): drafts from the target's earlier candidates.

A table maps tokens to the top-k candidates that the target had for the next token the last time. A tree is grown from
the end of the text, the most probable node first. Unlike the paper, the last two tokens are looked up first, which is
accepted two to three times as often, and then the last one; and the table keeps the probability of each candidate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from edgeinfer.backends.native import top_k
from edgeinfer.overriding import override
from edgeinfer.speculation.drafters.base import Context, HoldingDrafter
from edgeinfer.speculation.tree import DraftTree, no_draft
from edgeinfer.types import Logits

MOST_ROWS = 65_536
LEAST_ROWS = 4096  # that are of use: a token takes two, so those of an answer overwrite each other with fewer
_N_KEPT = 3  # successors in a row
_AT_ROOT, _BELOW = 3, 2  # successors used of a row
# Buckets: whether two tokens or one were looked up, the rank, and the class of the candidate's probability, int(8 p).
# Prior acceptance probability of each.
_N_CLASSES = 8
_AFTER_ONE = _N_KEPT * _N_CLASSES
_PRIORS = (
    *((0.1, 0.12, 0.15, 0.25, 0.3, 0.3, 0.32, 0.5), (0.07,) * _N_CLASSES, (0.05,) * _N_CLASSES),
    *((0.03, 0.07, 0.08, 0.13, 0.14, 0.15, 0.15, 0.2), (0.08,) * _N_CLASSES, (0.05,) * _N_CLASSES),
)


class RecyclingDrafter(HoldingDrafter):
    """Keeps its table from one conversation to the next. n_rows: of the table."""

    name = "recycling"

    def __init__(self, n_rows: int = MOST_ROWS) -> None:
        # Key of the row, successors, classes of their probabilities; keys that collide replace each other.
        self._rows = np.full((n_rows, 1 + 2 * _N_KEPT), -1, dtype=np.int32)

    @staticmethod
    def memory(n_rows: int = MOST_ROWS) -> int:
        """Bytes of the table."""
        return 4 * n_rows * (1 + 2 * _N_KEPT)

    def start(self, context: Context) -> None:
        """See Drafter. There are no logits of the prompt but the last."""

    def propose(self, context: Context, limit: int) -> DraftTree:
        """The most probable nodes of the tree of successors, best first."""
        last = context.tokens[-1]
        before = context.tokens[-2] if len(context.tokens) > 1 else -1
        root = self._successors(before, last, _AT_ROOT)
        if not root or limit == 0:
            return no_draft()
        probability, min_probability = context.acceptance.probability, context.acceptance.min_probability
        tokens: list[int] = []
        parents: list[int] = []
        p: list[float] = []
        buckets: list[int] = []
        # Smallest first: the path probability, negated, and the node.
        heap = [(-probability(bucket, 0, _prior(bucket)), token, -1, 0, bucket, last) for token, bucket in root]
        heapq.heapify(heap)
        while heap and len(tokens) < limit:
            negated, token, parent, depth, bucket, before = heapq.heappop(heap)
            if -negated < min_probability and tokens:  # at least one node, from which the acceptance is learnt
                break
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            p.append(_prior(bucket))
            buckets.append(bucket)
            if -negated >= min_probability:
                depth += 1
                for successor, bucket in self._successors(before, token, _BELOW):
                    child = negated * probability(bucket, depth, _prior(bucket))
                    heapq.heappush(heap, (child, successor, node, depth, bucket, token))
        return DraftTree(tokens, parents, p, buckets)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """Store the top-k ids of each row under the tokens that it follows."""
        previous = context.tokens[-n_new - 2 : -1]
        if len(previous) == n_new:  # the first new token has only one before it
            previous = [-1, *previous]
        for before, last, logits in zip(previous[:-1], previous[1:], rows, strict=True):
            found = top_k(logits, _N_KEPT)
            missing = [-1] * (_N_KEPT - len(found))
            classes = [min(int(_N_CLASSES * p), _N_CLASSES - 1) for _, p in found]
            successors = [*(id for id, _ in found), *missing, *classes, *missing]
            for key in (_key(before, last), last):
                self._rows[key % len(self._rows)] = [key, *successors]

    @override
    def held(self) -> dict[str, int]:
        return {"tables": self._rows.nbytes}

    def close(self) -> None:
        """Clear the table."""
        self._rows[:] = -1

    def _successors(self, before: int, last: int, n: int) -> list[tuple[int, int]]:
        """(id, bucket) of the first n successors of two tokens, else of the last one, else none."""
        for key, bucket in ((_key(before, last), 0), (last, _AFTER_ONE)):
            owner, *values = self._rows[key % len(self._rows)].tolist()
            if owner == key:
                pairs = zip(values[:n], values[_N_KEPT:], strict=False)
                return [(id, bucket + rank * _N_CLASSES + of_id) for rank, (id, of_id) in enumerate(pairs) if id >= 0]
        return []


def _key(before: int, last: int) -> int:
    """The key of two tokens, in 2**30..2**31 - 1: above all token ids."""
    return (before * 1_000_003 + last * 7919) & 0x3FFFFFFF | 0x40000000


def _prior(bucket: int) -> float:
    return _PRIORS[bucket // _N_CLASSES][bucket % _N_CLASSES]
