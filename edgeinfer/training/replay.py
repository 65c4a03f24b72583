"""How many tokens a step drafting with a head would give, by a replay on answers that were recorded.

At every position of an answer the head drafts a tree from the target's features up to there, best-first by the product
of its chances as EAGLE-2 does (arXiv:2406.16858, section 4): level by level the likeliest nodes are gone on from, and
the likeliest of all are kept. What of the tree the record goes along is accepted, and one token more comes from the
target; the steps of a whole answer follow from that. For greedy answers this is what would happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from edgeinfer.training.head import DraftHead, KeysValues
from edgeinfer.types import TokenIds

DEPTH = 8  # levels of a tree
BEAM = 8  # nodes of a level that are gone on from
AT_ONCE = 32  # positions that are drafted from side by side


@dataclass(frozen=True)
class Level:
    """Nodes of one depth, for each of some positions.

    tokens: (n, k) ids of the target.  reach: (n, k) chance of the node and all before it.  is_right: (n, k) whether the
    record goes along it.
    """

    tokens: torch.Tensor
    reach: torch.Tensor
    is_right: torch.Tensor


class Replay:
    """Drafts with a head on recorded texts. draft_vocab: (n_draft,) ids.  The others as for Objective."""

    def __init__(
        self, head: DraftHead, embedding: torch.Tensor, output: torch.Tensor, draft_vocab: torch.Tensor
    ) -> None:
        self._head = head
        self._embedding = embedding
        self._output = output
        self._vocab = draft_vocab

    @torch.no_grad()
    def accepted(
        self, tokens: TokenIds, features: torch.Tensor, n_prompt: int, sizes: Sequence[int]
    ) -> dict[int, list[int]]:
        """For trees of each size, how many drafted tokens are right at each position of the answer but its last two.

        tokens: (n,).  features: (n, n_embd).
        """
        device = features.device
        ids = torch.from_numpy(tokens.astype("int64")).to(device)
        starts = torch.arange(n_prompt - 1, len(ids) - 2, device=device)  # ids[start + 1] is known, what follows not
        found: dict[int, list[int]] = {size: [] for size in sizes}
        if not len(starts):
            return found
        context = self._context(ids, features)
        for part in starts.split(AT_ONCE):
            levels = list(self._levels(ids, features, part, context))
            for size in sizes:
                found[size] += _lengths(levels, size).tolist()
        return found

    def _context(self, ids: torch.Tensor, features: torch.Tensor) -> list[KeysValues]:
        """Keys and values of each block for the text with the target's features."""
        n = len(ids) - 1
        place = torch.arange(n, device=ids.device)
        embeddings = functional.embedding(ids[1:], self._embedding)
        mask = (place[:, None] >= place)[None, None]
        return self._head(features[None, :n], embeddings[None], place[None], mask)[1]

    def _levels(
        self, ids: torch.Tensor, features: torch.Tensor, starts: torch.Tensor, context: list[KeysValues]
    ) -> Iterator[Level]:
        """Level by level the nodes behind each start, (n, BEAM * BEAM) or fewer."""
        n, device = len(starts), ids.device
        place = torch.arange(len(ids) - 1, device=device)
        seen = (place <= starts[:, None] - 1)[:, None, None]  # of the context; a start's own row is computed below
        past = [tuple(each.expand(n, -1, -1, -1) for each in pair) for pair in context]
        state = features[starts][:, None]  # (n, 1, n_embd)
        token, reach = ids[starts + 1][:, None], torch.ones((n, 1), device=device)
        right = torch.ones((n, 1), dtype=torch.bool, device=device)
        kept: list[list[KeysValues]] = []
        n_kept = 0
        ancestors = torch.empty((n, 1, 0), dtype=torch.int64, device=device)  # rows of the kept ones that a node sees
        for depth in range(DEPTH):
            width = token.shape[1]
            own = torch.arange(width, device=device).expand(n, -1)[..., None] + n_kept
            ancestors = torch.cat([ancestors, own], dim=-1)
            mask = torch.cat(
                [
                    seen.expand(-1, -1, width, -1),
                    functional.one_hot(ancestors, n_kept + width).sum(dim=-2).bool()[:, None],
                ],
                dim=-1,
            )
            positions = (starts + depth)[:, None].expand(-1, width)
            embeddings = functional.embedding(token, self._embedding)
            rows, new = self._head(state, embeddings, positions, mask, [past, *kept])
            kept.append(new)
            n_kept += width
            chances = functional.linear(rows, self._output).float().softmax(dim=-1)
            best, index = chances.topk(min(BEAM, chances.shape[-1]), dim=-1)  # (n, width, BEAM)
            children = self._vocab[index].flatten(1)
            children_reach = (reach[..., None] * best).flatten(1)
            record = ids[(starts + depth + 2).clamp(max=len(ids) - 1)]
            is_there = (starts + depth + 2 < len(ids))[:, None]
            children_right = (
                right[..., None].expand(-1, -1, best.shape[-1]).flatten(1) & (children == record[:, None]) & is_there
            )
            yield Level(children, children_reach, children_right)
            reach, chosen = children_reach.topk(min(BEAM, children.shape[1]), dim=-1)
            parent = chosen // best.shape[-1]
            token, right = children.gather(1, chosen), children_right.gather(1, chosen)
            state = rows.gather(1, parent[..., None].expand(-1, -1, rows.shape[-1]))
            ancestors = ancestors.gather(1, parent[..., None].expand(-1, -1, ancestors.shape[-1]))


def tokens_per_step(lengths: Sequence[int]) -> tuple[int, int]:
    """(tokens, steps) of an answer, given how many drafted tokens would be right at each of its positions."""
    position = n_steps = 0
    while position < len(lengths):
        position += lengths[position] + 1
        n_steps += 1
    return min(position, len(lengths)), n_steps


def _lengths(levels: Sequence[Level], size: int) -> torch.Tensor:
    """(n,) length of the right path in the tree of the `size` likeliest nodes."""
    reach = torch.cat([level.reach for level in levels], dim=1)
    is_right = torch.cat([level.is_right for level in levels], dim=1)
    # Of equal chances the one nearer to the root is taken, so that a node never comes without its parent.
    order = reach.argsort(dim=1, descending=True, stable=True)[:, :size]
    return is_right.gather(1, order).sum(dim=1)
