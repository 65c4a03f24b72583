"""What every backend offers: a `Backend` loads a model file, the `Session` it gives runs forward passes.

Positions are logical: token i of a chain sits at position n_past + i, a node of a draft tree at n_past + its depth.
`forward` never changes what is committed; `commit` does, along one path through the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.errors import ContextOverflow, InvalidArgument, ShapeError
from edgeinfer.models import ModelSizes, ModelSpec, query_factors
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import CacheType, Device, Features, LogitsRows, MemoryPlan, MemoryUse, Nodes, Output, TokenIds

Progress: TypeAlias = Callable[[float], None]  # called with the share done, 0..1


class Session(Protocol):
    """A loaded model with its KV cache on one device. Not thread-safe: one call at a time.

    n_batch: as planned; most tokens of a tree that is passed to `forward`.
    """

    n_ctx: int
    n_batch: int

    @property
    def spec(self) -> ModelSizes:
        """Sizes of the model; all there is to know of it where the backend follows a ModelSpec."""
        ...

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        ...

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """Run tokens through the model behind the committed ones, without committing them.

        tokens: (n,) int32.  parents: (n,) int32, the index in this batch of the token that each follows, -1 for the
        last committed one, always smaller than the own index; None is a chain.  logits: "last", "all", or row indices.
        hidden: layers whose output is wanted (negative counts from the end); True is what the output matrix reads, the
        last layer's output behind the final norm.
        Raises ShapeError, ContextOverflow, and Interrupted if `interrupt` was called meanwhile.
        """
        ...

    def commit(self, path: ArrayLike) -> None:
        """Keep these rows of the last forward, in order, each the child of the one before; drop the rest.

        path: (m,) int, may be empty. Raises ShapeError if the rows are no path from the committed text.
        """
        ...

    def truncate(self, n_past: int) -> None:
        """Forget all but the first n_past committed tokens, and what the last forward left uncommitted."""
        ...

    def recall(self, tokens: ArrayLike) -> int:
        """Make a beginning of these tokens the committed text, as long as the KV cache has it; gives its length.

        tokens: (n,) int, may be empty. What is committed now, or was before another call of this, may be found again.
        A backend whose logits depend on how a text was cut into passes finds nothing, 0, and starts from an empty
        cache: so each request gives the same text whatever was asked before.
        """
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now."""
        ...

    def interrupt(self) -> None:
        """Stop the running forward pass within 100 ms; callable from any thread; without one it does nothing."""
        ...

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        ...


@runtime_checkable
class DraftingSession(Session, Protocol):
    """A session whose device makes drafts by itself, without a round trip for each token."""

    def draft(self, tokens: ArrayLike, n_levels: int, width: int = 1, n_vocab: int | None = None) -> Nodes:
        """A tree of what is likely behind tokens, `width` nodes in each level.

        Of the successors of a level's nodes those that are reached most often make the next one (EAGLE-2, Li et al.,
        arXiv:2406.16858); p is the model's own, at temperature 1. It is a forward pass of tokens and then of all nodes
        but those of the last level, which `commit` can keep.  tokens: (n,) int32.  n_vocab: tokens of nodes are below
        it, as if there were no others; None for all. Raises InvalidArgument, and what `forward` raises.
        """
        ...


class BranchingSession(Session, Protocol):
    """A session in which a tree grows from pass to pass: what is pending stays, where `forward` is told so."""

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """As Session.forward, behind the first n_pending of the rows that the forwards since the last commit made.

        Parents and the path of `commit` are counted from the first pending row; all rows of a tree must fit into
        n_batch.
        """
        ...


class HeadSession(Protocol):
    """A draft head with its KV cache (edgeinfer.models.draft_head). Not thread-safe.

    Position i of its text stands for the target's feature of position i and the token of position i + 1.
    """

    n_ctx: int
    n_batch: int

    @property
    def spec(self) -> ModelSpec:
        """Sizes and recipe; n_draft logits a row."""
        ...

    @property
    def n_past(self) -> int:
        """Number of committed rows."""
        ...

    def forward(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
    ) -> Output:
        """Run rows through the head behind the committed ones, without committing them.

        tokens: (n,) int32.  features: (n, n_embd) float32.  n_pending: rows of the forwards since the last commit that
        stay; these come behind them.  parents: (n,) int32, the row that each follows, counted from the first pending
        one, -1 for the last committed one; None is a chain.  logits: which of the n rows, as in Session.forward.
        Gives (m, n_draft) logits, and as hidden (1, n, n_embd) the features that it predicts.
        Raises ShapeError, ContextOverflow, and Interrupted if `interrupt` was called meanwhile.
        """
        ...

    def combine(self, rows: ArrayLike) -> Features:
        """Features (n, n_embd) of the target's hidden rows (n, n_rows) float32, those of all layers that the head wants
        side by side. They are the rows themselves, but for a head with a matrix that makes one of several.

        Raises ShapeError.
        """
        ...

    def commit(self, path: ArrayLike) -> None:
        """As Session.commit; rows are counted from the first that is pending."""
        ...

    def truncate(self, n_past: int) -> None:
        """Forget all but the first n_past committed rows, and what is pending."""
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now, without the target's embeddings."""
        ...

    def interrupt(self) -> None:
        """As Session.interrupt."""
        ...

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        ...


@runtime_checkable
class DraftingHead(HeadSession, Protocol):
    """A head whose device makes drafts by itself, without a round trip for each level."""

    def draft(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        n_levels: int,
        width: int = 1,
        assumed: ArrayLike = (),
        n_vocab: int | None = None,
    ) -> Nodes:
        """A tree of what is likely behind tokens, of ids that the head has logits for; see DraftingSession.draft.

        What `commit` can keep are rows as of a forward of tokens and features, and of all nodes but those of the last
        level behind the features that the head predicts.  assumed: (m,) int, tokens that the tree follows although no
        feature of theirs is known: they are read behind predicted ones too, and may be kept as the nodes.
        """
        ...


class Backend(Protocol):
    """Loads model files for one kind of device."""

    name: str

    def read_spec(self, model: ModelFile) -> ModelSizes:
        """What the backend wants to know of a model; the `spec` of the other methods. Raises UnsupportedModel."""
        ...

    def plan(
        self,
        model: ModelFile,
        spec: Any,
        n_ctx: int,
        n_batch: int = 512,
        n_threads: int = 1,
        cache_type: CacheType = "f16",
    ) -> MemoryPlan:
        """Bytes that `load` would take, without loading.

        Raises UnsupportedModel, and InvalidArgument for a cache that the model or the backend cannot have.
        """
        ...

    def load(
        self, model: ModelFile, spec: Any, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> Session:
        """Make a session. Raises UnsupportedModel, BackendUnavailable."""
        ...


def check_tokens(tokens: ArrayLike, n_vocab: int, n_past: int, n_ctx: int) -> TokenIds:
    """Tokens as a contiguous (n,) int32 array, n >= 1, ids in the vocabulary, fitting behind n_past.

    Raises ShapeError or ContextOverflow.
    """
    try:
        array = np.asarray(tokens)
    except ValueError:  # lists of different lengths in a list
        array = np.asarray(None)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ShapeError(f"tokens must be a non-empty 1-D array of integers: found {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() >= n_vocab:
        bad = array[(array < 0) | (array >= n_vocab)][0]
        raise ShapeError(f"token ids must be in 0..{n_vocab - 1}: found {bad}")
    if n_past + array.size > n_ctx:
        raise ContextOverflow(n_past + array.size, n_ctx)
    return np.ascontiguousarray(array, dtype=np.int32)


def check_parents(parents: ArrayLike | None, n: int, first: int = 0) -> NDArray[np.int32]:
    """Parents of the rows first..first + n - 1 as a contiguous (n,) int32 array; None is a chain. Raises ShapeError."""
    if parents is None:
        return np.arange(first - 1, first + n - 1, dtype=np.int32)
    array = np.asarray(parents)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise ShapeError(f"parents must be integers of shape ({n},), one a token: found {array.dtype} {array.shape}")
    wrong = np.flatnonzero((array < -1) | (array >= np.arange(first, first + n)))
    if wrong.size:
        row = int(wrong[0])
        raise ShapeError(f"a parent must be -1 or an earlier row: row {first + row} has parent {array[row]}")
    return np.ascontiguousarray(array, dtype=np.int32)


def check_links(
    pending: NDArray[np.int32], parents: ArrayLike | None, n: int, n_batch: int
) -> tuple[NDArray[np.int32], bool]:
    """(parents of the pending rows and of n behind them, (n_pending + n,) int32; whether they are a chain).

    pending: (n_pending,) int32.  parents: of the n rows, see check_parents. Raises ShapeError, also for a tree that
    does not fit into one batch.
    """
    links = np.concatenate([pending, check_parents(parents, n, len(pending))])
    is_chain = np.array_equal(links, np.arange(-1, len(links) - 1))
    if not is_chain and len(links) > n_batch:
        raise ShapeError(f"a tree must fit into one batch of {n_batch} tokens: found {len(links)}")
    return links, is_chain


def check_rows(logits: LogitsRows, n: int) -> NDArray[np.int32]:
    """Row indices (m,) int32 that a `logits` argument asks for. Raises ShapeError."""
    if isinstance(logits, str):
        if logits == "last":
            return np.array([n - 1], dtype=np.int32)
        if logits == "all":
            return np.arange(n, dtype=np.int32)
        raise ShapeError(f"logits must be 'last', 'all' or row indices: found {logits!r}")
    rows = np.asarray(logits, dtype=np.int64)
    if rows.ndim != 1 or (rows.size and (rows.min() < 0 or rows.max() >= n)):
        raise ShapeError(f"logits rows must be in 0..{n - 1}: found {list(logits)}")
    return np.ascontiguousarray(rows, dtype=np.int32)


def check_taps(hidden: bool | Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Layer indices 0..n_layers-1 that a `hidden` argument asks for, n_layers for what the output matrix reads.

    Raises ShapeError.
    """
    if isinstance(hidden, bool):
        return (n_layers,) if hidden else ()
    for layer in hidden:
        if not -n_layers <= layer < n_layers:
            raise ShapeError(f"hidden layers must be in {-n_layers}..{n_layers - 1}: found {layer}")
    return tuple(layer % n_layers for layer in hidden)


def check_path(path: ArrayLike, parents: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows (m,) int32 that form a path from the committed text through the last batch. Raises ShapeError."""
    rows = np.asarray(path, dtype=np.int64)
    if rows.ndim != 1:
        raise ShapeError(f"path must be a 1-D array of rows: found shape {rows.shape}")
    before = -1
    for row in rows.tolist():
        if not 0 <= row < len(parents):
            raise ShapeError(f"path must name rows 0..{len(parents) - 1} of the last forward: found {row}")
        if parents[row] != before:
            raise ShapeError(f"row {row} follows row {parents[row]}, but the path comes from row {before}")
        before = row
    return np.ascontiguousarray(rows, dtype=np.int32)


def check_features(features: ArrayLike, n: int, n_embd: int) -> Features:
    """Features as a contiguous (n, n_embd) float32 array. Raises ShapeError."""
    array = np.asarray(features)
    if array.shape != (n, n_embd) or array.dtype != np.float32:
        raise ShapeError(f"features must be ({n}, {n_embd}) float32, one a token: found {array.shape} {array.dtype}")
    return np.ascontiguousarray(array)


def check_pending(n_pending: int, n_kept: int) -> int:
    """The number of pending rows that a forward goes on from, of n_kept. Raises ShapeError."""
    if n_pending not in range(n_kept + 1):
        raise ShapeError(f"{n_kept} rows are pending, n_pending must be in 0..{n_kept}: found {n_pending}")
    return n_pending


def check_cache(cache_type: CacheType, spec: ModelSpec) -> None:
    """Raises InvalidArgument if the model's heads do not fit a cache of that type."""
    if cache_type == "q8_0" and spec.head_dim % 32:
        raise InvalidArgument(
            f"a q8_0 KV cache needs heads of a multiple of 32 numbers: found {spec.head_dim}; use f16"
        )


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens at the start in which two texts agree."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differing[0]) if differing.size else n


@dataclass(frozen=True)
class QueryScales:
    """The factor of the queries at each position: attention_scale, times what grows with the position.

    values: (n_runs,) float32, for the positions 0..n_positions - 1, n_positions..2 n_positions - 1, and so on. Queries
    are multiplied behind the rotation.
    """

    values: NDArray[np.float32]
    n_positions: int

    @classmethod
    def of(cls, spec: ModelSpec, n_ctx: int) -> QueryScales:
        """Those of positions below n_ctx. Both factors are multiplied in double precision and rounded once."""
        if spec.query_temperature is None:
            return cls(np.array([spec.attention_scale], dtype=np.float32), n_ctx)
        factors = np.array(query_factors(spec.query_temperature, n_ctx))
        scales = (np.full(len(factors), spec.attention_scale) * factors).astype(np.float32)
        return cls(scales, min(spec.query_temperature.n_positions, n_ctx))

    def at(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """The factors of some positions, an array of their shape."""
        factors: NDArray[np.float32] = self.values[positions // self.n_positions]
        return factors
