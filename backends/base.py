"""The protocols of backends: a `Backend` loads a file as a `Model`, whose `Session`s hold the state of one sequence
each.

Positions are logical: token i of a chain is at position n_past + i, a node of a draft tree at n_past + its depth.
`forward` does not change what is committed; `commit` does, along one path through the rows of the last forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device, ExpertSizes, Features, LogitsRows, MemoryPlan, MemoryUse, Nodes, Output
from edgeinfer.models import ModelSizes
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.gguf import ModelFile

Buffer: TypeAlias = bytes | memoryview
Progress: TypeAlias = Callable[[float], None]  # called with the share done, 0..1
PassHook: TypeAlias = Callable[[Sequence[int], Callable[[], bool | None]], bool | None]
"""Runs a pass: is given its tokens, and what runs it, whose result it gives back: True for a pass that was whole."""
Taps: TypeAlias = bool | Sequence[int]  # layers whose output is requested, see Session.forward


def chained(outer: PassHook | None, inner: PassHook) -> PassHook:
    """Both: the outer one, if there is one, watches what the inner one runs."""
    return inner if outer is None else lambda tokens, forward: outer(tokens, lambda: inner(tokens, forward))


# ---- models and the state of sequences -------------------------------------------------------------------------------


class Session(Protocol):
    """The state of one sequence: its KV cache, and rows of the last forward. Not thread-safe: one call at a time."""

    n_ctx: int  # positions that the sequence may have
    # most tokens of a tree, which may have no more than 32 either where the model has recurrent layers, and most
    # uncommitted tokens where it has windows; `run_sequence` runs longer sequences
    n_batch: int
    model: Model  # whose sequence this is

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
        """Run tokens through the model after the committed ones, without committing them.

        tokens: (n,) int32.  parents: (n,) int32, the index in this batch of the token that each follows, -1 for the
        last committed one, always smaller than the own index; None is a chain.  logits: "last", "all", or row indices.
        hidden: layers whose output is requested (negative counts from the end); True: what the output matrix reads, the
        last layer's output after the final norm.
        Raises ShapeError, ContextOverflow, and Interrupted if `interrupt` was called meanwhile.
        """
        ...

    def commit(self, path: ArrayLike) -> None:
        """Keep these rows of the last forward, in order, each the child of the one before; drop the rest.

        path: (m,) int, may be empty. Raises ShapeError if the rows are no path from the committed sequence.
        """
        ...

    def truncate(self, n_past: int) -> int:
        """Drop committed tokens from position n_past on, and everything uncommitted; returns the length that is left.

        It may be less than n_past if a layer no longer holds what it needs there, such as an older window; run the rest
        again. Always reachable are 0, and, but for recurrent layers, every n_past that is at most 128 below the largest
        length since the sequence was last empty; earlier prompts count too if `reuse_prefix` kept a part of them. That
        is enough for draft trees and ends of answers.

        A recurrence has its state at few lengths: now, after each of the tokens of the last commit, if these were 32 at
        most, and at some checkpoints. The native engine keeps one where `reuse_prefix` found the text, and one 32
        tokens before the end of each longer forward, and drops some again, the older ones sooner. The reference reaches
        every length. Raises ShapeError if n_past is not in 0..self.n_past.
        """
        ...

    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """Make the longest prefix of these tokens that is still held the committed sequence; returns its length.

        tokens: (n,) int, may be empty. What is committed now, or was before an earlier call, may be found again. A
        backend whose logits depend on how a sequence was cut into passes reuses nothing and returns 0, so that a
        request gives the same tokens whatever was asked before.
        """
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now by the model and this session."""
        ...

    def interrupt(self) -> None:
        """Stop the running forward pass within 100 ms; callable from any thread; does nothing without one."""
        ...

    def close(self) -> None:
        """Free the memory of this sequence. Further calls raise. The model stays."""
        ...


@dataclass(frozen=True)
class Rows:
    """The part of one sequence in a forward pass; see Session.forward for the fields."""

    session: Any  # of the model that runs the pass
    tokens: ArrayLike
    parents: ArrayLike | None = None
    logits: LogitsRows = "last"
    hidden: bool | Sequence[int] = False
    n_pending: int = 0  # number of rows since the last commit that are kept, see BranchingSession
    features: ArrayLike | None = None  # (n, n_embd) float32, for draft heads only


class Model(Protocol):
    """Weights and threads, shared by the sessions of several sequences. Not thread-safe: one pass at a time."""

    n_ctx: int  # most positions of a session
    n_batch: int  # most tokens in one pass

    @property
    def spec(self) -> ModelSizes:
        """Sizes of the model."""
        ...

    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> Session:
        """The state of a new sequence. None: as planned. Raises InvalidArgument."""
        ...

    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """Run rows of several sequences, each session once, in one pass if the backend can; one Output per sequence.

        The logits of a row are the same bits, whichever rows of other sequences are in the pass. Raises as
        Session.forward; if the pass had begun, no session has pending rows.
        """
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now, without those of sessions."""
        ...

    def interrupt(self) -> None:
        """As Session.interrupt, for a pass of any of the sessions."""
        ...

    def close(self) -> None:
        """Free the memory. Further calls raise, also those of sessions."""
        ...


class Backend(Protocol):
    """Loads model files for one kind of device."""

    name: str

    def read_spec(self, model: ModelFile) -> ModelSizes:
        """What the backend needs to know of a model; the `spec` of the other methods. Raises UnsupportedModel."""
        ...

    def plan(self, model: ModelFile, spec: Any, settings: LoadSettings) -> MemoryPlan:
        """Bytes that `load` and one session would take, without loading. A batch is no larger than the context.

        Raises UnsupportedModel, and InvalidArgument for a cache that the model or the backend cannot have.
        """
        ...

    def load(
        self, model: ModelFile, spec: Any, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> Model:
        """Load the weights. Raises UnsupportedModel, BackendUnavailable."""
        ...


@runtime_checkable
class ExpertBackend(Backend, Protocol):
    """A backend that can read experts from disk when they are needed, and keep some of them in memory.

    Its `plan` looks at `expert_cache`; it raises InvalidArgument for fewer bytes than a pass needs.
    """

    def expert_sizes(self, model: ModelFile, spec: Any) -> ExpertSizes:
        """What the experts of a model take."""
        ...


@runtime_checkable
class HasProcesses(Protocol):
    """A backend or a model that works in processes of its own. process_ids: of those that run now."""

    @property
    def process_ids(self) -> Sequence[int]:
        """The ids by which the system knows them."""
        ...


@runtime_checkable
class MeasurableBackend(Backend, Protocol):
    """A backend whose code can be brought into memory before a model is, so that it can be measured."""

    source_bytes: int  # the most of a model file that is in memory beside what it is packed to

    def warm_up(self, model: ModelFile, device: Device) -> None:
        """Run the code that this model needs once, on next to no data, so that its pages are counted."""
        ...


class ExpertDevice(Protocol):
    """What computes some experts beside the CPU, such as a GPU that holds them; asked in each layer of a pass.

    Any thread calls, one at a time. What these raise ends the pass with it; a device that fails is no reason to raise.
    """

    def choose(self, layer: int, experts: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
        """Which of these experts are computed here; the CPU computes the others. rows: how many need each."""
        ...

    def start(self, layer: int, experts: Sequence[int], rows: Sequence[int], inputs: NDArray[np.float32]) -> None:
        """Begin with the experts that were chosen. inputs: (n, n_in), `rows` of the first, then of the next one."""
        ...

    def finish(self) -> NDArray[np.float32] | None:
        """Their outputs without weights, (n, n_in); None where the device failed and the CPU has to compute them."""
        ...


@runtime_checkable
class ExpertDeviceModel(Protocol):
    """A loaded model some of whose experts another device may compute."""

    pass_hook: PassHook | None

    def set_expert_device(self, device: ExpertDevice | None) -> None:
        """From the next pass on, let this compute some experts; None for the CPU alone."""
        ...


# ---- sessions that share memory ----------------------------------------------------------------------------------


@runtime_checkable
class PooledSession(Session, Protocol):
    """A session whose state is in the memory that all sessions of its model share.

    Its `forward`, and that of the model, raise CacheFull where memory is missing. Nothing has changed then, and what
    was pending is pending still. `reuse_prefix` finds what other sessions have committed too.
    """

    def park(self) -> None:
        """Keep the committed sequence for later requests, as long as its memory is not needed, and become empty."""
        ...

    def has_room(self, n_slots: int) -> bool:
        """Whether so many slots after n_past can be had now, forgetting parked sequences where that is needed.

        Slots of pending rows count among them. Changes nothing.
        """
        ...


@runtime_checkable
class PooledModel(Model, Protocol):
    """A model whose sessions share memory, unless they are asked for with sizes of their own."""

    n_sequences: int  # that the memory is planned for

    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> PooledSession:
        """See Model.session. With a size or a type given, even those as planned, it has memory of its own."""
        ...

    def has_room(self, wants: Sequence[tuple[Any, int]]) -> bool:
        """Whether several sessions can have so many slots each after their n_past at once; see PooledSession.has_room.

        What this says of at most n_batch slots each is what a joint pass of so many rows then does.
        """
        ...

    def forget_parked(self) -> None:
        """Forget all parked sequences."""
        ...


# ---- sequences that are kept as bytes ----------------------------------------------------------------------------


class SegmentFile(NamedTuple):
    """The bytes of a segment in the layers of one kind, in a file that is open."""

    kind: int
    descriptor: int
    path: Path
    first_byte: int
    # before, sum: byte_sum of what comes before them, and of them after that
    before: int
    sum: int


class Segments(Protocol):
    """What is committed of a sequence as bytes, in segments of n_tokens tokens that are whole, by kind of layers.

    A kind is the window that its layers have, 0 for none. Of a window, a sequence has the last segments only.
    facts: what the bytes depend on, beside the tokens up to their end and the content of the model file.  n_bytes: of
    a segment, by kind.
    """

    n_tokens: int
    facts: str
    n_bytes: Mapping[int, int]

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        ...

    def committed(self, first: int, last: int) -> list[int]:
        """The committed tokens first..last-1."""
        ...

    def stamp(self, number: int) -> int:
        """A value that the segment never has again once the sequence was cut before its end."""
        ...

    def pieces(self, kind: int, number: int, n_tokens: int, stamp: int) -> Iterator[memoryview]:
        """The bytes of a segment, a few at a time; a piece is valid until the next one. In any thread, at any time.

        n_tokens: of those of the segment that are committed; the bytes of the others mean nothing.  Raises LookupError
        where the segment is gone, or the sequence was cut before its end since it had this stamp, and where it is not
        whole and a pass runs.
        """
        ...

    def held_from(self, kind: int) -> int:
        """The number of the first segment that there is."""
        ...

    def kept_from(self, kind: int, n_past: int) -> int:
        """The number of the first segment that is needed after n_past tokens, or after somewhat fewer."""
        ...

    def reach(self) -> int:
        """The length that truncate would reach if it were asked for n_past."""
        ...

    def byte_sum(self, data: Buffer, before: int) -> int:
        """A checksum of bytes, after those with the checksum `before`; of a segment, piece by piece."""
        ...

    def read(self, tokens: Sequence[int], files: Sequence[SegmentFile]) -> bool:
        """Commit one more segment, of these tokens, from files; False where their bytes are damaged or not to be read.

        n_past is a multiple of n_tokens. Of a segment, fewer tokens than it has may be committed. Layers whose kind no
        file has give up what they have up to here; see `reach`. Raises CacheFull where memory is missing. Nothing has
        changed then, nor where it is False.
        """
        ...


@runtime_checkable
class SegmentedSession(PooledSession, Protocol):
    """A session whose tokens can be kept as bytes."""

    @property
    def segments(self) -> Segments | None:
        """Its segments; None where layers keep something else, as recurrent ones do."""
        ...


# ---- sessions that make drafts ---------------------------------------------------------------------------------------


@runtime_checkable
class DraftingSession(Session, Protocol):
    """A session whose device generates drafts itself, without a round trip for each token."""

    def draft(self, tokens: ArrayLike, n_levels: int, width: int = 1, n_vocab: int | None = None) -> Nodes:
        """A tree of the most likely continuations of tokens, `width` nodes in each level.

        Of the successors of a level's nodes, those with the largest path probability make the next level (EAGLE-2, Li
        et al., arXiv:2406.16858); p is the model's own, at temperature 1. It is a forward pass of tokens and then of
        all nodes but those of the last level, which `commit` can keep.  tokens: (n,) int32.  n_vocab: only tokens below
        it are drafted; None for all. Raises InvalidArgument, and what `forward` raises.
        """
        ...


class BranchingSession(Session, Protocol):
    """A session in which a tree can grow over several passes: pending rows are kept if `forward` is asked to."""

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """As Session.forward, after the first n_pending rows of the forwards since the last commit.

        Parents and the path of `commit` are counted from the first pending row; all rows of a tree must fit into
        n_batch.
        """
        ...


class HeadSession(Protocol):
    """A draft head with its KV cache (edgeinfer.models.draft_head). Not thread-safe.

    Position i of its sequence is the pair of the target's feature of position i and the token of position i + 1.
    """

    n_ctx: int
    n_batch: int
    model: HeadModel  # whose sequence this is

    @property
    def spec(self) -> HeadSpec:
        """Its parts; logits are those of spec.decoder.n_logits tokens."""
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
        """Run rows through the head after the committed ones, without committing them.

        tokens: (n,) int32.  features: (n, n_embd) float32.  n_pending: rows of the forwards since the last commit that
        stay; these come after them.  parents: (n,) int32, the row that each follows, counted from the first pending
        one, -1 for the last committed one; None is a chain.  logits: which of the n rows, as in Session.forward.
        Gives (m, n_logits) logits, and as hidden (1, n, n_embd) the features that it predicts.
        Raises ShapeError, ContextOverflow, and Interrupted if `interrupt` was called meanwhile.
        """
        ...

    def combine(self, rows: ArrayLike) -> Features:
        """Features (n, n_embd) of the target's hidden rows (n, n_rows) float32, those of all layers that the head needs
        side by side. They are the rows themselves, but for a head with a matrix that makes one of several.

        Raises ShapeError.
        """
        ...

    def commit(self, path: ArrayLike) -> None:
        """As Session.commit; rows are counted from the first that is pending."""
        ...

    def truncate(self, n_past: int) -> int:
        """As Session.truncate, of rows."""
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now by the head and this session, without the target's embeddings."""
        ...

    def interrupt(self) -> None:
        """As Session.interrupt."""
        ...

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        ...


@runtime_checkable
class DraftingHead(HeadSession, Protocol):
    """A head whose device generates drafts itself, without a round trip for each level."""

    def draft(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        n_levels: int,
        width: int = 1,
        assumed: ArrayLike = (),
        n_vocab: int | None = None,
    ) -> Nodes:
        """A tree of what is likely after tokens, of ids that the head has logits for; see DraftingSession.draft.

        What `commit` can keep are rows as of a forward of tokens and features, and of all nodes but those of the last
        level after the features that the head predicts.  assumed: (m,) int, tokens that the tree follows although no
        feature of theirs is known: they are read after predicted ones too, and may be kept as the nodes.
        """
        ...


@runtime_checkable
class TargetReader(HeadSession, Protocol):
    """A draft head without keys and values: its rows attend to those of its target (an assistant of Gemma 4).

    Each row continues the committed tokens of the target by itself, whatever its parents, at the position after them;
    so n_past is the target's, nothing is ever pending, and commit and truncate change nothing.
    """

    def follow(self, target: Session) -> None:
        """Read that session from now on, which must be one of the head's target. Raises InvalidArgument."""
        ...


class HeadModel(Protocol):
    """A draft head's weights. Its sessions follow sessions of its target, which must stay open."""

    n_ctx: int
    n_batch: int
    spec: HeadSpec

    def session(self, n_ctx: int | None = None) -> HeadSession:
        """The state of a new sequence; see Model.session."""
        ...

    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See Model.forward; each sequence has features."""
        ...

    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine."""
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now, without those of sessions and without the target's embeddings."""
        ...

    def interrupt(self) -> None:
        """As Session.interrupt."""
        ...

    def close(self) -> None:
        """As Model.close."""
        ...


@runtime_checkable
class JointHeadModel(HeadModel, Protocol):
    """A head whose sessions share memory, and whose passes take rows of several of them."""

    n_sequences: int  # that the memory is planned for


# ---- sequences of any length -----------------------------------------------------------------------------------------


def run_sequence(
    session: Session, tokens: ArrayLike, *, logits: Literal["last", "all", "none"] = "last", taps: Taps = False
) -> Output:
    """Run and commit tokens after the committed ones, n_batch at a time; returns what one forward would have given.

    tokens: (n,) int32, n >= 1.  taps: as `hidden` of Session.forward. Raises what Session.forward raises; tokens of
    earlier passes stay committed.
    """
    ids = np.asarray(tokens)
    outputs: list[Output] = []
    for first in range(0, max(1, len(ids)), session.n_batch):
        part = ids[first : first + session.n_batch]
        is_last = first + len(part) == len(ids)
        rows: LogitsRows = "all" if logits == "all" else "last" if logits == "last" and is_last else ()
        outputs.append(session.forward(part, logits=rows, hidden=taps))
        session.commit(range(len(part)))
    hidden = [output.hidden for output in outputs if output.hidden is not None]
    return Output(
        np.concatenate([output.logits for output in outputs]), np.concatenate(hidden, axis=1) if hidden else None
    )
