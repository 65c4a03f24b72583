"""The graph of a decoder or of a draft head with a KV cache, from the recipe of its ModelSpec.

Inputs, for n tokens behind those that are in the cache, with t positions that they may see (n_ctx in a plain graph):

    input_ids (1, n) int64, position_ids (1, n) int64
    attention_bias (1, 1, n, t) float32: 0 where a token sees a position, HIDDEN where not; attention_bias.W in layers
    with a window of W positions
    logit_rows (m,) int64: of the n tokens, those whose logits are wanted
    features (1, n, n_embd) float32: of a head
    cache_slots (n,) int64: of a plain graph, where in the cache the tokens go; else they go behind the others, and
    t is the number of positions with them
    past_key.L, past_value.L (1, n_kv_heads, n_ctx, head_dim) float32

Outputs: logits (m, n_logits); hidden_states (1, n, n_embd), what the output matrix reads; present_key.L and
present_value.L, which may be the same memory as the inputs; on demand layer_output.L (1, n, n_embd).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.onnx.graph import CONTRIB, Dims, Graph
from edgeinfer.backends.onnx.library import Style
from edgeinfer.backends.onnx.matrices import Blocks, Constant, Floats, part_of, vector_of, weights_of
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.models import GateTensors, ModelSpec, RopeSpec, TensorRef, TensorRows
from edgeinfer.models.gguf import ModelFile

HIDDEN = -30000.0  # an additive mask that half floats have too; exp of it is 0
_INT8_ACTIVATIONS = 4  # of MatMulNBits: inputs may be rounded to 8 bits by block
_FLOAT, _INT32 = 1, 6  # onnx.TensorProto.DataType
_FLOAT32 = np.dtype(np.float32)
_VECTOR = 8  # GroupQueryAttention wants heads, and half of what it rotates, in multiples of this


@dataclass(frozen=True)
class Embedding:
    """Where the rows of tokens are: in the model's own file, or a head's target's."""

    model: ModelFile
    name: str
    shape: tuple[int, int]
    scale: float

    @classmethod
    def of(cls, model: ModelFile, spec: ModelSpec) -> Embedding:
        """That of a whole model."""
        return cls(model, spec.token_embd, (spec.n_vocab, spec.n_embd), spec.embedding_scale)


def build_decoder(
    model: ModelFile, spec: ModelSpec, embedding: Embedding, n_ctx: int, style: Style, taps: bool = False
) -> Graph:
    """The graph of a model or a head, for positions below n_ctx. taps: with the outputs of all layers.

    Raises UnsupportedModel for a tensor type without a rule.
    """
    return _Builder(model, spec, embedding, n_ctx, style).build(taps)


def build_model(model: ModelFile, spec: ModelSpec, n_ctx: int, style: Style, taps: bool = False) -> Graph:
    """The graph of a whole model; see build_decoder."""
    return build_decoder(model, spec, Embedding.of(model, spec), n_ctx, style, taps)


def build_combine(head: ModelFile, spec: ModelSpec, style: Style) -> Graph:
    """The graph of CombineTensors: rows (1, n, n_rows) in, features (1, n, n_embd) out. Raises UnsupportedModel."""
    return _Builder(head, spec, None, 0, style).build_combine()


def bias_name(window: int | None) -> str:
    """Name of the input with the mask of layers with such a window."""
    return "attention_bias" if window is None else f"attention_bias.{window}"


def windows_of(spec: ModelSpec) -> list[int | None]:
    """The windows of all layers, each once."""
    return list(dict.fromkeys(attention.window for attention in spec.attention))


class _Builder:
    def __init__(
        self, model: ModelFile, spec: ModelSpec, embedding: Embedding | None, n_ctx: int, style: Style
    ) -> None:
        self._model, self._spec, self._embedding, self._n_ctx, self._style = model, spec, embedding, n_ctx, style
        self._graph = Graph(spec.architecture)
        self._ropes: list[RopeSpec] = []
        self._shared: dict[str, str] = {}  # values that are made once, by what they are
        self._attends_in_one = style == "contrib" and spec.head_dim % _VECTOR == 0

    def build(self, taps: bool) -> Graph:
        graph, spec = self._graph, self._spec
        self._inputs()
        x = self._embedded()
        if spec.gate is not None:
            x = self._fused(spec.gate, x)
        for layer in range(spec.n_layers):
            graph.within(f"layer.{layer}.")
            x = graph.add("Add", x, self._times(self._attention(layer, x), spec.residual_scale))
            x = graph.add("Add", x, self._times(self._feed_forward(layer, x), spec.residual_scale))
            if taps:
                graph.output(f"layer_output.{layer}", x, 1, "n", spec.n_embd)
        graph.within("")
        x = self._norm(spec.output_norm, x)
        graph.output("hidden_states", x, 1, "n", spec.n_embd)
        graph.output("logits", self._logits(x), "m", spec.n_logits)
        graph.metadata |= self._metadata()
        return graph

    def build_combine(self) -> Graph:
        graph, combine = self._graph, self._spec.combine
        assert combine is not None
        x = graph.input("rows", np.float32, 1, "n", combine.n_rows)
        if combine.norm is not None:
            parts = graph.add("Reshape", x, graph.ints(0, 0, -1, combine.n_normed))
            x = graph.add("Reshape", self._divided_by_root(parts), graph.ints(0, 0, -1))
            x = graph.add("Mul", x, self._vector(combine.norm))
        graph.output("features", self._linear(combine.matrix, None, x), 1, "n", self._spec.n_embd)
        return graph

    # ---- what comes in and goes out ----------------------------------------------------------------------------------

    def _inputs(self) -> None:
        graph, spec = self._graph, self._spec
        n_positions: int | str = "t" if self._attends_in_one else self._n_ctx
        graph.input("input_ids", np.int64, 1, "n")
        graph.input("position_ids", np.int64, 1, "n")
        graph.input("logit_rows", np.int64, "m")
        if spec.gate is not None:
            graph.input("features", np.float32, 1, "n", spec.n_embd)
        for window in windows_of(spec):
            graph.input(bias_name(window), np.float32, 1, 1, "n", n_positions)
        if spec.n_layers and not self._attends_in_one:
            graph.input("cache_slots", np.int64, "n")
        for layer in range(spec.n_layers):
            for kind in ("past_key", "past_value"):
                graph.input(f"{kind}.{layer}", np.float32, *self._cache_dims())

    def _metadata(self) -> dict[str, str]:
        spec = self._spec
        sizes = ("n_vocab", "n_layers", "n_embd", "n_heads", "n_kv_heads", "head_dim", "n_logits", "n_ctx_train")
        values: dict[str, object] = {size: getattr(spec, size) for size in sizes}
        values |= {"n_ctx": self._n_ctx, "hidden_bias": HIDDEN, "style": self._style, "architecture": spec.architecture}
        values["cache"] = "growing" if self._attends_in_one else "slots"
        values["windows"] = [window for window in windows_of(spec) if window is not None]
        return {"edgeinfer": json.dumps(values)}

    def _embedded(self) -> str:
        """Rows of the tokens, (1, n, n_embd)."""
        graph, embedding = self._graph, self._embedding
        assert embedding is not None
        weights = weights_of(part_of(embedding.model, embedding.name))
        name = embedding.name
        if isinstance(weights, Floats):
            rows = graph.add("Gather", graph.constant(name, weights.values), "input_ids")
            if weights.values.dtype == np.float16:
                rows = graph.add("Cast", rows, to=_FLOAT)
            return self._times(rows, embedding.scale)
        codes = graph.add("Gather", graph.constant(f"{name}.codes8", weights.codes(8)), "input_ids")
        centred = graph.add("Sub", graph.add("Cast", codes, to=_FLOAT), graph.number(128.0))
        rows = graph.add("Mul", centred, self._of_blocks(name, "scales", weights.scales))
        if weights.bases is not None:
            rows = graph.add("Add", rows, self._of_blocks(name, "bases", weights.bases))
        return self._times(graph.add("Reshape", rows, graph.ints(1, -1, embedding.shape[1])), embedding.scale)

    def _of_blocks(self, name: str, kind: str, values: Constant) -> str:
        """One number for each block of the tokens' rows, (1, n, n_blocks, 1)."""
        rows = self._graph.add("Gather", self._graph.constant(f"{name}.{kind}", values), "input_ids")
        return self._graph.add("Unsqueeze", rows, self._graph.ints(3))

    def _fused(self, gate: GateTensors, e: str) -> str:
        """What goes into the first block of a head; see GateTensors."""
        graph = self._graph
        a = self._linear(gate.feature, None, "features")
        b = self._silu(self._linear(gate.token, None, self._norm(gate.token_norm, e)))
        s = graph.add("Sigmoid", self._linear(gate.mix, None, graph.add("Concat", a, b, axis=2)))
        return graph.add("Add", b, graph.add("Mul", s, graph.add("Sub", a, b)))

    def _logits(self, x: str) -> str:
        """(m, n_logits)."""
        graph, spec = self._graph, self._spec
        rows = graph.add("Gather", x, "logit_rows", axis=1)
        is_cut = spec.gate is None and spec.n_draft is not None
        output: TensorRef = TensorRows(spec.output, 0, spec.n_logits) if is_cut else spec.output
        logits = self._capped(self._times(self._linear(output, None, rows), spec.logit_scale), spec.logit_soft_cap)
        return graph.add("Squeeze", logits, graph.ints(0))

    # ---- a layer -----------------------------------------------------------------------------------------------------

    def _attention(self, layer: int, x: str) -> str:
        graph, spec, names = self._graph, self._spec, self._spec.layers[layer]
        h = self._norm(names.attn_norm, x)
        q = self._heads(names.attn_q, names.attn_q_bias, names.attn_q_norm, h)
        k = self._heads(names.attn_k, names.attn_k_bias, names.attn_k_norm, h)
        v = self._linear(names.attn_v, names.attn_v_bias, h)
        if spec.query_temperature is not None:
            table = graph.constant("query_factors", Constant(_FLOAT32, (self._n_ctx, 1), self._query_factors))
            q = graph.add("Mul", q, graph.add("Gather", table, "position_ids"))
        attend = self._attend_in_one if self._attends_in_one else self._attend_plainly
        y = self._norm(names.attn_sub_norm, attend(layer, q, k, v))
        out = self._linear(names.attn_output, names.attn_output_bias, y)
        return self._norm(names.attn_post_norm, out)

    def _query_factors(self) -> NDArray[np.float32]:
        """What queries are multiplied by at each position beside the attention's scale, (n_ctx, 1)."""
        scales = QueryScales.of(self._spec, self._n_ctx).at(np.arange(self._n_ctx))
        return (scales[:, None] / np.float32(self._spec.attention_scale)).astype(np.float32)

    def _heads(self, matrix: TensorRef, bias: TensorRef | None, norm: TensorRef | None, h: str) -> str:
        """Queries or keys (1, n, heads * head_dim), with their norm."""
        graph, spec = self._graph, self._spec
        y = self._linear(matrix, bias, h)
        if norm is None or spec.qk_norm == "whole":
            return self._norm(norm, y)
        by_head = graph.add("Reshape", y, graph.ints(0, 0, -1, spec.head_dim))
        return graph.add("Reshape", self._norm(norm, by_head), graph.ints(0, 0, -1))

    def _attend_in_one(self, layer: int, q: str, k: str, v: str) -> str:
        """Attention by ONNX Runtime's own operator, which appends to the cache in place."""
        graph, spec, attention = self._graph, self._spec, self._spec.attention[layer]
        rope = attention.rope and attention.rope.of_context(self._n_ctx)
        cosine = sine = ""
        if rope is not None and rope.n_dims // 2 % _VECTOR == 0:
            cosine, sine = self._turns(rope)
        elif rope is not None:
            q, k = self._rotated(rope, q), self._rotated(rope, k)
        return graph.add(
            "GroupQueryAttention",
            *(q, k, v, f"past_key.{layer}", f"past_value.{layer}"),
            *(*self._lengths(), cosine, sine),
            *("position_ids", bias_name(attention.window)),
            domain=CONTRIB,
            outputs=[f"layer.{layer}.attended", *self._presents(layer)],
            num_heads=spec.n_heads,
            kv_num_heads=spec.n_kv_heads,
            scale=spec.attention_scale,
            softcap=spec.attention_soft_cap or 0.0,
            do_rotary=int(cosine != ""),
            rotary_interleaved=int(rope is not None and rope.kind == "interleaved"),
        )

    def _attend_plainly(self, layer: int, q: str, k: str, v: str) -> str:
        """Attention over all slots of the cache, into which keys and values are scattered."""
        graph, spec, attention = self._graph, self._spec, self._spec.attention[layer]
        rope = attention.rope and attention.rope.of_context(self._n_ctx)
        if rope is not None:
            q, k = self._rotated(rope, q), self._rotated(rope, k)
        keys, values = (
            graph.add("ScatterND", f"{past}.{layer}", self._cache_places(), self._by_head(new), outputs=[present])
            for past, new, present in zip(("past_key", "past_value"), (k, v), self._presents(layer), strict=True)
        )
        shape = (0, spec.n_kv_heads, -1, spec.head_dim)  # queries of the heads that share keys, one below the other
        queries = graph.add("Reshape", self._by_head(q), graph.ints(*shape))
        scores = graph.add("MatMul", queries, graph.add("Transpose", keys, perm=(0, 1, 3, 2)))
        by_head = graph.add("Reshape", scores, graph.ints(0, spec.n_heads, -1, self._n_ctx))
        capped = self._capped(self._times(by_head, spec.attention_scale), spec.attention_soft_cap)
        chances = graph.add("Softmax", graph.add("Add", capped, bias_name(attention.window)), axis=-1)
        grouped = graph.add("Reshape", chances, graph.ints(0, spec.n_kv_heads, -1, self._n_ctx))
        y = graph.add("MatMul", grouped, values)
        apart = graph.add("Reshape", y, graph.ints(0, spec.n_heads, -1, spec.head_dim))
        return graph.add("Reshape", graph.add("Transpose", apart, perm=(0, 2, 1, 3)), graph.ints(0, 0, -1))

    def _presents(self, layer: int) -> list[str]:
        """Outputs of a layer's cache, which are made so."""
        names = [f"present_key.{layer}", f"present_value.{layer}"]
        for name in names:
            self._graph.output(name, name, *self._cache_dims())
        return names

    def _cache_dims(self) -> Dims:
        """Of the keys or values of a layer; an operator that appends takes a cache of any capacity."""
        n_ctx: int | str = "capacity" if self._attends_in_one else self._n_ctx
        return 1, self._spec.n_kv_heads, n_ctx, self._spec.head_dim

    def _feed_forward(self, layer: int, x: str) -> str:
        graph, names = self._graph, self._spec.layers[layer]
        h = self._norm(names.ffn_norm, x)
        gate, up = self._linear(names.ffn_gate, None, h), self._linear(names.ffn_up, None, h)
        gated = self._norm(names.ffn_sub_norm, graph.add("Mul", self._activated(gate), up))
        return self._norm(names.ffn_post_norm, self._linear(names.ffn_down, None, gated))

    # ---- the parts of both -------------------------------------------------------------------------------------------

    def _linear(self, matrix: TensorRef, bias: TensorRef | None, x: str) -> str:
        """Matrix times each row of x, plus bias: (.., n_in) to (.., n_out)."""
        graph, part = self._graph, part_of(self._model, matrix)
        weights, name = weights_of(part), _name(matrix)
        if isinstance(weights, Floats):
            y = graph.add("MatMul", x, self._transposed(name, weights.values))
        elif self._style == "contrib":
            y = self._times_blocks(name, weights, x)
        else:
            y = graph.add("MatMul", x, self._unpacked(name, weights))
        if isinstance(weights, Blocks) and weights.bases is not None:
            sums = self._sums_of_blocks(x, weights.size, weights.shape[1])
            y = graph.add("Add", y, graph.add("MatMul", sums, self._transposed(f"{name}.bases", weights.bases)))
        return y if bias is None else graph.add("Add", y, self._vector(bias))

    def _times_blocks(self, name: str, weights: Blocks, x: str) -> str:
        """The product by ONNX Runtime's own operator."""
        n_out, n_in = weights.part.shape
        return self._graph.add(
            "MatMulNBits",
            *(x, self._graph.constant(f"{name}.codes{weights.bits}", weights.codes())),
            self._graph.constant(f"{name}.scales", weights.scales),
            domain=CONTRIB,
            K=n_in,
            N=n_out,
            bits=weights.bits,
            block_size=weights.size,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _unpacked(self, name: str, weights: Blocks) -> str:
        """The matrix as floats, (n_in, n_out), by operators of the standard."""
        graph = self._graph
        codes = graph.constant(f"{name}.signed{weights.bits}", weights.signed_codes())
        scales = graph.constant(f"{name}.scales", weights.scales)
        floats = graph.add("DequantizeLinear", codes, scales, axis=1, block_size=weights.size)
        return graph.add("Transpose", floats, perm=(1, 0))

    def _sums_of_blocks(self, x: str, size: int, n_blocks: int) -> str:
        """Sums of x (1, n, n_in) over each block: (1, n, n_blocks)."""

        def sums() -> str:
            by_block = self._graph.add("Reshape", x, self._graph.ints(0, 0, n_blocks, size))
            return self._graph.add("ReduceSum", by_block, self._graph.ints(3), keepdims=0)

        return self._once(f"sums {x} {size}", sums)

    def _transposed(self, name: str, values: Constant) -> str:
        """A constant matrix (n_out, n_in) as float32 (n_in, n_out), as MatMul has it."""
        return self._graph.add("Transpose", self._floats(name, values), perm=(1, 0))

    def _floats(self, name: str, values: Constant) -> str:
        """A constant as float32."""
        constant = self._graph.constant(name, values)
        return constant if values.dtype == np.float32 else self._graph.add("Cast", constant, to=_FLOAT)

    def _norm(self, weight: TensorRef | None, x: str) -> str:
        """RMS norm over the last axis, x where the model has none here. ONNX Runtime makes one operator of it."""
        return x if weight is None else self._graph.add("Mul", self._divided_by_root(x), self._vector(weight))

    def _divided_by_root(self, x: str) -> str:
        """x over the root of the mean of its squares, along the last axis."""
        graph = self._graph
        mean = graph.add("ReduceMean", graph.add("Pow", x, graph.number(2.0)), graph.ints(-1), keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", mean, graph.number(self._spec.norm_epsilon)))
        return graph.add("Div", x, root)

    def _activated(self, x: str) -> str:
        graph = self._graph
        if self._spec.activation == "silu":
            return self._silu(x)
        if self._spec.activation == "gelu_tanh":
            return graph.add("Gelu", x, approximate="tanh")
        positive = graph.add("Relu", x)
        return graph.add("Mul", positive, positive)

    def _silu(self, x: str) -> str:
        return self._graph.add("Mul", x, self._graph.add("Sigmoid", x))

    def _times(self, x: str, factor: float) -> str:
        return x if factor == 1.0 else self._graph.add("Mul", x, self._graph.number(factor))

    def _capped(self, x: str, cap: float | None) -> str:
        return x if cap is None else self._times(self._graph.add("Tanh", self._times(x, 1 / cap)), cap)

    def _vector(self, ref: TensorRef) -> str:
        """A norm or a bias."""
        return self._graph.constant(_name(ref), vector_of(part_of(self._model, ref)))

    # ---- positions ---------------------------------------------------------------------------------------------------

    def _lengths(self) -> tuple[str, str]:
        """(1,) int32 each: the last position that tokens may see, and the number of such positions."""
        graph = self._graph

        def total() -> str:
            return graph.add("Cast", graph.add("Shape", bias_name(windows_of(self._spec)[0]), start=3), to=_INT32)

        def last() -> str:
            return graph.add("Sub", self._once("total", total), graph.constant("one", np.ones(1, dtype=np.int32)))

        return self._once("last", last), self._once("total", total)

    def _turns(self, rope: RopeSpec) -> tuple[str, str]:
        """Constants (n_ctx, n_dims / 2): cosine and sine of each position's rotation."""

        def turns(function: np.ufunc) -> Constant:
            def made() -> NDArray[np.float32]:
                angles = np.arange(self._n_ctx)[:, None] * np.array(rope.inverse_frequencies)
                table: NDArray[np.float32] = (function(angles) * rope.magnitude).astype(np.float32)
                return table

            return Constant(_FLOAT32, (self._n_ctx, len(rope.inverse_frequencies)), made)

        if rope not in self._ropes:
            self._ropes.append(rope)
        name = f"rope.{self._ropes.index(rope)}"
        return self._graph.constant(f"{name}.cosine", turns(np.cos)), self._graph.constant(
            f"{name}.sine", turns(np.sin)
        )

    def _rotated(self, rope: RopeSpec, x: str) -> str:
        """Queries or keys (1, n, heads * head_dim) with their position turned in, by operators of the standard."""
        graph, head_dim, half = self._graph, self._spec.head_dim, rope.n_dims // 2
        cosine, sine = (self._by_token(table) for table in self._turns(rope))
        heads = graph.add("Reshape", x, graph.ints(0, 0, -1, head_dim))
        turned = self._slice(heads, 0, rope.n_dims)
        if rope.kind == "interleaved":
            pairs = graph.add("Reshape", turned, graph.ints(0, 0, -1, half, 2))
            first, second = (graph.add("Squeeze", self._slice(pairs, i, i + 1), graph.ints(-1)) for i in (0, 1))
        else:
            first, second = self._slice(turned, 0, half), self._slice(turned, half, rope.n_dims)
        a = graph.add("Sub", graph.add("Mul", first, cosine), graph.add("Mul", second, sine))
        b = graph.add("Add", graph.add("Mul", first, sine), graph.add("Mul", second, cosine))
        if rope.kind == "interleaved":
            a, b = (graph.add("Unsqueeze", part, graph.ints(-1)) for part in (a, b))
            turned = graph.add("Reshape", graph.add("Concat", a, b, axis=-1), graph.ints(0, 0, -1, rope.n_dims))
        else:
            turned = graph.add("Concat", a, b, axis=-1)
        if rope.n_dims < head_dim:
            turned = graph.add("Concat", turned, self._slice(heads, rope.n_dims, head_dim), axis=-1)
        return graph.add("Reshape", turned, graph.ints(0, 0, -1))

    def _by_token(self, table: str) -> str:
        """Rows of a table of positions for each token and all heads, (1, n, 1, ..)."""

        def rows() -> str:
            return self._graph.add("Unsqueeze", self._graph.add("Gather", table, "position_ids"), self._graph.ints(2))

        return self._once(f"{table} by token", rows)

    def _slice(self, x: str, first: int, last: int) -> str:
        """Elements first..last - 1 along the last axis."""
        graph = self._graph
        return graph.add("Slice", x, graph.ints(first), graph.ints(last), graph.ints(-1))

    def _by_head(self, x: str) -> str:
        """(1, n, heads * head_dim) as (1, heads, n, head_dim)."""
        graph = self._graph
        heads = graph.add("Reshape", x, graph.ints(0, 0, -1, self._spec.head_dim))
        return graph.add("Transpose", heads, perm=(0, 2, 1, 3))

    def _cache_places(self) -> str:
        """(1, n_kv_heads, n, 3) int64: where in a cache each head of each token goes."""
        return self._once("places", lambda: places(self._graph, "cache_slots", self._spec.n_kv_heads))

    def _once(self, what: str, make: Callable[[], str]) -> str:
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]


def build_move(spec: ModelSpec) -> Graph:
    """The graph that moves rows of all caches: inputs rows and slots (n,) int64, caches as those of build_decoder."""
    graph = Graph("move")
    for name in ("rows", "slots"):
        graph.input(name, np.int64, "n")
    dims = (1, spec.n_kv_heads, "capacity", spec.head_dim)
    indices = places(graph, "slots", spec.n_kv_heads)
    for layer in range(spec.n_layers):
        for kind in ("key", "value"):
            past, present = f"past_{kind}.{layer}", f"present_{kind}.{layer}"
            graph.input(past, np.float32, *dims)
            moved = graph.add("Gather", past, "rows", axis=2)
            graph.output(present, graph.add("ScatterND", past, indices, moved, outputs=[present]), *dims)
    return graph


def places(graph: Graph, slots: str, n_kv_heads: int) -> str:
    """(1, n_kv_heads, n, 3) int64: indices (0, head, slot) of a cache, of slots (n,) int64."""
    of_heads = np.zeros((1, n_kv_heads, 1, 3), dtype=np.int64)
    of_heads[0, :, 0, 1] = np.arange(n_kv_heads)
    by_token = graph.add("Unsqueeze", slots, graph.ints(0, 1, 3))
    in_last = graph.add("Mul", by_token, graph.ints(0, 0, 1))
    return graph.add("Add", in_last, graph.constant("places of heads", of_heads))


def _name(ref: TensorRef) -> str:
    """Name of a constant for a tensor or a part of one."""
    return f"{ref.name}[{ref.first}:{ref.last}]" if isinstance(ref, TensorRows) else ref
