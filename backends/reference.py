"""The oracle: a forward pass in plain numpy, written like the textbook. It is slow; other backends are compared with
it.

Every token goes through the same operations on the same arrays whatever the rest of the batch. So the result has the
same bits for any batch size, and for a branch of a tree as for a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends import reference_k6v4 as k6v4
from edgeinfer.backends.base import Progress, Rows
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
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.backends.reference_experts import expert_rows
from edgeinfer.backends.reference_math import (
    Floats,
    attend,
    gated,
    rms_norm,
    rotate,
    round_activations,
    scale,
    soft_cap,
)
from edgeinfer.backends.reference_weights import Activations, Shapes, Weights, check_types, count, read_weights
from edgeinfer.errors import EdgeInferError, Interrupted, ShapeError
from edgeinfer.models import (
    Attention,
    Dense,
    Experts,
    ExpertsRef,
    ModelSpec,
    TensorRef,
    check_blocks,
    read_spec,
)
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.spec import FeedForward
from edgeinfer.one_process import OfOneProcess
from edgeinfer.types import CacheType, Device, LogitsRows, MemoryPlan, MemoryUse, Output

_CACHE_DTYPES: dict[CacheType, type[np.floating]] = {"f16": np.float16, "q8_0": np.float32, "k6v4": np.float32}
# The fields of blocks that are looked at below; see check_blocks.
BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "window"),
        *("soft_cap", "query_temperature", "qk_norm", "norm", "post_norm", "sub_norm", "q_norm", "k_norm"),
        *("q_bias", "k_bias", "v_bias", "output_bias", "sinks"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm"),
    Experts: (
        *("n_embd", "n_ff", "n_experts", "n_used", "router", "gate", "up", "down", "router_function", "is_normalised"),
        *("weight_scale", "n_groups", "n_used_groups", "activation", "norm", "post_norm", "router_bias"),
        *("selection_bias", "gate_bias", "up_bias", "down_bias", "gate_scale", "up_scale", "down_scale"),
        *("n_ff_shared", "shared_router", "shared_gate", "shared_up", "shared_down"),
    ),
}


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

    def plan(
        self,
        model: ModelFile,
        spec: ModelSpec,
        n_ctx: int,
        n_batch: int = 512,
        n_threads: int = 1,
        cache_type: CacheType = "f16",
    ) -> MemoryPlan:
        """Bytes of the weights in float32, the KV cache, and the activations of n_batch tokens.

        The cache is in float16; for q8_0 and k6v4 in float32, rounded, for k6v4 with the turned biases of keys.
        Raises UnsupportedModel for a tensor type that `dequantize` does not know, InvalidArgument for a model that the
        cache type does not fit.
        """
        check_blocks(spec.blocks(), BLOCKS, self.name, model.path)
        check_cache(cache_type, spec)
        shapes = spec.tensor_shapes()
        check_types(model, shapes)
        n_batch = min(n_batch, n_ctx)
        n_weights, n_of_experts = count(shapes)
        n_kv = sum(n_ctx * n_held(layer.mixer, cache_type) for layer in spec.layers)
        n_activations = n_batch * 2 * spec.n_embd
        n_activations += n_batch * max((layer.mixer.n_q + 2 * layer.mixer.n_kv for layer in spec.layers), default=0)
        n_activations += n_batch * max((2 * layer.ffn.n_ff for layer in spec.layers), default=0)
        n_cache = _CACHE_DTYPES[cache_type]().itemsize * n_kv
        use = MemoryUse(4 * n_weights, n_cache, 4 * n_activations, experts=4 * n_of_experts)
        return MemoryPlan(n_ctx, n_batch, use, cache_type)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> ReferenceModel:
        """Dequantise all weights. Raises UnsupportedModel. The file may be closed afterwards."""
        check_blocks(spec.blocks(), BLOCKS, self.name, model.path)
        return ReferenceModel(spec, plan, self.read_weights(model, spec.tensor_shapes(), progress))

    def read_weights(self, model: ModelFile, shapes: Shapes, progress: Progress | None = None) -> dict[str, Weights]:
        """Some tensors of a file, dequantised. Raises UnsupportedModel."""
        return read_weights(model, shapes, self.activations, progress)


class ReferenceDecoder(OfOneProcess):
    """The weights of a ModelSpec, and what its blocks do to the residual stream of one text.

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
        text: TextState,
        links: NDArray[np.int32],
        rows: NDArray[np.int32],
        taps: tuple[int, ...],
        inputs: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Logits (m, n_logits) of some rows of x (n, n_embd), and what is tapped, (n_taps, n, n_embd).

        links: (n_pending + n,), parents of the rows that are pending and of these behind them.  inputs: see _attention.
        """
        spec = self.decoder
        paths = visible_slots(links, text.n_past)[len(links) - len(x) :]
        tapped = {}
        for index, layer in enumerate(spec.layers):
            added = self._attention(layer.mixer, text, index, x, paths, inputs)
            x = x + scale(added, spec.residual_scale)
            x = x + scale(self._network(layer.ffn, x), spec.residual_scale)
            tapped[index] = x
        x = tapped[spec.n_layers] = self.norm(spec.output_norm, x)
        assert spec.output is not None  # a head's is its target's by now
        logits = self.linear(spec.output, None, x[rows])
        logits = soft_cap(scale(logits, spec.logit_scale), spec.logit_soft_cap)
        return logits, np.array([tapped[layer] for layer in taps], dtype=np.float32)

    def _attention(
        self,
        block: Attention,
        text: TextState,
        layer: int,
        x: Floats,
        paths: list[NDArray[np.intp]],
        inputs: Floats | None,
    ) -> Floats:
        """What attention adds, (n, n_embd).

        paths: for each row the slots that it sees.  inputs: (n, n_in), what queries, keys and values are products with
        where that is not the norm of x.
        """
        bias = block.separate_key_bias if text.cache_type == "k6v4" else None  # that is not part of the keys
        h = self.norm(block.norm, x) if inputs is None else inputs
        q, k, v = self._queries_keys_values(block, h, block.k_bias if bias is None else None)
        positions = np.array([len(path) - 1 for path in paths])

        def turned(heads: Floats) -> Floats:
            return heads if block.rope is None else rotate(heads, positions, block.rope.of_context(text.n_ctx))

        q, k = turned(q), turned(k)
        q = q * QueryScales.of(block, text.n_ctx).at(positions)[:, None, None]
        if text.cache_type == "q8_0":
            q, k, v = (rounded_heads(each) for each in (q, k, v))
        elif text.cache_type == "k6v4":
            biases = (
                None if bias is None else turned(np.broadcast_to(self.values_of(bias).reshape(k[0].shape), k.shape))
            )
            q, k, v = k6v4.asking(q, bias is not None), k6v4.held_keys(k, biases), k6v4.held_values(v)
        keys, values = text.keys[layer], text.values[layer]
        slots = [path[-1] for path in paths]
        keys[slots], values[slots] = k, v
        sinks = None if block.sinks is None else self.values_of(block.sinks)
        y = np.empty((len(x), block.n_heads, block.head_dim), dtype=np.float32)
        for i, path in enumerate(paths):
            self._poll()
            seen = path if block.window is None else path[-block.window :]
            y[i] = attend(q[i], keys[seen], values[seen], block.soft_cap, sinks)
        if text.cache_type == "k6v4":
            y = k6v4.hadamard(y, is_back=True)
        heads = self.norm(block.sub_norm, y.reshape(len(x), -1))
        return self.norm(block.post_norm, self.linear(block.output, block.output_bias, heads))

    def _queries_keys_values(
        self, block: Attention, h: Floats, key_bias: TensorRef | None
    ) -> tuple[Floats, Floats, Floats]:
        """(n, heads, head_dim) each, with norms on queries and keys where the block has them."""
        q = self.linear(block.q, block.q_bias, h)
        k = self.linear(block.k, key_bias, h)
        v = self.linear(block.v, block.v_bias, h)
        if block.qk_norm == "whole":
            q, k = self.norm(block.q_norm, q), self.norm(block.k_norm, k)
        q, k, v = (rows.reshape(len(h), -1, block.head_dim) for rows in (q, k, v))
        if block.qk_norm == "per_head":
            q, k = self.norm(block.q_norm, q), self.norm(block.k_norm, k)
        return q, k, v

    def _network(self, block: FeedForward, x: Floats) -> Floats:
        """What a feed-forward network adds, (n, n_embd)."""
        if isinstance(block, Experts):
            return self.norm(block.post_norm, expert_rows(block, self, self.norm(block.norm, x)))
        return self._dense(block, x)

    def _dense(self, block: Dense, x: Floats) -> Floats:
        h = self.norm(block.norm, x)
        gate, up = self.linear(block.gate, None, h), self.linear(block.up, None, h)
        inner = self.norm(block.sub_norm, gated(block.activation, gate, up))
        return self.norm(block.post_norm, self.linear(block.down, None, inner))

    def norm(self, weight: TensorRef | None, x: Floats) -> Floats:
        """RMS norm over the last axis; x itself where there is no weight."""
        return x if weight is None else rms_norm(x, self.weights_of(weight).values, self.decoder.norm_epsilon)

    def linear(self, matrix: TensorRef, bias: TensorRef | None, x: Floats) -> Floats:
        """Matrix times each row of x, plus bias: (n, n_in) to (n, n_out)."""
        weights = self.weights_of(matrix)
        if weights.block > 1:
            x = round_activations(x, weights.block)
        y = np.empty((len(x), len(weights.values)), dtype=np.float32)
        for i, row in enumerate(x):  # one at a time: BLAS sums in another order for another number of rows
            self._poll()
            y[i] = weights.values @ row
        return y if bias is None else y + self.weights_of(bias).values

    def expert_linear(self, matrix: ExpertsRef, expert: int, x: Floats) -> Floats:
        """The matrix of one expert times x: (n_in,) to (n_out,)."""
        self._poll()
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

    def _poll(self) -> None:
        """Raises Interrupted if `interrupt` was called since the pass began."""
        if self._stopped:
            raise Interrupted("the forward pass was interrupted; the session is as it was before")


class ReferenceModel(ReferenceDecoder):
    """See edgeinfer.backends.base.Model."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes and blocks."""
        return self.decoder

    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> ReferenceSession:
        """See Model.session."""
        self.check_open()
        cache_type = self.plan.cache_type if cache_type is None else cache_type
        return ReferenceSession(self, check_session_size(n_ctx, self.n_ctx), cache_type)

    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See Model.forward. One text after the other."""
        return forward_in_turn(self, batch)

    def embeddings(self, ids: NDArray[np.int32]) -> Floats:
        """What goes into the first layer, (n, n_embd)."""
        assert self.decoder.token_embd is not None  # every whole model has them
        return scale(self.weights_of(self.decoder.token_embd).values[ids], self.decoder.embedding_scale)


class TextState(OfOneProcess):
    """The KV cache of a text in every layer, by slot: those of the last forward lie behind the committed ones."""

    def __init__(self, decoder: ReferenceDecoder, n_ctx: int, cache_type: CacheType) -> None:
        check_cache(cache_type, decoder.decoder)
        self.n_ctx = n_ctx
        self.n_batch = decoder.n_batch
        self.cache_type = cache_type
        mixers = [layer.mixer for layer in decoder.decoder.layers]
        shapes = [(n_ctx, mixer.n_kv_heads, mixer.head_dim) for mixer in mixers]
        self.values = [np.zeros(shape, dtype=_CACHE_DTYPES[cache_type]) for shape in shapes]
        lengths = [n_held(mixer, cache_type) // mixer.n_kv_heads - mixer.head_dim for mixer in mixers]  # of keys
        self.keys = [  # after rope
            np.zeros((*values.shape[:2], length), dtype=values.dtype)
            for values, length in zip(self.values, lengths, strict=True)
        ]
        self._decoder = decoder
        self._text: list[int] = []  # committed
        self._parents = np.empty(0, dtype=np.int32)  # of the last forward; its row i is in slot n_past + i
        self._tokens = np.empty(0, dtype=np.int32)
        self._is_open = True

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        self._check_open()
        return len(self._text)

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        rows = check_path(path, self._parents)
        slots = slice(self.n_past, self.n_past + len(rows))
        for cache in (*self.keys, *self.values):
            cache[slots] = cache[self.n_past + rows]
        self._text += self._tokens[rows].tolist()
        self._parents = np.empty(0, dtype=np.int32)

    def truncate(self, n_past: int) -> int:
        """See Session.truncate. Reaches every length."""
        if not 0 <= n_past <= self.n_past:
            raise ShapeError(f"n_past must be in 0..{self.n_past}: found {n_past}")
        del self._text[n_past:]
        self._parents = np.empty(0, dtype=np.int32)
        return n_past

    def memory(self) -> MemoryUse:
        """Bytes of the weights and the KV cache that are held, and of the activations that were planned."""
        self._check_open()
        use = self._decoder.memory()
        return replace(use, kv_cache=sum(cache.nbytes for cache in (*self.keys, *self.values)))

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._decoder.interrupt()

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._is_open = False
        self.keys, self.values = [], []

    def _check_open(self) -> None:
        self._decoder.check_open()
        if not self._is_open:
            raise EdgeInferError("this session is closed")


class ReferenceSession(TextState):
    """See edgeinfer.backends.base.Session."""

    def __init__(self, model: ReferenceModel, n_ctx: int, cache_type: CacheType) -> None:
        super().__init__(model, n_ctx, cache_type)
        self.model = model

    @property
    def spec(self) -> ModelSpec:
        """See Session.spec."""
        return self.model.spec

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
        out, tapped = self.model.run_layers(self.model.embeddings(ids), self, links, rows, taps)
        self._parents, self._tokens = links, ids
        return Output(out, tapped if taps else None)

    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """See Session.reuse_prefix. Finds what is committed now."""
        return self.truncate(common_length(self._text, np.asarray(tokens).tolist()))


def n_held(mixer: Attention, cache_type: CacheType) -> int:
    """Numbers of keys and values that a token leaves in a layer; k6v4 holds biases of keys apart."""
    is_apart = cache_type == "k6v4" and mixer.separate_key_bias is not None
    return (3 if is_apart else 2) * mixer.n_kv


def rounded_heads(heads: Floats) -> Floats:
    """Heads (n, n_heads, head_dim) as a cache of q8_0 holds them."""
    return round_activations(heads.reshape(-1, heads.shape[-1]), 32).reshape(heads.shape)


def visible_slots(parents: NDArray[np.int32], n_past: int) -> list[NDArray[np.intp]]:
    """For each row the slots of what it sees, in order: all that is committed, its ancestors, itself."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents.tolist()):
        before = paths[parent] if parent >= 0 else list(range(n_past))
        paths.append([*before, n_past + row])
    return [np.array(path, dtype=np.intp) for path in paths]
