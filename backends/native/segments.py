"""The committed segments of a sequence as bytes; see edgeinfer.backends.base.Segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.backends.base import Buffer, SegmentFile, Segments
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.config import SEGMENT
from edgeinfer.backends.native.machine import build_id
from edgeinfer.common.errors import CacheFull
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType
from edgeinfer.models import Attention, LatentAttention, ModelSpec

if TYPE_CHECKING:
    from edgeinfer.backends.native.session import NativeSequence

_FORMAT = 1  # of what the bytes are, where no other fact tells


def segments_of(
    session: NativeSequence, state: _core.SequenceState, spec: ModelSpec, cache_type: CacheType
) -> NativeSegments | None:
    """The segments of a session; None where a layer keeps something else."""
    layers: dict[int, list[int]] = {}
    turned = []
    for number, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if not isinstance(mixer, (Attention, LatentAttention)):
            return None
        if isinstance(mixer, Attention) and mixer.kv_of is not None:
            continue
        window = mixer.window if isinstance(mixer, Attention) else None
        layers.setdefault(window or 0, []).append(number)
        rope = mixer.rope
        turned.append(rope is not None and rope.long is not None and session.n_ctx > rope.long.n_ctx)
    facts = repr((_FORMAT, build_id(), cache_type, turned))
    return NativeSegments(session, state, layers, facts)


class NativeSegments(Segments):
    """See Segments. It keeps the state of the session alive, though not its memory once that is closed."""

    def __init__(
        self, session: NativeSequence, state: _core.SequenceState, layers: Mapping[int, Sequence[int]], facts: str
    ) -> None:
        """layers: by kind."""
        self.n_tokens = SEGMENT
        self.facts = facts
        self._session, self._state, self._layers = session, state, layers
        self.n_bytes = {kind: sum(map(state.segment_bytes, of)) for kind, of in layers.items()}

    @property
    @override
    def n_past(self) -> int:
        return self._state.n_past

    @override
    def committed(self, first: int, last: int) -> list[int]:
        held = self._session.held
        return [] if held is None else held[1][first:last]

    @override
    def stamp(self, number: int) -> int:
        return self._state.stamp(number)

    @override
    def pieces(self, kind: int, number: int, n_tokens: int, stamp: int) -> Iterator[memoryview]:
        """See Segments.pieces. A piece is a layer, so that the lock of the pool is held for little."""
        piece = np.empty(0, np.uint8)
        for layer in self._layers[kind]:
            if len(piece) != (n_bytes := self._state.segment_bytes(layer)):
                piece = np.empty(n_bytes, np.uint8)
            if not self._state.copy_segment(layer, number, n_tokens, stamp, piece):
                raise LookupError(f"segment {number} is gone")
            yield piece.data

    @override
    def held_from(self, kind: int) -> int:
        return max(map(self._state.first_held, self._layers[kind]))

    @override
    def kept_from(self, kind: int, n_past: int) -> int:
        return min(self._state.first_kept(layer, n_past) for layer in self._layers[kind])

    @override
    def reach(self) -> int:
        return self._state.reach(self._state.n_past)

    @override
    def byte_sum(self, data: Buffer, before: int) -> int:
        return _core.byte_sum(np.frombuffer(data, np.uint8), before)

    @override
    def read(self, tokens: Sequence[int], files: Sequence[SegmentFile]) -> bool:
        parts = [
            (list(self._layers[of.kind]), of.descriptor, of.path, of.first_byte, of.before, of.sum) for of in files
        ]
        was_read = self._session.add_committed(tokens, lambda: self._state.read_segment(parts, len(tokens)))
        if was_read is None:
            raise CacheFull(self._session.n_ctx)
        return was_read
