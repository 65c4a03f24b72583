"""The target's hidden rows that a head is trained on: recorded and kept, or computed again when needed.

They are the features (rows after the final norm), or the outputs of some layers, concatenated.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Session, run_sequence
from edgeinfer.common.errors import ModelFileError, NumericalError
from edgeinfer.common.files import write_whole
from edgeinfer.common.overriding import override
from edgeinfer.common.types import TokenIds
from edgeinfer.training.corpus import Corpus, Report, TrainingText

Halves = NDArray[np.float16]  # (n, n_rows): features, or rows of several layers, concatenated
Taps = bool | tuple[int, ...]  # which of the target's rows, see Session.forward(hidden=...)


class Recorder(Protocol):
    """What computes rows with the target."""

    n_texts: int  # best number of texts to record at once

    def record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        """The rows of whole texts. Raises NumericalError if they are too large for half floats."""
        ...

    def record_branches(self, tokens: TokenIds, firsts: NDArray[np.int64], branches: NDArray[np.int32]) -> Halves:
        """Rows (n, k, n_rows) of branches (n, k) of a text, each in place of tokens[first:].

        firsts: (n,), ascending, from 1 on.
        """
        ...


class NativeRecorder(Recorder):
    """Rows as the native engine computes them: what the head will see.

    Any thread may ask for rows: an evaluation's batches are made while another thread makes the next one to train on.
    """

    n_texts = 1

    def __init__(self, session: Session, taps: Taps = True) -> None:
        self._session = session
        self._taps = taps
        self._text = threading.Lock()  # held while the session has a text

    @override
    def record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        return [self._rows(tokens) for tokens in texts]

    def _rows(self, tokens: TokenIds) -> Halves:
        with self._text:
            self._session.truncate(0)
            rows = run_sequence(self._session, tokens, logits="none", taps=self._taps).features
            self._session.truncate(0)  # nothing of a recorded text stays
        assert rows is not None
        return as_halves(rows)

    @override
    def record_branches(self, tokens: TokenIds, firsts: NDArray[np.int64], branches: NDArray[np.int32]) -> Halves:
        found = []
        with self._text:
            self._session.truncate(0)
            for first, branch in zip(firsts.tolist(), branches, strict=True):
                n_past = self._session.n_past
                if n_past < first:
                    run_sequence(self._session, tokens[n_past:first], logits="none")
                found.append(self._session.forward(branch, logits=(), hidden=self._taps).features)
        return as_halves(np.stack([rows for rows in found if rows is not None]))


def as_halves(rows: NDArray[np.float32]) -> Halves:
    """Rows as half floats. Raises NumericalError if a number is too large for them."""
    with np.errstate(over="ignore"):
        return checked_halves(rows.astype(np.float16))


def checked_halves(rows: Halves) -> Halves:
    """The same rows. Raises NumericalError if a number is too large for float16, or is NaN."""
    if not np.isfinite(rows).all():
        raise NumericalError("features must be numbers of at most 65504 to be kept as half floats: found others")
    return rows


@dataclass(frozen=True)
class Sample:
    """A text of a corpus, and where its rows are."""

    text: TrainingText
    shard: Path  # beside which the rows are
    number: int  # of the shard, among those of all corpora
    first: int  # its first row in the shard


class Features:
    """The rows of the texts of some corpora. Shards are kept as .npy files beside the texts, up to a number of bytes.

    Reading them is faster than any recorder, so only rows that do not fit are computed again.  n_rows: numbers in a
    row.  taps: what the recorder records.
    """

    def __init__(
        self, corpora: Sequence[Corpus], recorder: Recorder, n_rows: int, max_bytes: int, taps: Taps = True
    ) -> None:
        self._recorder = recorder
        self.n_rows = n_rows
        self._max_bytes = max_bytes
        self._taps = taps
        self._kept: dict[Path, Halves] = {}
        self.samples: list[Sample] = []
        shards = [(corpus, index) for corpus in corpora for index in range(corpus.n_shards)]
        for number, (corpus, index) in enumerate(shards):
            first = 0
            for text in corpus.texts(index):
                self.samples.append(Sample(text, corpus.shard(index), number, first))
                first += len(text.tokens)

    def prepare(self, report: Report, share: tuple[int, int] = (0, 1)) -> None:
        """Record the shards that are missing and fit. share: (i, n) if this is process i of n."""
        by_shard: dict[Path, list[TokenIds]] = {}
        for sample in self.samples:
            by_shard.setdefault(sample.shard, []).append(sample.text.tokens)
        n_bytes = 0
        for number, (shard, texts) in enumerate(by_shard.items()):
            n_bytes += 2 * self.n_rows * sum(map(len, texts))
            if n_bytes > self._max_bytes:
                break
            path = rows_path(shard, self._taps)
            if not path.exists() and number % share[1] == share[0]:
                save_rows(path, self._record(texts), self.n_rows)
            report("features", (number + 1) / len(by_shard))

    def of(self, samples: Sequence[Sample]) -> list[Halves]:
        """Rows of some texts, (n, n_rows) each."""
        found = {index: rows for index, rows in enumerate(map(self._kept_rows, samples)) if rows is not None}
        missing = [index for index in range(len(samples)) if index not in found]
        recorded = self._record([samples[index].text.tokens for index in missing])
        found |= dict(zip(missing, recorded, strict=True))
        return [found[index] for index in range(len(samples))]

    def _kept_rows(self, sample: Sample) -> Halves | None:
        if sample.shard not in self._kept:
            path = rows_path(sample.shard, self._taps)
            if not path.exists():
                return None
            self._kept[sample.shard] = self._load(path, sample.shard)
        return self._kept[sample.shard][sample.first : sample.first + len(sample.text.tokens)]

    def _record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        at_once, rows = self._recorder.n_texts, dict[int, Halves]()
        by_length = sorted(
            range(len(texts)), key=lambda index: len(texts[index])
        )  # so that those side by side are about as long
        for first in range(0, len(texts), at_once):
            part = by_length[first : first + at_once]
            rows |= zip(part, self._recorder.record([texts[index] for index in part]), strict=True)
        return [rows[index] for index in range(len(texts))]

    def _load(self, path: Path, shard: Path) -> Halves:
        expected = sum(len(sample.text.tokens) for sample in self.samples if sample.shard == shard), self.n_rows
        try:
            rows: Halves = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ModelFileError(f"{path} holds no features: {error}; remove it, and it is made anew") from error
        if rows.shape != expected or rows.dtype != np.float16:
            raise ModelFileError(f"{path} must be {expected} float16: found {rows.dtype} {rows.shape}; remove it")
        return rows


def rows_path(shard: Path, taps: Taps) -> Path:
    """Where the rows of the texts of a shard are, or will be."""
    kind = "features" if isinstance(taps, bool) else "-".join(["layers", *map(str, taps)])
    return shard.with_suffix(f".{kind}.npy")


def save_rows(path: Path, rows: Sequence[Halves], n_rows: int) -> None:
    """Write the rows of texts, (n, n_rows) each, one after the other."""
    buffer = io.BytesIO()
    np.save(buffer, np.concatenate([np.empty((0, n_rows), np.float16), *rows]))
    write_whole(path, buffer.getvalue())
