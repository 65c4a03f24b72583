"""Training of a head after its own drafts (DistillSpec, Zhou et al., arXiv:2310.08461).

From positions all over the answers of a batch the head drafts chains of tokens, sampled from its probabilities. The
target's rows after these tokens are computed, and the head learns the target's probabilities there. So it learns paths
that the target's own text never takes. Chains are drafted when their batch is trained on, with the head of that moment.
They are not kept: they follow from the weights, the seed and the number of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.training.batches import Batch, Batches, Piece, Plan
from edgeinfer.training.features import Halves, Recorder, Sample
from edgeinfer.training.replay import Replay

DEPTH = 6  # tokens of a chain
STRIDE = 16  # positions from one chain to the next


class Rounds:
    """Batches of texts, as in an epoch, with chains that leave them.

    n_steps: of the head's own drafts in each batch. A chain begins with copies of the n_steps - 1 rows of the text
    before it, since each step continues from what the step before predicted for the row before.
    """

    def __init__(self, batches: Batches, replay: Replay, recorder: Recorder, n_steps: int, seed: int) -> None:
        self._batches = batches
        self._replay = replay
        self._recorder = recorder
        self._n_copied = n_steps - 1
        self._seed = seed

    def plans(self, epoch: int) -> list[Plan]:
        """The batches of an epoch that is a round."""
        return self._batches.plans(self._seed, epoch, self._length)

    def stream(self, plans: Sequence[Plan], epoch: int, device: torch.device) -> Iterator[Batch]:
        """The batches on a device; the chains of each are drafted when it is requested."""
        for plan in plans:
            rows = self._batches.rows(plan)
            pieces = [[piece for text in self._with_chains(row, epoch) for piece in text] for row in rows]
            yield self._batches.batch(pieces).to(device)

    def _with_chains(self, row: Sequence[tuple[Sample, Halves]], epoch: int) -> Iterator[list[Piece]]:
        """For each text of a row, its piece and those of its chains."""
        n_pieces = 0
        for sample, rows in row:
            starts = self._starts(sample, epoch)
            pieces = [self._batches.piece(sample, rows)]
            if len(starts):
                pieces += self._chains(sample, rows, starts, epoch, leaves=n_pieces)
            n_pieces += len(pieces)
            yield pieces

    def _chains(
        self, sample: Sample, rows: Halves, starts: NDArray[np.int64], epoch: int, leaves: int
    ) -> Iterator[Piece]:
        """Chains from positions of a text. leaves: the place of the text's piece in its row."""
        text, device = sample.text.tokens, self._replay.embedding.device
        noise = torch.Generator(device).manual_seed(self._number(sample, epoch))
        known = torch.from_numpy(np.array(rows)).to(device).float()
        drafted = self._replay.chains(text, known, torch.from_numpy(starts).to(device), DEPTH, noise).cpu().numpy()
        of_target = self._recorder.record_branches(text, starts + 2, drafted[:, :-1].astype(np.int32))
        for start, chain, found in zip(starts.tolist(), drafted, of_target, strict=True):
            first = start + 1 - self._n_copied
            yield Piece(
                np.concatenate([text[first + 1 : start + 2], chain]),
                first,
                np.concatenate([rows[first : start + 2], found]),
                np.arange(self._n_copied, self._n_copied + DEPTH - 1),
                self._batches.draft_ids[chain[1:]],
                leaves,
            )

    def _starts(self, sample: Sample, epoch: int) -> NDArray[np.int64]:
        """Positions of a text after which chains begin, as many as its row has room for."""
        n, n_prompt = len(sample.text.tokens), sample.text.n_prompt
        first = max(n_prompt - 1, self._n_copied) + self._number(sample, epoch) % STRIDE
        starts = np.arange(first, min(n, self._batches.row_length) - 1, STRIDE, dtype=np.int64)
        return starts[: self._n_chains(sample)]

    def _n_chains(self, sample: Sample) -> int:
        """Most chains of a text."""
        left = self._batches.row_length - min(len(sample.text.tokens) - 1, self._batches.row_length)
        return min(left // (self._n_copied + DEPTH), -(-sample.text.n_answer // STRIDE))

    def _length(self, sample: Sample) -> int:
        """Positions that a text takes with its chains."""
        n = min(len(sample.text.tokens) - 1, self._batches.row_length)
        return n + self._n_chains(sample) * (self._n_copied + DEPTH)

    def _number(self, sample: Sample, epoch: int) -> int:
        """A number of the text and the epoch, from 0 on."""
        return int(np.random.default_rng((self._seed, epoch, sample.number, sample.first)).integers(1 << 62))
