"""The graphs of a decoder with a KV cache, from the blocks of its spec: a signature for prompts of each length, one for
single tokens. LiteRT-LM finds their inputs and outputs by name:

    tokens (1, n) int32;  input_pos (n,) int32: their positions, one after the other
    mask (1, 1, n, n_cache) float32: 0 where a token sees a position, else very low
    kv_cache_k_L (1, n_kv_heads, n_cache, head_dim), kv_cache_v_L (1, n_kv_heads, head_dim, n_cache) float32, also
    outputs, with the n tokens in them
    logits (1, 1, n_logits), output of "decode" alone
"""

from __future__ import annotations

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.litertlm.matrices import Matrix, Rows, by_halves
from edgeinfer.exporters.litertlm.operations import Operations
from edgeinfer.exporters.litertlm.tflite import Model, Type, Value
from edgeinfer.models import Attention, Dense, ModelSpec, RopeSpec, TensorRef, attention_of, check_blocks, dense_of
from edgeinfer.models.gguf import ModelFile

DECODE = "decode"
ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3", "smollm3")  # those that are tested in the runtime
_PREFILL_LENGTHS = (32, 128, 256)
_HIDDEN = -30000.0  # added to the mask for positions before the window; exp of it is 0

# The fields of blocks that are looked at here; see check_blocks.
_BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "window"),
        *("soft_cap", "qk_norm", "norm", "post_norm", "sub_norm", "q_norm", "k_norm"),
        *("q_bias", "k_bias", "v_bias", "output_bias"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm"),
}


def check_model(model: ModelFile, spec: ModelSpec) -> None:
    """Raises UnsupportedModel for an architecture that is not tested, or has parts without operators."""
    if spec.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{model.path}: the litertlm target has no {spec.architecture}; it has {', '.join(ARCHITECTURES)}: "
            "export this model to another target (--to genai, --to onnx)"
        )
    check_blocks(spec.blocks(), _BLOCKS, "litertlm", model.path)


def prefill_lengths(n_ctx: int) -> list[int]:
    """Lengths of the signatures for prompts: those that a context has room for, at least one."""
    return [n for n in _PREFILL_LENGTHS if n <= n_ctx // 2] or [max(1, n_ctx // 2)]


def cache_positions(n_ctx: int) -> int:
    """Positions of the KV cache: the context, and what fills up the last piece of a prompt, for which the runtime takes
    the shortest signature that it fits into."""
    lengths = prefill_lengths(n_ctx)
    n_padding = max(longer - shorter for shorter, longer in zip([0, *lengths], lengths, strict=False)) - 1
    return -(-(n_ctx + n_padding) // 16) * 16


def build_model(model: ModelFile, spec: ModelSpec, n_ctx: int, fine: bool = True) -> Model:
    """The TFLite model. n_ctx: tokens of prompt and answer.  fine: see Operations. Raises UnsupportedModel."""
    check_model(model, spec)
    whole = Model(f"edgeinfer {spec.architecture}")
    matrices: dict[str, Matrix] = {}
    n_cache = cache_positions(n_ctx)
    for name, n in (*((f"prefill_{n}", n) for n in prefill_lengths(n_ctx)), (DECODE, 1)):
        operations = Operations(whole.graph(name), model, spec.norm_epsilon, matrices, fine)
        _SignatureBuilder(operations, spec, n_cache, n).build()
    return whole


class _SignatureBuilder:
    """Builds the graph of one signature, for n tokens."""

    def __init__(self, operations: Operations, spec: ModelSpec, n_cache: int, n: int) -> None:
        self._graph, self._operations = operations.graph, operations
        self._spec, self._n_cache, self._n = spec, n_cache, n
        self._masks: dict[int | None, Value] = {}
        self._turns: dict[RopeSpec, tuple[Value, Value]] = {}

    def build(self) -> None:
        graph, spec, operations = self._graph, self._spec, self._operations
        tokens = graph.input("tokens", Type.INT32, 1, self._n)
        self._positions = graph.input("input_pos", Type.INT32, self._n)
        self._masks[None] = graph.input("mask", Type.FLOAT32, 1, 1, self._n, self._n_cache)
        start = operations.slice(self._positions, 0, 1)
        # Where the new keys and values go in their caches.
        self._starts = [operations.binary("MUL", start, graph.ints(*axes)) for axes in ((0, 0, 1, 0), (0, 0, 0, 1))]
        x = self._embedded(tokens)
        for index, layer in enumerate(spec.layers):
            is_last = index == len(spec.layers) - 1
            x = self._attended(index, attention_of(layer), x, keep=not (is_last and self._is_prefill))
            if is_last and self._is_prefill:
                return  # only the caches are wanted
            added = self._dense(dense_of(layer), x)
            x = operations.binary("ADD", x, operations.times(added, spec.residual_scale))
        graph.output("logits", self._logits(x))

    @property
    def _is_prefill(self) -> bool:
        return self._graph.name != DECODE

    def _embedded(self, tokens: Value) -> Value:
        """Rows of the tokens, (n, n_embd)."""
        spec, operations = self._spec, self._operations
        assert spec.token_embd is not None  # whole models have them
        matrix = operations.matrix(spec.token_embd)
        ids = operations.reshape(tokens, self._n)
        rows = self._rows_of(matrix, ids)
        return operations.times(rows, spec.embedding_scale)

    def _rows_of(self, matrix: Matrix, ids: Value) -> Value:
        graph, operations, n = self._graph, self._operations, self._n
        n_in = matrix.weights.shape[1]
        weights = graph.constant(matrix.weights)
        if matrix.weights.type == Type.FLOAT16:
            halves = graph.add("GATHER", weights, ids, shape=(n, n_in), type=Type.FLOAT16, axis=0)
            return operations.cast(halves, Type.FLOAT32)
        rows = graph.add("EMBEDDING_LOOKUP", ids, weights, shape=(n, n_in))
        if matrix.bases is None:
            return rows
        n_runs = matrix.bases.shape[1]
        halves = graph.add("GATHER", graph.constant(matrix.bases), ids, shape=(n, n_runs), type=Type.FLOAT16, axis=0)
        bases = operations.reshape(operations.cast(halves, Type.FLOAT32), n, n_runs, 1)
        runs = operations.reshape(rows, n, n_runs, n_in // n_runs)
        return operations.reshape(operations.binary("ADD", runs, bases), n, n_in)

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _attended(self, layer: int, block: Attention, x: Value, keep: bool) -> Value:
        """x with what attention adds. keep: False where only the caches are wanted."""
        operations = self._operations
        h = operations.norm(block.norm, x)
        v = operations.linear(block.v, block.v_bias, h)
        k = self._turned(block, self._heads(block, block.k, block.k_bias, block.k_norm, h, block.n_kv_heads))
        keys, values = self._cached(layer, block, k, v)
        if not keep:
            return x
        q = self._turned(block, self._heads(block, block.q, block.q_bias, block.q_norm, h, block.n_heads))
        attended = operations.norm(block.sub_norm, self._weighted(block, q, keys, values))
        y = operations.norm(block.post_norm, operations.linear(block.output, block.output_bias, attended))
        return operations.binary("ADD", x, operations.times(y, self._spec.residual_scale))

    def _heads(
        self, block: Attention, ref: TensorRef, bias: TensorRef | None, norm: TensorRef | None, h: Value, n_heads: int
    ) -> Value:
        """Queries or keys with their norm, (1, n_heads, n, head_dim)."""
        operations = self._operations
        order = self._order(block, n_heads)
        y = operations.linear(ref, bias, h, order)
        if norm is not None and block.qk_norm == "whole":
            y = operations.norm(norm, y, order)
        by_head = operations.reshape(y, 1, self._n, n_heads, block.head_dim)
        if norm is not None and block.qk_norm == "per_head":
            by_head = operations.norm(norm, by_head, self._order(block, 1))
        return self._heads_first(by_head)

    @staticmethod
    def _order(block: Attention, n_heads: int) -> Rows | None:
        if block.rope is None or block.rope.kind == "halves":
            return None
        return by_halves(n_heads * block.head_dim, block.head_dim, block.rope.n_dims)

    def _heads_first(self, x: Value) -> Value:
        """(1, n, heads, head_dim) as (1, heads, n, head_dim)."""
        _, n, n_heads, head_dim = x.shape
        if n == 1:
            return self._operations.reshape(x, 1, n_heads, 1, head_dim)
        return self._operations.transpose(x, 0, 2, 1, 3)

    def _cached(self, layer: int, block: Attention, k: Value, v: Value) -> tuple[Value, Value]:
        """The caches with the new keys and values."""
        operations, n_cache, n_heads, head_dim = self._operations, self._n_cache, block.n_kv_heads, block.head_dim
        by_head = operations.reshape(v, 1, self._n, n_heads, head_dim)
        v = (
            operations.reshape(v, 1, n_heads, head_dim, 1)
            if self._n == 1
            else operations.transpose(by_head, 0, 2, 3, 1)
        )
        shapes = (1, n_heads, n_cache, head_dim), (1, n_heads, head_dim, n_cache)
        found = []
        for kind, new, shape, start in zip("kv", (k, v), shapes, self._starts, strict=True):
            name = f"kv_cache_{kind}_{layer}"
            past = self._graph.input(name, Type.FLOAT32, *shape)
            found.append(self._graph.add("DYNAMIC_UPDATE_SLICE", past, new, start, shape=shape))
            self._graph.output(name, found[-1])
        return found[0], found[1]

    def _weighted(self, block: Attention, q: Value, keys: Value, values: Value) -> Value:
        """What the heads see, (n, n_heads * head_dim)."""
        operations, n, n_kv = self._operations, self._n, block.n_kv_heads
        n_shared = block.n_heads // n_kv  # heads that share keys, one below the other
        queries = operations.reshape(operations.times(q, block.scale), 1, n_kv, n_shared * n, block.head_dim)
        scores = self._product_by_head(queries, keys, self._n_cache)
        capped = operations.capped(scores, block.soft_cap)
        mask = self._mask(block.window)
        if n_shared > 1:
            mask = operations.concatenated(*[mask] * n_shared, axis=2) if n > 1 else mask
        weights = operations.unary("SOFTMAX", operations.binary("ADD", capped, mask), beta=1.0)
        seen = self._product_by_head(weights, values, block.head_dim)
        if n > 1:
            by_head = operations.reshape(seen, 1, block.n_heads, n, block.head_dim)
            seen = operations.transpose(by_head, 0, 2, 1, 3)
        return operations.reshape(seen, n, block.n_q)

    def _product_by_head(self, a: Value, b: Value, n_out: int) -> Value:
        """a (1, heads, n, k) times b (1, heads, n_out, k)."""
        shape = (*a.shape[:3], n_out)
        return self._graph.add("BATCH_MATMUL", a, b, shape=shape, adjX=False, adjY=True)

    def _mask(self, window: int | None) -> Value:
        """The mask of layers with such a window."""
        if window not in self._masks:
            graph, operations = self._graph, self._operations
            assert window is not None
            positions = operations.reshape(operations.cast(self._positions, Type.FLOAT32), 1, 1, self._n, 1)
            slots = graph.array("slots", np.arange(self._n_cache, dtype=np.float32).reshape(1, 1, 1, -1))
            back = operations.binary("SUB", positions, slots)
            limit = graph.number(float(window))
            is_before = graph.add("GREATER_EQUAL", back, limit, shape=back.shape, type=Type.BOOL)
            hidden = operations.times(operations.cast(is_before, Type.FLOAT32), _HIDDEN)
            self._masks[window] = operations.binary("ADD", self._masks[None], hidden)
        return self._masks[window]

    # ---- positions ---------------------------------------------------------------------------------------------------

    def _turned(self, block: Attention, x: Value) -> Value:
        """Queries or keys (1, heads, n, head_dim) with their position turned in."""
        if block.rope is None:
            return x
        operations, rope = self._operations, block.rope.of_context(self._n_cache)
        n_dims = rope.n_dims
        cosine, sine = self._tables(rope)
        turned = operations.slice(x, 0, n_dims) if n_dims < block.head_dim else x
        halves = operations.slice(turned, n_dims // 2, n_dims), operations.slice(turned, 0, n_dims // 2)
        y = operations.binary(
            "ADD",
            operations.binary("MUL", turned, cosine),
            operations.binary("MUL", operations.concatenated(*halves, axis=3), sine),
        )
        if n_dims < block.head_dim:
            y = operations.concatenated(y, operations.slice(x, n_dims, block.head_dim), axis=3)
        return y

    def _tables(self, rope: RopeSpec) -> tuple[Value, Value]:
        """Cosines and sines of the tokens' rotations, (1, 1, n, n_dims), those of the first half with minus."""
        if rope not in self._turns:
            angles = np.arange(self._n_cache)[:, None] * np.array(rope.inverse_frequencies)
            cosine, sine = (function(angles) * rope.magnitude for function in (np.cos, np.sin))
            name = f"rope {hash(rope) & 0xFFFFFFFFFFFF:x}"
            self._turns[rope] = (
                self._by_token(f"{name} cosine", np.hstack([cosine, cosine])),
                self._by_token(f"{name} sine", np.hstack([-sine, sine])),
            )
        return self._turns[rope]

    def _by_token(self, name: str, table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Value:
        """Rows of a table of positions."""
        values = self._graph.array(name, table.astype(np.float32))
        shape = (self._n, table.shape[1])
        rows = self._graph.add("GATHER", values, self._positions, shape=shape, axis=0)
        return self._operations.reshape(rows, 1, 1, *shape)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def _dense(self, block: Dense, x: Value) -> Value:
        """What a feed-forward network adds."""
        operations = self._operations
        h = operations.norm(block.norm, x)
        gate, up = operations.linear(block.gate, None, h), operations.linear(block.up, None, h)
        product = operations.binary("MUL", operations.activated(block.activation, gate), up)
        down = operations.linear(block.down, None, operations.norm(block.sub_norm, product))
        return operations.norm(block.post_norm, down)

    def _logits(self, x: Value) -> Value:
        """(1, 1, n_logits)."""
        spec, operations = self._spec, self._operations
        assert spec.output is not None
        rows = operations.linear(spec.output, None, operations.norm(spec.output_norm, x))
        logits = operations.capped(operations.times(rows, spec.logit_scale), spec.logit_soft_cap)
        return operations.reshape(logits, 1, 1, spec.n_logits)
