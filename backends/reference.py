"""The oracle: a forward pass in plain numpy, written like the textbook. It is slow; other backends are compared with
it.

Every token goes through the same operations on the same arrays whatever the rest of the batch. So the result has the
same bits for any batch size, and for a branch of a tree as for a chain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import Model, Progress, Rows, Session
from edgeinfer.backends.checks import (
    check_cache,
    check_parents,
    check_path,
    check_rows,
    check_session_size,
    check_taps,
    check_tokens,
    common_length,
)
from edgeinfer.backends.in_turn import forward_in_turn
from edgeinfer.backends.reference_attention import ReferenceAttention
from edgeinfer.backends.reference_experts import expert_rows
from edgeinfer.backends.reference_latent import ReferenceLatentAttention
from edgeinfer.backends.reference_math import (
    Floats,
    activated,
    gated,
    rms_norm,
    round_activations,
    scale,
    soft_cap,
)
from edgeinfer.backends.reference_recurrences import ReferenceGatedDeltaNet, ReferenceMamba2, ReferenceShortConv
from edgeinfer.backends.reference_weights import Activations, Shapes, Weights, check_types, count, read_weights
from edgeinfer.common.errors import EdgeInferError, Interrupted, ShapeError
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device, LogitsRows, MemoryPlan, MemoryUse, Output
from edgeinfer.models import (
    Attention,
    Dense,
    Experts,
    ExpertsRef,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    LayerEnd,
    LayerInputs,
    Mamba2,
    Mixer,
    ModelSpec,
    NoFeedForward,
    PlainDense,
    PlainExperts,
    ShortConv,
    TensorRef,
    check_blocks,
    dense_of,
    read_spec,
)
from edgeinfer.models.gguf import ModelFile


@dataclass(frozen=True)
class LayerRows:
    """The rows of a pass in one layer, as a mixer sees them."""

    # of the sequence in this layer, by slot; a row's own slot is the last of its path, unless the keys are a target's
    state: Sequence[NDArray[np.floating]]
    paths: Sequence[NDArray[np.intp]]  # for each row the slots that it sees, in order
    n_ctx: int
    cache_type: CacheType
    inputs: Floats | None  # (n, n_in), what the products are with where that is not the norm of x


class ReferenceMixer(Protocol):
    """How one kind of mixer runs here."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields of the block that are looked at; see check_blocks."""
        ...

    def state(self, block: Any, n_ctx: int, cache_type: CacheType) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Arrays that hold the state of a sequence, with a row for each slot: (n_ctx, ...).

        A recurrence keeps the state after each token, and continues from that of the slot before: so trees and
        truncation need nothing else.
        """
        ...

    def run(self, block: Any, decoder: ReferenceDecoder, x: Floats, at: LayerRows) -> Floats:
        """What the block adds to x (n, n_embd), and the rows' states into their slots."""
        ...


MIXERS: dict[type[Mixer], ReferenceMixer] = {
    Attention: ReferenceAttention(),
    GatedDeltaNet: ReferenceGatedDeltaNet(),
    Mamba2: ReferenceMamba2(),
    ShortConv: ReferenceShortConv(),
    LatentAttention: ReferenceLatentAttention(),
}
_OF_EXPERTS = (
    *("n_embd", "n_ff", "n_experts", "n_used", "router", "gate", "up", "down", "router_function", "is_normalised"),
    *("weight_scale", "n_groups", "n_used_groups", "groups_by_best", "activation", "norm", "post_norm", "router_bias"),
    *("selection_bias", "gate_bias", "up_bias", "down_bias", "gate_scale", "up_scale", "down_scale"),
    *("n_ff_shared", "shared_router", "shared_gate", "shared_up", "shared_down"),
    *("router_norm", "router_scale", "shared_norm", "routed_post_norm", "shared_post_norm"),
)
_NETWORKS: dict[type, Sequence[str]] = {
    Dense: (
        *("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm", "post_norm_epsilon"),
    ),
    Experts: _OF_EXPERTS,
    PlainDense: ("n_embd", "n_ff", "up", "down", "activation", "norm"),
    PlainExperts: (*_OF_EXPERTS, "n_latent", "latent_down", "latent_up"),
    NoFeedForward: ("n_embd",),
    LayerEnd: ("n_embd", "n_inputs", "gate", "projection", "post_norm", "scale", "activation"),
    LayerInputs: (
        *("n_embd", "n_layers", "n_inputs", "n_vocab", "table", "projection", "norm", "projection_scale"),
        "table_scale",
    ),
}


def known_blocks() -> dict[type, Sequence[str]]:
    """The kinds of block that run here, with the fields that are looked at; see check_blocks."""
    return {kind: mixer.fields for kind, mixer in MIXERS.items()} | _NETWORKS


class ReferenceBackend:
    """Runs models with numpy in float32; the device is not looked at.

    activations "int8": the input of a quantised matrix is first rounded as the native engine rounds it (see
    `round_activations`). The two still sum in another order: tokens agree to about 1e-6 of the spread of the logits
    until this moves one number over the edge of a rounding; that token and those after it may part by 1e-2.
    """

    name = "reference"

    def __init__(self, activations: Activations = "float32") -> None:
        self.activations = activations

    def read_spec(self, model: ModelFile) -> ModelSpec:
        """See edgeinfer.models.read_spec. Raises UnsupportedModel."""
        return read_spec(model)

    def plan(self, model: ModelFile, spec: ModelSpec, settings: LoadSettings) -> MemoryPlan:
        """Bytes of the weights in float32, the KV cache, and the activations of n_batch tokens.

        The cache is in float16; for q8_0 and k6v4 in float32, rounded, for k6v4 with the turned biases of keys.
        Raises UnsupportedModel for a tensor type that `dequantize` does not know, InvalidArgument for a model that the
        cache type does not fit.
        """
        check_blocks(spec.blocks(), known_blocks(), self.name, model.path)
        check_cache(settings.cache_type, spec)
        shapes = spec.tensor_shapes()
        check_types(model, shapes)
        settings = settings.with_batch()
        n_batch = settings.n_batch
        n_weights, n_of_experts = count(shapes)
        n_activations = n_batch * 2 * spec.n_embd
        n_activations += n_batch * max((layer.mixer.n_activations for layer in spec.layers), default=0)
        n_activations += n_batch * max((layer.ffn.n_activations for layer in spec.layers), default=0)
        n_activations += 0 if spec.layer_inputs is None else n_batch * spec.layer_inputs.n_activations
        n_cache = sum(_state_bytes(layer.mixer, settings.n_ctx, settings.cache_type) for layer in spec.layers)
        use = MemoryUse(4 * n_weights, n_cache, 4 * n_activations, experts=4 * n_of_experts)
        return MemoryPlan(settings, use)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> ReferenceModel:
        """Dequantise all weights. Raises UnsupportedModel. The file may be closed afterwards."""
        check_blocks(spec.blocks(), known_blocks(), self.name, model.path)
        return ReferenceModel(spec, plan, self.read_weights(model, spec.tensor_shapes(), progress))

    def read_weights(self, model: ModelFile, shapes: Shapes, progress: Progress | None = None) -> dict[str, Weights]:
        """Some tensors of a file, dequantised. Raises UnsupportedModel."""
        return read_weights(model, shapes, self.activations, progress)


class ReferenceDecoder(OfOneProcess):
    """The weights of a ModelSpec, and what its blocks do to the residual stream of one sequence.

    weights: by tensor.  `interrupt` ends the pass that runs.
    """

    def __init__(self, spec: ModelSpec, plan: MemoryPlan, weights: dict[str, Weights]) -> None:
        self.n_ctx = plan.n_ctx
        self.n_batch = plan.n_batch
        self.decoder = spec
        self.plan = plan
        self._weights = weights
        self._stopped = False

    def memory(self) -> MemoryUse:
        """Bytes of the weights that are held, and of the activations that were planned."""
        self.check_open()
        n_weights, n_of_experts = count({name: each.values.shape for name, each in self._weights.items()})
        return MemoryUse(4 * n_weights, 0, self.plan.use.activations, experts=4 * n_of_experts)

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._stopped = True

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._weights = {}

    def check_open(self) -> None:
        """Raises EdgeInferError if this is closed."""
        if not self._weights:
            raise EdgeInferError("this model is closed")

    def begin(self) -> None:
        """A pass begins: what `interrupt` asked for before is over."""
        self._stopped = False

    def run_layers(
        self,
        x: Floats,
        sequence: SequenceState,
        links: NDArray[np.int32],
        rows: NDArray[np.int32],
        taps: tuple[int, ...],
        inputs: Floats | None = None,
        of_layers: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Logits (m, n_logits) of some rows of x (n, n_embd), and what is tapped, (n_taps, n, n_embd).

        links: (n_pending + n,), parents of the rows that are pending and of these after them.  inputs: see LayerRows.
        of_layers: (n_layers, n, n_inputs), see LayerInputs.
        """
        spec = self.decoder
        paths = visible_slots(links, sequence.n_past)[len(links) - len(x) :]
        tapped = {}
        read = x
        for index, layer in enumerate(spec.layers):
            read = read if layer.is_beside else x
            x = x + scale(self.mixed(layer.mixer, read, sequence.rows(index, paths, inputs)), spec.residual_scale)
            x = x + scale(self._network(layer, x), spec.residual_scale)
            if layer.end is not None:
                x = self._ended(layer.end, x, None if of_layers is None else of_layers[index])
            tapped[index] = x
        x = x - x.mean(axis=-1, keepdims=True) if spec.centred_output else x
        x = tapped[spec.n_layers] = self.norm(spec.output_norm, x)
        assert spec.output is not None  # a head's is its target's by now
        logits = self.linear(spec.output, None, x[rows])
        logits = soft_cap(scale(logits, spec.logit_scale), spec.logit_soft_cap)
        return logits, np.array([tapped[layer] for layer in taps], dtype=np.float32)

    def mixed(self, block: Mixer, x: Floats, at: LayerRows) -> Floats:
        """What a mixer adds, (n, n_embd)."""
        return MIXERS[type(block)].run(block, self, x, at)

    def _network(self, layer: Layer, x: Floats) -> Floats:
        """What a feed-forward network adds, (n, n_embd)."""
        block = layer.ffn
        if isinstance(block, Experts):
            return self.norm(block.post_norm, expert_rows(block, self, x))
        if isinstance(block, PlainDense):
            up = self.linear(block.up, None, self.norm(block.norm, x))
            return self.linear(block.down, None, activated(block.activation, up))
        if isinstance(block, NoFeedForward):
            return np.zeros_like(x)
        return self._dense(dense_of(layer), x)

    def _ended(self, block: LayerEnd, x: Floats, inputs: Floats | None) -> Floats:
        """See LayerEnd. x: (n, n_embd), inputs: (n, n_inputs)."""
        if block.gate is not None and block.projection is not None:
            assert inputs is not None  # of whole models
            h = gated(block.activation, self.linear(block.gate, None, x), inputs)
            y = self.norm(block.post_norm, self.linear(block.projection, None, h))
            x = x + scale(y, self.decoder.residual_scale)
        return x if block.scale is None else x * self.values_of(block.scale)

    def _dense(self, block: Dense, x: Floats) -> Floats:
        h = self.norm(block.norm, x)
        gate, up = self.linear(block.gate, None, h), self.linear(block.up, None, h)
        inner = self.norm(block.sub_norm, gated(block.activation, gate, up))
        return self.norm(block.post_norm, self.linear(block.down, None, inner), block.post_norm_epsilon)

    def norm(self, weight: TensorRef | None, x: Floats, epsilon: float | None = None) -> Floats:
        """RMS norm over the last axis, with the model's epsilon or another one; x itself where there is no weight."""
        epsilon = self.decoder.norm_epsilon if epsilon is None else epsilon
        return x if weight is None else rms_norm(x, self.weights_of(weight).values, epsilon)

    def linear(self, matrix: TensorRef, bias: TensorRef | None, x: Floats) -> Floats:
        """Matrix times each row of x, plus bias: (n, n_in) to (n, n_out)."""
        weights = self.weights_of(matrix)
        if weights.block > 1:
            x = round_activations(x, weights.block)
        y = np.empty((len(x), len(weights.values)), dtype=np.float32)
        for i, row in enumerate(x):  # one at a time: BLAS sums in another order for another number of rows
            self.poll()
            y[i] = weights.values @ row
        return y if bias is None else y + self.weights_of(bias).values

    def expert_linear(self, matrix: ExpertsRef, expert: int, x: Floats) -> Floats:
        """The matrix of one expert times x: (n_in,) to (n_out,)."""
        self.poll()
        weights = self.weights_of(matrix)
        if weights.block > 1:
            x = round_activations(x[None], weights.block)[0]
        y: Floats = weights.values[expert] @ x
        return y

    def values_of(self, ref: TensorRef | ExpertsRef) -> Floats:
        """The numbers of a tensor, or of a part of one."""
        return self.weights_of(ref).values

    def weights_of(self, ref: TensorRef | ExpertsRef) -> Weights:
        """A tensor, or some rows of one or of each expert."""
        return self._weights[ref if isinstance(ref, str) else ref.name].part(ref)

    def poll(self) -> None:
        """Raises Interrupted if `interrupt` was called since the pass began."""
        if self._stopped:
            raise Interrupted("the forward pass was interrupted; the session is as it was before")


class ReferenceModel(ReferenceDecoder, Model):
    """See edgeinfer.backends.base.Model."""

    @property
    @override
    def spec(self) -> ModelSpec:
        """Sizes and blocks."""
        return self.decoder

    @override
    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> ReferenceSession:
        self.check_open()
        cache_type = self.plan.cache_type if cache_type is None else cache_type
        return ReferenceSession(self, check_session_size(n_ctx, self.n_ctx), cache_type)

    @override
    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See Model.forward. One sequence after the other."""
        return forward_in_turn(self, batch)

    def embeddings(self, ids: NDArray[np.int32]) -> Floats:
        """What goes into the first layer, (n, n_embd)."""
        assert self.decoder.token_embd is not None  # every whole model has them
        x = scale(self.weights_of(self.decoder.token_embd).values[ids], self.decoder.embedding_scale)
        return rms_norm(x, np.ones_like(x[0]), self.decoder.norm_epsilon) if self.decoder.embedding_norm else x

    def of_layers(self, ids: NDArray[np.int32], x: Floats) -> Floats | None:
        """What each layer has of its own, (n_layers, n, n_inputs), None without; x: (n, n_embd), see LayerInputs."""
        block = self.decoder.layer_inputs
        if block is None:
            return None
        shape = len(ids), block.n_layers, block.n_inputs
        products = scale(self.linear(block.projection, None, x), block.projection_scale).reshape(shape)
        rows = scale(self.weights_of(block.table).values[ids], block.table_scale).reshape(shape)
        both = (self.norm(block.norm, products) + rows) * np.float32(math.sqrt(0.5))
        return np.ascontiguousarray(both.transpose(1, 0, 2))


class SequenceState(OfOneProcess):
    """The state of a sequence in every layer, by slot: those of the last forward lie after the committed ones."""

    def __init__(self, decoder: ReferenceDecoder, n_ctx: int, cache_type: CacheType) -> None:
        check_cache(cache_type, decoder.decoder)
        self.n_ctx = n_ctx
        self.n_batch = decoder.n_batch
        self.cache_type = cache_type
        self._states = [
            [np.zeros(shape, dtype) for shape, dtype in MIXERS[type(layer.mixer)].state(layer.mixer, n_ctx, cache_type)]
            for layer in decoder.decoder.layers
        ]
        self._decoder = decoder
        self._sequence: list[int] = []  # committed
        self._parents = np.empty(0, dtype=np.int32)  # of the last forward; its row i is in slot n_past + i
        self._tokens = np.empty(0, dtype=np.int32)
        self._is_open = True

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        self._check_open()
        return len(self._sequence)

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        rows = check_path(path, self._parents)
        slots = slice(self.n_past, self.n_past + len(rows))
        for held in self._held():
            held[slots] = held[self.n_past + rows]
        self._sequence += self._tokens[rows].tolist()
        self._parents = np.empty(0, dtype=np.int32)

    def truncate(self, n_past: int) -> int:
        """See Session.truncate. Reaches every length."""
        if not 0 <= n_past <= self.n_past:
            raise ShapeError(f"n_past must be in 0..{self.n_past}: found {n_past}")
        del self._sequence[n_past:]
        self._parents = np.empty(0, dtype=np.int32)
        return n_past

    def memory(self) -> MemoryUse:
        """Bytes of the weights and the KV cache that are held, and of the activations that were planned."""
        self._check_open()
        use = self._decoder.memory()
        return replace(use, kv_cache=sum(held.nbytes for held in self._held()))

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._decoder.interrupt()

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._is_open = False
        self._states = []

    def rows(self, layer: int, paths: Sequence[NDArray[np.intp]], inputs: Floats | None) -> LayerRows:
        """The rows of a pass in a layer; see LayerRows."""
        mixer = self._decoder.decoder.layers[layer].mixer
        of = layer if not isinstance(mixer, Attention) or mixer.kv_of is None else mixer.kv_of
        return LayerRows(self._states[of], paths, self.n_ctx, self.cache_type, inputs)

    def _held(self) -> Iterator[NDArray[np.floating]]:
        for states in self._states:
            yield from states

    def _check_open(self) -> None:
        self._decoder.check_open()
        if not self._is_open:
            raise EdgeInferError("this session is closed")


class ReferenceSession(SequenceState, Session):
    """See edgeinfer.backends.base.Session."""

    def __init__(self, model: ReferenceModel, n_ctx: int, cache_type: CacheType) -> None:
        super().__init__(model, n_ctx, cache_type)
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
        """See Session.forward. The batch may be larger than n_batch; it then takes more memory than planned."""
        self._check_open()
        ids = check_tokens(tokens, self.spec.n_vocab, self.n_past, self.n_ctx)
        links = check_parents(parents, len(ids))
        rows = check_rows(logits, len(ids))
        taps = check_taps(hidden, self.spec.n_layers)
        self.model.begin()
        self._parents = np.empty(0, dtype=np.int32)
        x = self.model.embeddings(ids)
        of_layers = self.model.of_layers(ids, x)
        out, tapped = self.model.run_layers(x, self, links, rows, taps, of_layers=of_layers)
        self._parents, self._tokens = links, ids
        return Output(out, tapped if taps else None)

    @override
    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """See Session.reuse_prefix. Finds what is committed now."""
        return self.truncate(common_length(self._sequence, np.asarray(tokens).tolist()))


def _state_bytes(block: Mixer, n_ctx: int, cache_type: CacheType) -> int:
    """Bytes of the state of a sequence in one layer."""
    return sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in MIXERS[type(block)].state(block, n_ctx, cache_type)
    )


def visible_slots(parents: NDArray[np.int32], n_past: int) -> list[NDArray[np.intp]]:
    """For each row the slots of what it sees, in order: all that is committed, its ancestors, itself."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents.tolist()):
        before = paths[parent] if parent >= 0 else list(range(n_past))
        paths.append([*before, n_past + row])
    return [np.array(path, dtype=np.intp) for path in paths]
