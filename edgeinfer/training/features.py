"""The target's features, its rows behind the last norm: recorded once and kept, or computed again when wanted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Session
from edgeinfer.errors import ModelFileError, NumericalError
from edgeinfer.training.corpus import Corpus, Report, Text, write_whole
from edgeinfer.types import TokenIds

Halves = NDArray[np.float16]  # (n, n_embd)


class Recorder(Protocol):
    """What computes features with the target."""

    n_texts: int  # that it is best given at once

    def record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        """The features of whole texts. Raises NumericalError if they are too large for half floats."""
        ...


class NativeRecorder:
    """Features as the native engine computes them: what the head will see."""

    n_texts = 1

    def __init__(self, session: Session) -> None:
        self._session = session

    def record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        """See Recorder.record."""
        return [self._features(tokens) for tokens in texts]

    def _features(self, tokens: TokenIds) -> Halves:
        self._session.truncate(0)
        rows = self._session.forward(tokens, logits=(), hidden=True).hidden
        assert rows is not None
        return as_halves(rows[0])


def as_halves(features: NDArray[np.float32]) -> Halves:
    """Features as half floats. Raises NumericalError for those that have none."""
    with np.errstate(over="ignore"):
        return checked_halves(features.astype(np.float16))


def checked_halves(features: Halves) -> Halves:
    """The features. Raises NumericalError if one was too large for a half float, or is no number."""
    if not np.isfinite(features).all():
        raise NumericalError("features must be numbers of at most 65504 to be kept as half floats: found others")
    return features


@dataclass(frozen=True)
class Sample:
    """A text of a corpus and where its features are: in this shard, from this row on."""

    text: Text
    shard: int
    first: int


class Features:
    """The features of the texts of a corpus. Shards are kept as .npy files beside the texts up to a number of bytes.

    Reading them back takes less time than any recorder, so what fits is kept, and only the rest is computed again.
    """

    def __init__(self, corpus: Corpus, recorder: Recorder, n_embd: int, max_bytes: int) -> None:
        self._corpus = corpus
        self._recorder = recorder
        self.n_embd = n_embd
        self._max_bytes = max_bytes
        self._kept: dict[int, Halves] = {}
        self.samples: list[Sample] = []
        for shard in range(corpus.n_shards):
            first = 0
            for text in corpus.texts(shard):
                self.samples.append(Sample(text, shard, first))
                first += len(text.tokens)

    def prepare(self, report: Report, share: tuple[int, int] = (0, 1)) -> None:
        """Record the shards that are missing and fit. share: (i, n) for one of n processes, each a part of them."""
        by_shard: dict[int, list[TokenIds]] = {}
        for sample in self.samples:
            by_shard.setdefault(sample.shard, []).append(sample.text.tokens)
        n_bytes = 0
        for shard, texts in by_shard.items():
            n_bytes += 2 * self.n_embd * sum(map(len, texts))
            if n_bytes > self._max_bytes:
                break
            if not self._path(shard).exists() and shard % share[1] == share[0]:
                self._save(shard, texts)
            report(f"{self._corpus.part}: features", (shard + 1) / len(by_shard))

    def of(self, samples: Sequence[Sample]) -> list[Halves]:
        """Features of some texts, (n, n_embd) each."""
        found = {index: rows for index, rows in enumerate(map(self._kept_rows, samples)) if rows is not None}
        missing = [index for index in range(len(samples)) if index not in found]
        recorded = self._record([samples[index].text.tokens for index in missing])
        found |= dict(zip(missing, recorded, strict=True))
        return [found[index] for index in range(len(samples))]

    def _kept_rows(self, sample: Sample) -> Halves | None:
        if sample.shard not in self._kept:
            if not self._path(sample.shard).exists():
                return None
            self._kept[sample.shard] = self._load(sample.shard)
        return self._kept[sample.shard][sample.first : sample.first + len(sample.text.tokens)]

    def _record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        at_once, rows = self._recorder.n_texts, []
        for first in range(0, len(texts), at_once):
            rows += self._recorder.record(texts[first : first + at_once])
        return rows

    def _path(self, shard: int) -> Path:
        return self._corpus.shard(shard).with_suffix(".features.npy")

    def _save(self, shard: int, texts: Sequence[TokenIds]) -> None:
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate([np.empty((0, self.n_embd), np.float16), *self._record(texts)]))
        write_whole(self._path(shard), buffer.getvalue())

    def _load(self, shard: int) -> Halves:
        path = self._path(shard)
        wanted = sum(len(sample.text.tokens) for sample in self.samples if sample.shard == shard), self.n_embd
        try:
            rows: Halves = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ModelFileError(f"{path} holds no features: {error}; remove it, and it is made anew") from error
        if rows.shape != wanted or rows.dtype != np.float16:
            raise ModelFileError(f"{path} must be {wanted} float16: found {rows.dtype} {rows.shape}; remove it")
        return rows
