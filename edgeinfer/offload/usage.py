"""How often each expert of a model was used, kept on disk: at the next load the most used ones are read first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.routing import NONE
from edgeinfer.record_cache import read_record, record_folder, record_key, write_record

HALF_LIFE = 4096  # tokens after which a use counts half
_AT_ONCE = 64  # tokens that are counted together
_MOST = 1_000_000  # a count on disk
_FORMAT = 1


class ExpertUsage:
    """Decayed counts of uses, (n_layers, n_experts)."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self._counts: NDArray[np.float64] = np.zeros((n_layers, n_experts))
        self._waiting: list[NDArray[np.int32]] = []
        self._n_waiting = 0

    @property
    def counts(self) -> NDArray[np.float64]:
        """(n_layers, n_experts), of all tokens so far."""
        self._count()
        return self._counts

    def add(self, chosen: NDArray[np.int32]) -> None:
        """Tokens used these experts: (n_tokens, n_layers, n_used), as in Routing. The array must not change later."""
        self._waiting.append(chosen)
        self._n_waiting += len(chosen)
        if self._n_waiting >= _AT_ONCE:
            self._count()

    def most_used(self, record_bytes: Sequence[int], cache_bytes: int) -> list[tuple[int, int]]:
        """(layer, expert) of the most used experts that fit into a cache together, the most used first.

        record_bytes: of an expert of each layer. Experts that were never used are left out.
        """
        counts, room = self.counts, cache_bytes
        found = []
        for place in np.argsort(-counts, axis=None, kind="stable")[: np.count_nonzero(counts)].tolist():
            layer, expert = divmod(place, counts.shape[1])
            room -= record_bytes[layer]
            if room < 0:
                break
            found.append((layer, expert))
        return found

    def as_record(self) -> dict[str, object]:
        """All of it, for JSON: counts in hundredths."""
        counts = np.minimum(np.rint(100 * self.counts), _MOST).astype(int)
        return {"format": _FORMAT, "counts": counts.tolist()}

    def take_over(self, record: object) -> None:
        """Begin with what `as_record` gave; what is no such record, or of another model, is ignored."""
        if not isinstance(record, Mapping) or record.get("format") != _FORMAT:
            return
        try:
            counts = np.array(record["counts"], np.float64)
        except (KeyError, ValueError, TypeError, OverflowError):
            return
        if counts.shape == self._counts.shape and bool(np.all((counts >= 0) & (counts <= _MOST))):
            self._counts = counts / 100

    def _count(self) -> None:
        if not self._n_waiting:
            return
        self._counts *= math.pow(0.5, self._n_waiting / HALF_LIFE)
        n_layers, n_experts = self._counts.shape
        chosen = np.concatenate(self._waiting)
        places = chosen + n_experts * np.arange(n_layers, dtype=np.int32)[:, None]
        self._counts += np.bincount(places[chosen != NONE], minlength=self._counts.size).reshape(self._counts.shape)
        self._waiting, self._n_waiting = [], 0


def usage_key(file: ModelFile) -> str:
    """Name of a model's counts."""
    return record_key(file, "expert usage", _FORMAT)


def load_usage(key: str, n_layers: int, n_experts: int) -> ExpertUsage:
    """The counts of that key; none where nothing sound is kept."""
    usage = ExpertUsage(n_layers, n_experts)
    usage.take_over(read_record(record_folder("expert-usage"), key))
    return usage


def save_usage(key: str, usage: ExpertUsage) -> None:
    """Keep the counts, written atomically. Where nothing can be written, the next load begins cold."""
    write_record(record_folder("expert-usage"), key, usage.as_record())
