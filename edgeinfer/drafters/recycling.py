"""Drafts what the model once thought of: the likeliest successors of each token, from logits that were made anyway.

Token Recycling (Luo et al., arXiv:2408.08696): a table from a token to the ids that the target found likeliest behind
it the last time; a tree is grown from the last token, the likeliest node first. Beside each id stands how likely it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.drafters.base import Context
from edgeinfer.speculation.tree import DraftTree, no_draft
from edgeinfer.types import Logits

N_SUCCESSORS = 6
_MAX_ROWS = 50_000  # so that the table stays under 2 MB: 4 bytes an id, 1 a class
_AT_ROOT, _BELOW = 4, 2  # successors that are looked at
_N_GROUPS = 1024
# Classes of the probability that a successor had: class = int(8 * p), and what is believed of it to begin with.
_N_CLASSES = 8
_RANK_PRIOR = (0.75, 0.5, 0.4, 0.35, 0.3, 0.25)


class RecyclingDrafter:
    """Keeps its table from one conversation to the next."""

    name = "recycling"

    def __init__(self, n_vocab: int) -> None:
        n_rows = min(n_vocab, _MAX_ROWS)
        self._ids = np.zeros((n_rows, N_SUCCESSORS), dtype=np.int32)
        self._classes = np.zeros((n_rows, N_SUCCESSORS), dtype=np.uint8)
        self._owner = np.full(n_rows, -1, dtype=np.int32)  # token of the row; those equal modulo n_rows share one

    @property
    def n_bytes(self) -> int:
        """Bytes of the table."""
        return self._ids.nbytes + self._classes.nbytes + self._owner.nbytes

    @staticmethod
    def memory(n_vocab: int) -> int:
        """Bytes of the table for a vocabulary."""
        return min(n_vocab, _MAX_ROWS) * (5 * N_SUCCESSORS + 4)

    def start(self, context: Context) -> None:
        """Nothing to do: there are no logits of the prompt but the last."""

    def propose(self, context: Context, limit: int) -> DraftTree:
        """The likeliest nodes of the tree of successors, best first."""
        root = self._successors(context.tokens[-1], _AT_ROOT)
        if not root or limit == 0:
            return no_draft()
        chance, floor = context.outlook.chance, context.outlook.floor
        tokens: list[int] = []
        parents: list[int] = []
        p: list[float] = []
        kinds: list[int] = []
        heap = [(-chance(kind, 0, prior), token, -1, 0, kind, prior) for token, kind, prior in root]
        heapq.heapify(heap)
        while heap and len(tokens) < limit:
            reach, token, parent, depth, kind, prior = heapq.heappop(heap)
            if -reach < floor and len(tokens) >= 2:  # two, from which the policy learns, whatever they promise
                break
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            p.append(prior)
            kinds.append(kind)
            if -reach >= floor:
                depth += 1
                for token, kind, prior in self._successors(token, _BELOW):
                    heapq.heappush(heap, (reach * chance(kind, depth, prior), token, node, depth, kind, prior))
        return DraftTree(tokens, parents, p, kinds)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """Note the likeliest ids of each row under the token that it follows."""
        before = context.tokens[-n_new - 1 : -1]
        for token, logits in zip(before, rows, strict=True):
            ids, p = likeliest(logits, N_SUCCESSORS)
            row = token % len(self._owner)
            self._owner[row] = token
            self._ids[row, : len(ids)] = ids
            self._classes[row] = 0
            self._classes[row, : len(ids)] = np.minimum(p * _N_CLASSES, _N_CLASSES - 1)

    def close(self) -> None:
        """Forget everything."""
        self._owner[:] = -1

    def _successors(self, token: int, n: int) -> list[tuple[int, int, float]]:
        """(id, kind, chance to begin with) of the first n successors, none if the token was not seen."""
        row = token % len(self._owner)
        if self._owner[row] != token:
            return []
        ids, classes = self._ids[row, :n].tolist(), self._classes[row, :n].tolist()
        return [
            (id, rank * _N_CLASSES + of_p, _RANK_PRIOR[rank] * (of_p + 0.5) / _N_CLASSES)
            for rank, (id, of_p) in enumerate(zip(ids, classes, strict=True))
        ]


def likeliest(logits: Logits, k: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """(ids (m,), probabilities (m,)) of about the k likeliest tokens, likeliest first; m <= k.

    logits: (n_vocab,). In a large vocabulary only the best of each of 1024 groups is looked at: one in some hundred of
    the ids is missed, and probabilities are a little too large; it takes 15 us for 49,000 tokens.
    """
    n_groups = _N_GROUPS if logits.size >= 8 * _N_GROUPS else logits.size
    in_groups = logits[: logits.size - logits.size % n_groups].reshape(-1, n_groups)
    best = in_groups.max(axis=0)
    k = min(k, n_groups)
    groups = np.argpartition(best, n_groups - k)[n_groups - k :]
    groups = groups[np.argsort(-best[groups])]
    weights = np.exp(best - best[groups[0]])
    return in_groups[:, groups].argmax(axis=0) * n_groups + groups, weights[groups] / weights.sum()
