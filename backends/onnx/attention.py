"""Attention with a KV cache as operators of a graph, from the `Attention` of each layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.onnx.graph import CONTRIB, Dims, Graph
from edgeinfer.backends.onnx.matrices import Constant
from edgeinfer.backends.onnx.operations import INT32, Operations
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.models import Attention, ModelSpec, RopeSpec, TensorRef, attention_of

_FLOAT32 = np.dtype(np.float32)
_VECTOR = 8  # GroupQueryAttention needs heads, and half of what it rotates, in multiples of this


def bias_name(window: int | None) -> str:
    """Name of the input with the mask of layers with such a window."""
    return "attention_bias" if window is None else f"attention_bias.{window}"


def windows_of(spec: ModelSpec) -> list[int | None]:
    """The windows of all layers, each once."""
    return list(dict.fromkeys(attention_of(layer).window for layer in spec.layers))


class AttentionBuilder:
    """Adds the attention of the layers of a model to a graph.

    in_one: whether that is ONNX Runtime's own operator, which appends to a cache; else keys and values are scattered
    into the slots of one of n_ctx positions.
    """

    def __init__(self, operations: Operations, spec: ModelSpec, n_ctx: int) -> None:
        self._operations = operations
        self._graph = operations.graph
        self._n_ctx = n_ctx
        self._ropes: list[RopeSpec] = []
        self._first_window = next(iter(windows_of(spec)), None)
        self._factors: list[object] = []  # of queries, where they grow with the position
        in_vectors = all(attention_of(layer).head_dim % _VECTOR == 0 for layer in spec.layers)
        self.in_one = operations.style == "contrib" and in_vectors

    def add(self, layer: int, block: Attention, x: str) -> str:
        """What attention adds to x (1, n, n_embd). layer: its number, for the names of the cache."""
        operations = self._operations
        h = operations.norm(block.norm, x)
        q = self._heads(block, block.q, block.q_bias, block.q_norm, h)
        k = self._heads(block, block.k, block.k_bias, block.k_norm, h)
        v = operations.linear(block.v, block.v_bias, h)
        if block.query_temperature is not None:
            q = self._graph.add("Mul", q, self._graph.add("Gather", self._query_factors(block), "position_ids"))
        attend = self._attend_in_one if self.in_one else self._attend_plainly
        y = operations.norm(block.sub_norm, attend(layer, block, q, k, v))
        return operations.norm(block.post_norm, operations.linear(block.output, block.output_bias, y))

    def cache_dims(self, block: Attention) -> Dims:
        """Of the keys or values of a layer; an operator that appends takes a cache of any capacity."""
        n_ctx: int | str = "capacity" if self.in_one else self._n_ctx
        return 1, block.n_kv_heads, n_ctx, block.head_dim

    def _query_factors(self, block: Attention) -> str:
        """What queries are multiplied by at each position beside the attention's scale, a constant (n_ctx, 1)."""
        key = block.scale, block.query_temperature
        if key not in self._factors:
            self._factors.append(key)

        def factors() -> NDArray[np.float32]:
            scales = QueryScales.of(block, self._n_ctx).at(np.arange(self._n_ctx))
            table: NDArray[np.float32] = (scales[:, None] / np.float32(block.scale)).astype(np.float32)
            return table

        name = f"query_factors.{self._factors.index(key)}"
        return self._graph.constant(name, Constant(_FLOAT32, (self._n_ctx, 1), factors))

    def _heads(
        self, block: Attention, matrix: TensorRef, bias: TensorRef | None, norm: TensorRef | None, h: str
    ) -> str:
        """Queries or keys (1, n, heads * head_dim), with their norm."""
        graph, operations = self._graph, self._operations
        y = operations.linear(matrix, bias, h)
        if norm is None or block.qk_norm == "whole":
            return operations.norm(norm, y)
        by_head = graph.add("Reshape", y, graph.ints(0, 0, -1, block.head_dim))
        return graph.add("Reshape", operations.norm(norm, by_head), graph.ints(0, 0, -1))

    def _attend_in_one(self, layer: int, block: Attention, q: str, k: str, v: str) -> str:
        """Attention by ONNX Runtime's own operator, which appends to the cache in place."""
        rope = block.rope and block.rope.of_context(self._n_ctx)
        cosine = sine = ""
        if rope is not None and rope.n_dims // 2 % _VECTOR == 0:
            cosine, sine = self._turns(rope)
        elif rope is not None:
            q, k = (self._rotated(rope, block.head_dim, x) for x in (q, k))
        return self._graph.add(
            "GroupQueryAttention",
            *(q, k, v, f"past_key.{layer}", f"past_value.{layer}"),
            *(*self._lengths(), cosine, sine),
            *("position_ids", bias_name(block.window)),
            domain=CONTRIB,
            outputs=[f"layer.{layer}.attended", *self._presents(layer, block)],
            num_heads=block.n_heads,
            kv_num_heads=block.n_kv_heads,
            scale=block.scale,
            softcap=block.soft_cap or 0.0,
            do_rotary=int(cosine != ""),
            rotary_interleaved=int(rope is not None and rope.kind == "interleaved"),
        )

    def _attend_plainly(self, layer: int, block: Attention, q: str, k: str, v: str) -> str:
        """Attention over all slots of the cache, into which keys and values are scattered."""
        graph, operations, n_ctx = self._graph, self._operations, self._n_ctx
        rope = block.rope and block.rope.of_context(n_ctx)
        if rope is not None:
            q, k = (self._rotated(rope, block.head_dim, x) for x in (q, k))
        places = operations.once(
            f"places {block.n_kv_heads}", lambda: cache_places(graph, "cache_slots", block.n_kv_heads)
        )
        keys, values = (
            graph.add("ScatterND", f"{past}.{layer}", places, self._by_head(block, new), outputs=[present])
            for past, new, present in zip(("past_key", "past_value"), (k, v), self._presents(layer, block), strict=True)
        )
        shape = (0, block.n_kv_heads, -1, block.head_dim)  # queries of the heads that share keys, one below the other
        queries = graph.add("Reshape", self._by_head(block, q), graph.ints(*shape))
        scores = graph.add("MatMul", queries, graph.add("Transpose", keys, perm=(0, 1, 3, 2)))
        by_head = graph.add("Reshape", scores, graph.ints(0, block.n_heads, -1, n_ctx))
        capped = operations.capped(operations.times(by_head, block.scale), block.soft_cap)
        weights = graph.add("Softmax", graph.add("Add", capped, bias_name(block.window)), axis=-1)
        grouped = graph.add("Reshape", weights, graph.ints(0, block.n_kv_heads, -1, n_ctx))
        y = graph.add("MatMul", grouped, values)
        apart = graph.add("Reshape", y, graph.ints(0, block.n_heads, -1, block.head_dim))
        return graph.add("Reshape", graph.add("Transpose", apart, perm=(0, 2, 1, 3)), graph.ints(0, 0, -1))

    def _presents(self, layer: int, block: Attention) -> list[str]:
        """Outputs of a layer's cache, which are made so."""
        names = [f"present_key.{layer}", f"present_value.{layer}"]
        for name in names:
            self._graph.output(name, name, *self.cache_dims(block))
        return names

    # ---- positions ---------------------------------------------------------------------------------------------------

    def _lengths(self) -> tuple[str, str]:
        """(1,) int32 each: the last position that tokens may see, and the number of such positions."""
        graph, once = self._graph, self._operations.once

        def total() -> str:
            return graph.add("Cast", graph.add("Shape", bias_name(self._first_window), start=3), to=INT32)

        def last() -> str:
            return graph.add("Sub", once("total", total), graph.constant("one", np.ones(1, dtype=np.int32)))

        return once("last", last), once("total", total)

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
        cosine, sine = (turns(function) for function in (np.cos, np.sin))
        return self._graph.constant(f"{name}.cosine", cosine), self._graph.constant(f"{name}.sine", sine)

    def _rotated(self, rope: RopeSpec, head_dim: int, x: str) -> str:
        """Queries or keys (1, n, heads * head_dim) with their position turned in, by operators of the standard."""
        graph, slice, half = self._graph, self._operations.slice, rope.n_dims // 2
        cosine, sine = (self._by_token(table) for table in self._turns(rope))
        heads = graph.add("Reshape", x, graph.ints(0, 0, -1, head_dim))
        turned = slice(heads, 0, rope.n_dims)
        if rope.kind == "interleaved":
            pairs = graph.add("Reshape", turned, graph.ints(0, 0, -1, half, 2))
            first, second = (graph.add("Squeeze", slice(pairs, i, i + 1), graph.ints(-1)) for i in (0, 1))
        else:
            first, second = slice(turned, 0, half), slice(turned, half, rope.n_dims)
        a = graph.add("Sub", graph.add("Mul", first, cosine), graph.add("Mul", second, sine))
        b = graph.add("Add", graph.add("Mul", first, sine), graph.add("Mul", second, cosine))
        if rope.kind == "interleaved":
            a, b = (graph.add("Unsqueeze", part, graph.ints(-1)) for part in (a, b))
            turned = graph.add("Reshape", graph.add("Concat", a, b, axis=-1), graph.ints(0, 0, -1, rope.n_dims))
        else:
            turned = graph.add("Concat", a, b, axis=-1)
        if rope.n_dims < head_dim:
            turned = graph.add("Concat", turned, slice(heads, rope.n_dims, head_dim), axis=-1)
        return graph.add("Reshape", turned, graph.ints(0, 0, -1))

    def _by_token(self, table: str) -> str:
        """Rows of a table of positions for each token and all heads, (1, n, 1, ..)."""

        def rows() -> str:
            return self._graph.add("Unsqueeze", self._graph.add("Gather", table, "position_ids"), self._graph.ints(2))

        return self._operations.once(f"{table} by token", rows)

    def _by_head(self, block: Attention, x: str) -> str:
        """(1, n, heads * head_dim) as (1, heads, n, head_dim)."""
        heads = self._graph.add("Reshape", x, self._graph.ints(0, 0, -1, block.head_dim))
        return self._graph.add("Transpose", heads, perm=(0, 2, 1, 3))


def cache_places(graph: Graph, slots: str, n_kv_heads: int) -> str:
    """(1, n_kv_heads, n, 3) int64: indices (0, head, slot) of a cache, of slots (n,) int64."""
    of_heads = np.zeros((1, n_kv_heads, 1, 3), dtype=np.int64)
    of_heads[0, :, 0, 1] = np.arange(n_kv_heads)
    by_token = graph.add("Unsqueeze", slots, graph.ints(0, 1, 3))
    in_last = graph.add("Mul", by_token, graph.ints(0, 0, 1))
    return graph.add("Add", in_last, graph.constant(f"places of {n_kv_heads} heads", of_heads))
