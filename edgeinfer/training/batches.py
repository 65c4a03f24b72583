"""Batches for training: texts packed into rows of one length, with what each position is to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.training.features import Features, Halves, Sample

Plan = list[list[int]]  # for each row of a batch, the texts that stand in it
_TENSORS = ("tokens", "positions", "documents", "features", "places", "labels")  # of a batch


@dataclass(frozen=True)
class Piece:
    """A text in a row of a batch, or a branch that leaves a text and sees what is before its own first position."""

    tokens: NDArray[np.int32]  # (l,), the token after each position
    first: int  # position of the first one
    features: NDArray[np.float16]  # (l, n_rows)
    judged: NDArray[np.int64]  # (k,), those of the l positions that have a loss; never the last
    labels: NDArray[np.int64]  # (k,), see Batch
    leaves: int | None = None  # of a branch: index in the row's list of the text that it leaves


@dataclass(frozen=True)
class Branches:
    """The branch, if any, that each position of a batch is in."""

    left: torch.Tensor  # (n, m) int64, index in the row of the document that the branch leaves, -1 outside of branches
    begins: torch.Tensor  # (n, m) int64, first position of the branch

    def to(self, device: torch.device) -> Branches:
        """The same on a device."""
        return Branches(self.left.to(device), self.begins.to(device))


@dataclass(frozen=True)
class Batch:
    """n rows of m positions, packed with texts.

    Of a text with tokens t and features f, position i has t[i + 1] and f[i], and predicts t[i + 2] and f[i + 1].
    """

    tokens: torch.Tensor  # (n, m) int64
    positions: torch.Tensor  # (n, m) int64
    documents: torch.Tensor  # (n, m) int64, tells the texts of a row apart; 0 is padding
    features: torch.Tensor  # (n, m, n_rows), see Features
    places: torch.Tensor  # (k,) int64, positions that are judged, as indices into n * m
    labels: torch.Tensor  # (k,) int64, index in the draft vocabulary of the token to predict, -1 if it has none
    branches: Branches | None = None

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        branches = None if self.branches is None else self.branches.to(device)
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return Batch(**moved, branches=branches)

    def pinned(self) -> Batch:
        """The same in pinned memory, which a GPU reads asynchronously; without branches."""
        return Batch(**{name: getattr(self, name).pin_memory() for name in _TENSORS})

    @property
    def n_tokens(self) -> int:
        """Positions that are judged."""
        return len(self.places)


def pack(lengths: Sequence[int], n_rows: int, row_length: int, order: Sequence[int]) -> list[Plan]:
    """Batches of texts in this order: each goes into the first row of the batch that has room, or into a new batch.

    lengths: of the texts; longer ones count as row_length.
    """
    plans: list[Plan] = []
    room: list[int] = []
    for index in order:
        length = min(lengths[index], row_length)
        row = next((row for row, left in enumerate(room) if left >= length), None)
        if row is None and len(room) < n_rows and plans:
            row = len(room)
            plans[-1].append([])
            room.append(row_length)
        if row is None:
            plans.append([[]])
            room, row = [row_length], 0
        plans[-1][row].append(index)
        room[row] -= length
    return plans


class Batches:
    """All batches of a corpus.  draft_ids: (n_vocab,) index of each token in the draft vocabulary, or -1.

    A position has a loss if the token to predict belongs to the answer and at least `n_before` positions of the text
    are before it.
    """

    def __init__(
        self, features: Features, draft_ids: NDArray[np.int64], n_rows: int, row_length: int, n_before: int
    ) -> None:
        self.features = features
        self.draft_ids = draft_ids
        self._n_rows = n_rows
        self.row_length = row_length
        self._n_before = n_before
        self._samples = [sample for sample in features.samples if self._n_judged(sample) > 0]

    def __len__(self) -> int:
        return len(self._samples)

    def plans(self, seed: int, epoch: int, length: Callable[[Sample], int] | None = None) -> list[Plan]:
        """The batches of an epoch, which follow from its number and the seed. length: what a text takes in a row."""
        order = np.random.default_rng((seed, epoch)).permutation(len(self._samples)).tolist()
        lengths = [len(sample.text.tokens) - 1 if length is None else length(sample) for sample in self._samples]
        return pack(lengths, self._n_rows, self.row_length, order)

    def stream(self, plans: Sequence[Plan], device: torch.device) -> Iterator[Batch]:
        """The batches on a device, each made while the one before is worked on."""

        def make(plan: Plan) -> Batch:
            batch = self.build(plan)
            return batch.pinned() if device.type == "cuda" else batch

        with ThreadPoolExecutor(1) as maker:
            coming = maker.submit(make, plans[0]) if plans else None
            for index in range(len(plans)):
                assert coming is not None
                batch = coming.result()
                coming = maker.submit(make, plans[index + 1]) if index + 1 < len(plans) else None
                yield batch.to(device)

    def build(self, plan: Plan) -> Batch:
        """A batch in the computer's memory."""
        rows = self.rows(plan)
        return self.batch([[self.piece(sample, known) for sample, known in row] for row in rows])

    def rows(self, plan: Plan) -> list[list[tuple[Sample, Halves]]]:
        """The texts of each row of a batch, and what was recorded of them."""
        known = iter(self.features.of([self._samples[index] for indices in plan for index in indices]))
        return [[(self._samples[index], next(known)) for index in indices] for indices in plan]

    def piece(self, sample: Sample, features: Halves) -> Piece:
        """A text as it stands in a row."""
        text, length = sample.text.tokens, min(len(sample.text.tokens) - 1, self.row_length)
        judged = self._judged(sample)
        labels = self.draft_ids[text[judged + 2]]
        return Piece(text[1 : length + 1], 0, features[:length], judged, labels)

    def batch(self, rows: Sequence[Sequence[Piece]]) -> Batch:
        """A batch of these rows, which must have room for them."""
        n, m = len(rows), self.row_length
        tokens, positions, documents, begins = (np.zeros((n, m), dtype=np.int64) for _ in range(4))
        left = np.full((n, m), -1, dtype=np.int64)
        features = torch.zeros((n, m, self.features.n_rows), dtype=torch.float16)
        places: list[NDArray[np.int64]] = []
        labels: list[NDArray[np.int64]] = []
        for row, pieces in enumerate(rows):
            start = 0
            for number, piece in enumerate(pieces, start=1):
                at = slice(start, start + len(piece.tokens))
                tokens[row, at], documents[row, at] = piece.tokens, number
                positions[row, at] = range(piece.first, piece.first + len(piece.tokens))
                features[row, at] = torch.from_numpy(np.array(piece.features))
                if piece.leaves is not None:
                    left[row, at], begins[row, at] = piece.leaves + 1, piece.first
                places.append(row * m + start + piece.judged)
                labels.append(piece.labels)
                start = at.stop
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            torch.from_numpy(documents),
            features,
            torch.from_numpy(np.concatenate(places)),
            torch.from_numpy(np.concatenate(labels)),
            Branches(torch.from_numpy(left), torch.from_numpy(begins)) if (left >= 0).any() else None,
        )

    def _judged(self, sample: Sample) -> NDArray[np.int64]:
        """Positions of a text that are judged. The row has the position after them too: its feature is the target."""
        last = min(len(sample.text.tokens) - 1, self.row_length) - 1
        return np.arange(max(sample.text.n_prompt - 2, self._n_before), last, dtype=np.int64)

    def _n_judged(self, sample: Sample) -> int:
        return len(self._judged(sample))
