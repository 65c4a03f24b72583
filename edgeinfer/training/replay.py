"""Tokens per step of drafting with a head, computed by a replay on recorded answers.

At every position of an answer the head drafts a tree from the target's features, best-first by the product of its
probabilities as in EAGLE-2 (arXiv:2406.16858, section 4): at each level the most probable nodes are expanded, and the
most probable nodes of all are kept. The nodes along the recorded answer are accepted, and one more token comes from the
target; this gives the steps of the whole answer. For greedy answers it is what decoding would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from edgeinfer.common.types import TokenIds
from edgeinfer.training.head import DraftHead, KeysValues

DEPTH = 8  # levels of a tree
BEAM = 8  # nodes of a level that are expanded
AT_ONCE = 32  # positions that are drafted from side by side


@dataclass(frozen=True)
class Level:
    """k nodes of one depth, for each of n positions."""

    tokens: torch.Tensor  # (n, k) ids of the target
    path_probability: torch.Tensor  # (n, k), of the node and all before it
    is_right: torch.Tensor  # (n, k), whether the recorded answer has this path


class Replay:
    """Drafts with a head on recorded texts.  draft_vocab: (n_logits,) ids. Other arguments as for Objective."""

    def __init__(
        self, head: DraftHead, embedding: torch.Tensor, output: torch.Tensor, draft_vocab: torch.Tensor
    ) -> None:
        self.head = head
        self.embedding = embedding
        self.output = output
        self.draft_vocab = draft_vocab

    @torch.no_grad()
    def accepted(
        self, tokens: TokenIds, rows: torch.Tensor, n_prompt: int, sizes: Sequence[int]
    ) -> dict[int, list[int]]:
        """For trees of each size, the number of accepted draft tokens at each position of the answer but its last two.

        tokens: (n,).  rows: (n, n_rows), the target's.
        """
        device, features = rows.device, self.head.combined(rows)
        ids = torch.from_numpy(tokens.astype("int64")).to(device)
        starts = torch.arange(n_prompt - 1, len(ids) - 2, device=device)  # ids[start + 1] is known, and none after it
        found: dict[int, list[int]] = {size: [] for size in sizes}
        if not len(starts):
            return found
        context = self._context(ids, features)
        for part in starts.split(AT_ONCE):
            levels = list(_Growth(self, ids, features, part, context, max(sizes)).levels())
            for size in sizes:
                found[size] += _lengths(levels, size).tolist()
        return found

    @torch.no_grad()
    def chains(
        self, tokens: TokenIds, rows: torch.Tensor, starts: torch.Tensor, depth: int, noise: torch.Generator | None
    ) -> torch.Tensor:
        """(n, depth) tokens that the head drafts after positions starts (n,) and the token that follows each.

        Sampled from its probabilities, or the most likely tokens without noise.  tokens: (n,).  rows: (n, n_rows), the
        target's.
        """
        device, features = rows.device, self.head.combined(rows)
        ids = torch.from_numpy(tokens.astype("int64")).to(device)
        context, n = self._context(ids, features), len(starts)
        kept = [[(k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1)) for k, v in context]]
        mask = (torch.arange(len(ids) - 1, device=device) < starts[:, None])[
            :, None, None
        ]  # a start's own is kept anew
        drafted, token, feature = [], ids[starts + 1], features[starts][:, None]
        for step in range(depth):
            mask = functional.pad(mask, (0, 1), value=True)
            embeddings = functional.embedding(token[:, None], self.embedding)
            feature, own = self.head(feature, embeddings, (starts + step)[:, None], mask, kept)
            kept.append(own)
            scores = functional.linear(feature[:, 0], self.output).float()
            if noise is not None:  # Gumbel's
                uniform = torch.rand(scores.shape, generator=noise, device=device).clamp(1e-20, 1.0 - 1e-7)
                scores = scores - (-uniform.log()).log()
            token = self.draft_vocab[scores.argmax(dim=-1)]
            drafted.append(token)
        return torch.stack(drafted, dim=1)

    def _context(self, ids: torch.Tensor, features: torch.Tensor) -> list[KeysValues]:
        """Keys and values of each block for the text with the target's features."""
        n = len(ids) - 1
        place = torch.arange(n, device=ids.device)
        embeddings = functional.embedding(ids[1:], self.embedding)
        mask = (place[:, None] >= place)[None, None]
        return self.head(features[None, :n], embeddings[None], place[None], mask)[1]


class _Growth:
    """Trees growing level by level after some positions of a text, while nodes can be among the `size` most probable.

    The attributes are of the frontier, the nodes to expand: tokens, path_probability, is_right (n, k), as for Level;
    features (n, k, n_embd), the inputs; path (n, k, depth + 1), indices of the kept rows that lead to each.
    """

    def __init__(
        self,
        replay: Replay,
        ids: torch.Tensor,
        features: torch.Tensor,
        starts: torch.Tensor,
        context: list[KeysValues],
        size: int,
    ) -> None:
        n, device = len(starts), ids.device
        self._replay = replay
        self._ids = ids
        self._starts = starts
        self._size = size
        self._kept: list[list[KeysValues]] = [[(k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1)) for k, v in context]]
        self._n_kept = 0  # rows after those of the context
        before = torch.arange(len(ids) - 1, device=device) < starts[:, None]  # a start's own row is computed anew
        self._seen = before[:, None, None]  # of the context, (n, 1, 1, its rows)
        self._found = torch.empty((n, 0), device=device)  # path_probability of all nodes so far
        self.tokens, self.path_probability = ids[starts + 1][:, None], torch.ones((n, 1), device=device)
        self.is_right = torch.ones((n, 1), dtype=torch.bool, device=device)
        self.features = features[starts][:, None]
        self.path = torch.empty((n, 1, 0), dtype=torch.int64, device=device)

    def levels(self) -> Iterator[Level]:
        """The nodes of each depth, whether they are expanded or not."""
        for depth in range(DEPTH):
            rows = self._forward(depth)
            level = self._children(rows, depth)
            yield level
            self._found = torch.cat([self._found, level.path_probability], dim=1)
            if not self._choose(level, rows):
                return

    def _forward(self, depth: int) -> torch.Tensor:
        """The features that the frontier's nodes predict, (n, k, n_embd)."""
        n, width = self.tokens.shape
        own = torch.arange(self._n_kept, self._n_kept + width, device=self.tokens.device).expand(n, -1)
        self.path = torch.cat([self.path, own[..., None]], dim=-1)
        self._n_kept += width
        on_path = functional.one_hot(self.path, self._n_kept).sum(dim=-2).bool()[:, None]
        mask = torch.cat([self._seen.expand(-1, -1, width, -1), on_path], dim=-1)
        positions = (self._starts + depth)[:, None].expand(-1, width)
        embeddings = functional.embedding(self.tokens, self._replay.embedding)
        rows, keys_values = self._replay.head(self.features, embeddings, positions, mask, self._kept)
        self._kept.append(keys_values)
        return rows

    def _children(self, rows: torch.Tensor, depth: int) -> Level:
        """The most likely tokens after each node of the frontier, (n, k * BEAM)."""
        probabilities = functional.linear(rows, self._replay.output).softmax(dim=-1)
        best, index = probabilities.topk(min(BEAM, probabilities.shape[-1]), dim=-1)
        tokens = self._replay.draft_vocab[index]
        place = (self._starts + depth + 2)[:, None, None]
        record = self._ids[place.clamp(max=len(self._ids) - 1)]
        is_right = self.is_right[..., None] & (tokens == record) & (place < len(self._ids))
        return Level(tokens.flatten(1), (self.path_probability[..., None] * best).flatten(1), is_right.flatten(1))

    def _choose(self, level: Level, rows: torch.Tensor) -> bool:
        """Make the most probable nodes of a level the frontier; returns False if none of them can be in the tree.

        A node that is not among the most probable now never will be, nor will its children.
        """
        least = self._found.topk(min(self._size, self._found.shape[1]), dim=1).values[:, -1:]
        path_probability, chosen = level.path_probability.topk(min(BEAM, level.path_probability.shape[1]), dim=-1)
        width = int((path_probability >= least).sum(dim=1).max())
        self.path_probability, chosen = path_probability[:, :width], chosen[:, :width]
        parents = (chosen // (level.tokens.shape[1] // rows.shape[1]))[..., None]
        self.tokens, self.is_right = level.tokens.gather(1, chosen), level.is_right.gather(1, chosen)
        self.features = rows.gather(1, parents.expand(-1, -1, rows.shape[-1]))
        self.path = self.path.gather(1, parents.expand(-1, -1, self.path.shape[-1]))
        return width > 0


def tokens_per_step(lengths: Sequence[int]) -> tuple[int, int]:
    """(tokens, steps) of an answer, given the number of accepted draft tokens at each of its positions."""
    position = n_steps = 0
    while position < len(lengths):
        position += lengths[position] + 1
        n_steps += 1
    return min(position, len(lengths)), n_steps


def _lengths(levels: Sequence[Level], size: int) -> torch.Tensor:
    """(n,) length of the accepted path in the tree of the `size` most probable nodes."""
    path_probability = torch.cat([level.path_probability for level in levels], dim=1)
    is_right = torch.cat([level.is_right for level in levels], dim=1)
    # Of equal probabilities the node nearer to the root is taken, so that a node never comes without its parent.
    order = path_probability.argsort(dim=1, descending=True, stable=True)[:, :size]
    return is_right.gather(1, order).sum(dim=1)
