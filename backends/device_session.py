"""Models, draft heads and sessions on a device: the common part of the OpenCL and ONNX backends.

A backend provides a `DeviceDecoder`, which runs batches of tokens with the KV cache of a text. This module makes
sessions of it: committed and pending rows, passes cut into batches, chains and trees, interruption and closing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import HeadModel, HeadSession, Model, Rows, Session
from edgeinfer.backends.checks import (
    check_cache_type,
    check_features,
    check_links,
    check_path,
    check_pending,
    check_rows,
    check_session_size,
    check_taps,
    check_tokens,
)
from edgeinfer.backends.in_turn import forward_in_turn, heads_in_turn
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType
from edgeinfer.common.types import Features, HiddenStates, Logits, LogitsRows, MemoryPlan, MemoryUse, Output, TokenIds
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import HeadSpec


@dataclass(frozen=True)
class Batch:
    """Tokens of one pass. ids: (n,) int32.

    n_past: tokens whose slots of the cache those of the chain or of the tree follow.  n_nodes: of the tree that these
    tokens are in, 0 for a chain.  first: node of the tree that the first of them is; the ones before it have been
    passed.  positions: (first + n,) int32, of all nodes up to the last of them.  sees: (n_nodes, n_nodes) uint8, row i:
    what node i sees; None for a chain, and where it is on the device.  features: (n, n_embd), that come with the tokens
    of a draft head.
    """

    ids: TokenIds
    positions: TokenIds
    sees: NDArray[np.uint8] | None
    n_past: int
    n_nodes: int = 0
    first: int = 0
    features: Features | None = None

    def __len__(self) -> int:
        return len(self.ids)


def chain_batch(ids: TokenIds, n_past: int) -> Batch:
    """Tokens that follow one another behind position n_past - 1."""
    return Batch(ids, np.arange(n_past, n_past + len(ids), dtype=np.int32), None, n_past)


def tree_batch(ids: TokenIds, links: NDArray[np.int32], n_past: int) -> Batch:
    """The last nodes of a tree. links: (n_nodes,), the parents of all its nodes."""
    n_nodes = len(links)
    sees = np.eye(n_nodes, dtype=np.uint8)
    for row, parent in enumerate(links.tolist()):
        if parent >= 0:
            sees[row] |= sees[parent]
    depths = sees.sum(axis=1, dtype=np.int32) - 1
    return Batch(ids, n_past + depths, sees, n_past, n_nodes, n_nodes - len(ids))


class DeviceDecoder(Protocol):
    """Blocks on a device with the buffers of one pass. A cache is what its `new_cache` gave."""

    spec: ModelSpec

    def new_cache(self, n_ctx: int) -> Any:
        """An empty KV cache for n_ctx positions. Raises InvalidArgument for a size that it cannot have."""
        ...

    def cache_bytes(self, cache: Any) -> int:
        """Bytes that a cache takes."""
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now, without those of caches."""
        ...

    def forward(
        self,
        cache: Any,
        batch: Batch,
        rows: NDArray[np.int32],
        out: Logits,
        taps: Sequence[int],
        tapped: HiddenStates,
    ) -> None:
        """Run a batch.

        out: (len(rows), n_logits), for the logits of these rows.  tapped: (len(taps), n, n_embd), for outputs of
        layers, n_layers for what the output matrix reads. Raises Interrupted, BackendLost.
        """
        ...

    def keep_path(self, cache: Any, rows: NDArray[np.int32], n_past: int) -> None:
        """Move the keys and values of these rows behind the committed n_past to slots n_past, n_past + 1, ..."""
        ...

    def begin(self) -> None:
        """Passes begin: what `interrupt` asked for before is over."""
        ...

    def interrupt(self) -> None:
        """Stop what runs; callable from any thread."""
        ...


_Decoder = TypeVar("_Decoder", bound=DeviceDecoder)


# ---- weights ---------------------------------------------------------------------------------------------------------


class DeviceWeights(OfOneProcess, Generic[_Decoder]):
    """A decoder that is loaded: what models and draft heads have in common."""

    def __init__(self, decoder: _Decoder, plan: MemoryPlan) -> None:
        self.n_ctx = plan.n_ctx
        self.n_batch = plan.n_batch
        self._decoder: _Decoder | None = decoder

    @property
    def decoder(self) -> _Decoder:
        """What runs the passes. Raises EdgeInferError if this is closed."""
        if self._decoder is None:
            raise EdgeInferError("this model is closed")
        return self._decoder

    def memory(self) -> MemoryUse:
        """See Model.memory."""
        return self.decoder.memory()

    def interrupt(self) -> None:
        """See Model.interrupt."""
        if self._decoder is not None:
            self._decoder.interrupt()

    def close(self) -> None:
        """See Model.close."""
        self._decoder = None


class DeviceModel(DeviceWeights[_Decoder], Model):
    """See edgeinfer.backends.base.Model."""

    @property
    @override
    def spec(self) -> ModelSpec:
        """Sizes and blocks."""
        return self.decoder.spec

    @override
    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> DeviceSession[_Decoder]:
        return DeviceSession(self, self.checked_size(n_ctx, cache_type))

    @override
    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See Model.forward. One text after the other."""
        return forward_in_turn(self, batch)

    def checked_size(self, n_ctx: int | None, cache_type: CacheType | None) -> int:
        """Positions of a session. Raises InvalidArgument for a size or a type of cache that there is not."""
        if cache_type is not None:
            check_cache_type(cache_type)
        if cache_type not in (None, "f16"):
            raise InvalidArgument(f"sessions of this backend have a KV cache of f16 only: found {cache_type}")
        return check_session_size(n_ctx, self.n_ctx)


class DeviceHeadModel(DeviceWeights[_Decoder], HeadModel):
    """See edgeinfer.backends.base.HeadModel."""

    def __init__(self, decoder: _Decoder, spec: HeadSpec, plan: MemoryPlan) -> None:
        super().__init__(decoder, plan)
        self.spec = spec

    @override
    def session(self, n_ctx: int | None = None) -> DeviceHeadSession[_Decoder]:
        return DeviceHeadSession(self, check_session_size(n_ctx, self.n_ctx))

    @override
    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See HeadModel.forward. One text after the other."""
        return heads_in_turn(self, batch)

    @override
    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine: the rows themselves."""
        self.decoder  # noqa: B018 - raises if this is closed
        return check_features(rows, len(np.asarray(rows)), self.spec.n_rows)


# ---- texts -----------------------------------------------------------------------------------------------------------


class DeviceText(OfOneProcess, Generic[_Decoder]):
    """The state of one text: what sessions of models and of draft heads have in common."""

    def __init__(self, weights: DeviceWeights[_Decoder], n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.n_batch = weights.n_batch
        self._weights = weights
        self._n_past = 0
        self._parents = np.empty(0, dtype=np.int32)  # of what is pending; its row i is in slot n_past + i
        self._cache = weights.decoder.new_cache(n_ctx)
        self._is_open = True

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        self._open()
        return self._n_past

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        decoder = self._open()
        rows = check_path(path, self._parents)
        self._parents = np.empty(0, dtype=np.int32)
        if not np.array_equal(rows, np.arange(len(rows))):
            decoder.keep_path(self._cache, rows, self._n_past)
        self._n_past += len(rows)

    def truncate(self, n_past: int) -> int:
        """See Session.truncate. Reaches every length."""
        self._open()
        if not 0 <= n_past <= self._n_past:
            raise ShapeError(f"n_past must be in 0..{self._n_past}: found {n_past}")
        self._n_past = n_past
        self._parents = np.empty(0, dtype=np.int32)
        return n_past

    def memory(self) -> MemoryUse:
        """See Session.memory."""
        decoder = self._open()
        use = decoder.memory()
        return MemoryUse(use.weights, decoder.cache_bytes(self._cache), use.activations)

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._weights.interrupt()

    def close(self) -> None:
        """See Session.close."""
        self._is_open = False
        self._cache = None

    def _forward(
        self,
        ids: TokenIds,
        parents: ArrayLike | None,
        n_pending: int,
        logits: LogitsRows,
        taps: Sequence[int],
        features: Features | None = None,
    ) -> Output:
        """Run tokens behind the first n_pending of those that are; see HeadSession.forward."""
        decoder, n = self._open(), len(ids)
        rows = check_rows(logits, n)
        links, is_chain = check_links(self._parents[:n_pending], parents, n, self.n_batch)
        decoder.begin()
        self._parents = np.empty(0, dtype=np.int32)
        out = np.empty((len(rows), decoder.spec.n_logits), dtype=np.float32)
        tapped = np.empty((len(taps), n, decoder.spec.n_embd), dtype=np.float32)
        for first in range(0, n, self.n_batch):
            last = min(first + self.n_batch, n)
            if is_chain:
                batch = chain_batch(ids[first:last], self._n_past + n_pending + first)
            else:
                batch = tree_batch(ids, links, self._n_past)
            if features is not None:
                batch = replace(batch, features=features[first:last])
            wanted = np.flatnonzero((rows >= first) & (rows < last))
            of_batch = np.empty((len(wanted), decoder.spec.n_logits), dtype=np.float32)
            states = np.empty((len(taps), len(batch), decoder.spec.n_embd), dtype=np.float32)
            decoder.forward(self._cache, batch, rows[wanted] - np.int32(first), of_batch, taps, states)
            out[wanted] = of_batch
            tapped[:, first:last] = states
        self._parents = links
        return Output(out, tapped if taps else None)

    def _open(self) -> _Decoder:
        if not self._is_open:
            raise EdgeInferError("this session is closed")
        return self._weights.decoder


class DeviceSession(DeviceText[_Decoder], Session):
    """See edgeinfer.backends.base.Session."""

    def __init__(self, model: DeviceModel[_Decoder], n_ctx: int) -> None:
        super().__init__(model, n_ctx)
        self.model = model

    @property
    @override
    def spec(self) -> ModelSpec:
        return self.model.spec

    @override
    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """See Session.forward. A tree must fit into one batch of n_batch tokens; a chain may have any length.

        Raises BackendLost if the device fails.
        """
        self._open()
        ids = check_tokens(tokens, self.spec.n_vocab, self._n_past, self.n_ctx)
        return self._forward(ids, parents, 0, logits, check_taps(hidden, self.spec.n_layers))

    @override
    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """See Session.reuse_prefix. Finds nothing: the logits behind a text would depend on how it came there."""
        return self.truncate(0)


class DeviceHeadSession(DeviceText[_Decoder], HeadSession):
    """See edgeinfer.backends.base.HeadSession."""

    def __init__(self, model: DeviceHeadModel[_Decoder], n_ctx: int) -> None:
        super().__init__(model, n_ctx)
        self.model = model

    @property
    @override
    def spec(self) -> HeadSpec:
        return self.model.spec

    @override
    def forward(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
    ) -> Output:
        """See HeadSession.forward. All rows of a tree must fit into n_batch.

        Raises BackendLost if the device fails.
        """
        self._open()
        n_pending = check_pending(n_pending, len(self._parents))
        ids = check_tokens(tokens, self.spec.decoder.n_vocab, self._n_past + n_pending, self.n_ctx)
        rows = check_features(features, len(ids), self.spec.n_embd)
        return self._forward(ids, parents, n_pending, logits, (self.spec.feature_tap,), rows)

    @override
    def combine(self, rows: ArrayLike) -> Features:
        self._open()
        return self.model.combine(rows)
