"""Token Recycling (Luo et al., arXiv:2408.08696): drafts from the target's earlier candidates.

A table maps tokens to the top-k candidates that the target had for the next token the last time. A tree is grown from
the end of the text, the most probable node first. Unlike the paper, the last two tokens are looked up first, which is
accepted two to three times as often, and then the last one; and the table keeps the logits of the candidates, so that
penalties and the noise of the draw are foreseen (edgeinfer.speculation.drafters.foresight).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from struct import Struct

import numpy as np

from edgeinfer.backends.native import top_k
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Logits
from edgeinfer.speculation.drafters.base import Context, HoldingDrafter, SharedDrafter
from edgeinfer.speculation.drafters.foresight import Foresight, foresight_of
from edgeinfer.speculation.tree import DraftTree, no_draft

MOST_ROWS = 65_536
LEAST_ROWS = 4096  # of a useful table; a token takes two rows, and in a smaller table those of an answer collide
_N_KEPT = 6  # successors in a row
_AT_ROOT, _BELOW = 3, 2  # how many of these become nodes
# Buckets: whether the target's choice depends on more than its logits, whether two tokens or one were looked up, the
# rank, and the class of the candidate's probability, int(8 p). Prior acceptance probability of each.
_N_CLASSES = 8
_MOST = 6e4  # logits that half floats hold
# A row of each table; numpy takes several times as long for so few numbers.
_ROW, _LOGITS = Struct(f"={1 + _N_KEPT}i"), Struct(f"={_N_KEPT + 1}e")
_AFTER_ONE = _AT_ROOT * _N_CLASSES
_FORESEEN = 2 * _AFTER_ONE
_PRIORS = (
    *((0.1, 0.12, 0.15, 0.25, 0.3, 0.3, 0.32, 0.5), (0.07,) * _N_CLASSES, (0.05,) * _N_CLASSES),
    *((0.03, 0.07, 0.08, 0.13, 0.14, 0.15, 0.15, 0.2), (0.08,) * _N_CLASSES, (0.05,) * _N_CLASSES),
)


class RecyclingDrafter(HoldingDrafter, SharedDrafter):
    """Keeps its table from one conversation to the next. n_rows: of the table."""

    name = "recycling"

    def __init__(self, n_rows: int = MOST_ROWS) -> None:
        # (n_rows, 1 + _N_KEPT): the key of each row, and the successors. Keys that collide replace each other.
        self._rows = np.full((n_rows, 1 + _N_KEPT), -1, dtype=np.int32)
        # (n_rows, _N_KEPT + 1): logits of the successors, and the log of the sum of the exponentials of all logits.
        self._logits = np.zeros((n_rows, _N_KEPT + 1), dtype=np.float16)
        self._n_rows = n_rows

    @staticmethod
    def memory(n_rows: int = MOST_ROWS) -> int:
        """Bytes of the table."""
        return n_rows * (4 * (1 + _N_KEPT) + 2 * (_N_KEPT + 1))

    def start(self, context: Context) -> None:
        """See Drafter. Of a prompt only the last row has logits, so there is nothing to store."""

    def propose(self, context: Context, limit: int) -> DraftTree:
        """The most probable nodes of the tree of successors, best first."""
        last = context.tokens[-1]
        before = context.tokens[-2] if len(context.tokens) > 1 else -1
        foresight = foresight_of(context)
        root = self._successors(before, last, _AT_ROOT, foresight, ())
        if not root or limit == 0:
            return no_draft()
        probability, min_probability = context.acceptance.probability, context.acceptance.min_probability
        tokens: list[int] = []
        parents: list[int] = []
        p: list[float] = []
        buckets: list[int] = []
        # Smallest first: the path probability, negated, the node, and the draft tokens before it.
        heap: list[tuple[float, int, int, int, int, tuple[int, ...]]]
        heap = [(-probability(bucket, 0, _prior(bucket)), token, -1, bucket, last, ()) for token, bucket in root]
        heapq.heapify(heap)
        while heap and len(tokens) < limit:
            negated, token, parent, bucket, before, path = heapq.heappop(heap)
            if -negated < min_probability and tokens:  # at least one node, from which the acceptance is learnt
                break
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            p.append(_prior(bucket))
            buckets.append(bucket)
            if -negated >= min_probability:
                path = (*path, token)
                for successor, bucket in self._successors(before, token, _BELOW, foresight, path):
                    child = negated * probability(bucket, len(path), _prior(bucket))
                    heapq.heappush(heap, (child, successor, node, bucket, token, path))
        return DraftTree(tokens, parents, p, buckets)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """Store the top-k of each row under the tokens that it follows."""
        previous = context.tokens[-n_new - 2 : -1]
        if len(previous) == n_new:  # the first new token has only one before it
            previous = [-1, *previous]
        for before, last, logits in zip(previous[:-1], previous[1:], rows, strict=True):
            found = top_k(logits, _N_KEPT)
            ids = [id for id, _ in found]
            of_ids = logits[ids].clip(-_MOST, _MOST).tolist()
            total = of_ids[0] - math.log(max(found[0][1], 1e-30))
            n_missing = _N_KEPT - len(ids)
            ids += [-1] * n_missing
            of_ids += [0.0] * n_missing
            for key in (_key(before, last), last):
                place = key % self._n_rows
                _ROW.pack_into(self._rows.data, place * _ROW.size, key, *ids)
                _LOGITS.pack_into(self._logits.data, place * _LOGITS.size, *of_ids, total)

    @override
    def beside(self) -> RecyclingDrafter:
        return self

    @override
    def held(self) -> dict[str, int]:
        return {"tables": self._rows.nbytes + self._logits.nbytes}

    def close(self) -> None:
        """Clear the table."""
        self._rows[:] = -1

    def _successors(
        self, before: int, last: int, n: int, foresight: Foresight | None, path: Sequence[int]
    ) -> list[tuple[int, int]]:
        """(id, bucket) of the first n successors of two tokens, else of the last one, else none.

        foresight: of the target's choice, where that depends on more than its logits.  path: of drafts up to `last`.
        """
        for key, bucket in ((_key(before, last), 0), (last, _AFTER_ONE)):
            place = key % self._n_rows
            owner, *ids = _ROW.unpack_from(self._rows.data, place * _ROW.size)
            if owner != key:
                continue
            *logits, total = _LOGITS.unpack_from(self._logits.data, place * _LOGITS.size)
            if foresight is None:
                pairs = [(id, math.exp(min(logit - total, 0.0))) for id, logit in zip(ids[:n], logits, strict=False)]
                found = [pair for pair in pairs if pair[0] >= 0]
            else:
                known = [(id, logit) for id, logit in zip(ids, logits, strict=True) if id >= 0]
                found, bucket = foresight.ranked(known, total, path)[:n], bucket + _FORESEEN
            classes = [min(int(_N_CLASSES * p), _N_CLASSES - 1) for _, p in found]
            return [(id, bucket + rank * _N_CLASSES + classes[rank]) for rank, (id, _) in enumerate(found)]
        return []


def _key(before: int, last: int) -> int:
    """The key of two tokens, in 2**30..2**31 - 1: above all token ids."""
    return (before * 1_000_003 + last * 7919) & 0x3FFFFFFF | 0x40000000


def _prior(bucket: int) -> float:
    return _PRIORS[bucket % _FORESEEN // _N_CLASSES][bucket % _N_CLASSES]
