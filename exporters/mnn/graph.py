"""The graph of a decoder for MNN's converter: operators of ONNX, and two of MNN's own that get their weights later.

Inputs, for n tokens behind those in the cache, which MNN keeps itself, with t positions in all:

    input_ids (n, 1, n_embd) float32: the embeddings, which MNN looks up
    attention_mask (1, 1, n, t) float32: 0 where a token sees a position, else very small; (2, 1, 1, n, t) of a model
    with a window, the second for its layers
    position_ids (1, n) int32
    logits_index (1,) int32: -1 for the logits of the last token, 0 for those of all

Output: logits (1, m, n_vocab).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgeinfer.backends.onnx.attention import AttentionBuilder
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.backends.onnx.operations import Operations
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.overriding import override
from edgeinfer.models import Attention, Dense, ModelSpec, TensorRef, attention_of, check_blocks, dense_of
from edgeinfer.models.gguf import ModelFile

MNN_OPS = "LlmExporter"
LINEAR, ATTENTION = "FakeLinear", "FusedAttention"
BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "window"),
        *("qk_norm", "norm", "post_norm", "sub_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "output_bias"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm"),
}


@dataclass(frozen=True)
class Linear:
    """A product that the graph names: y = matrix x + bias."""

    matrix: TensorRef
    bias: TensorRef | None


@dataclass(frozen=True)
class MnnGraph:
    """A graph, and its products by the names that they have there."""

    graph: Graph
    linears: dict[str, Linear]


class _Linears(Operations):
    """Operations whose products are left to MNN."""

    def __init__(self, graph: Graph, model: ModelFile, norm_epsilon: float) -> None:
        super().__init__(graph, model, "plain", norm_epsilon)
        self.linears: dict[str, Linear] = {}

    @override
    def linear(self, matrix: TensorRef, bias: TensorRef | None, x: str) -> str:
        name = f"linear.{len(self.linears)}"
        self.linears[name] = Linear(matrix, bias)
        n_out, n_in = _shape(self.model, matrix)
        return self.graph.add(
            LINEAR, x, domain=MNN_OPS, in_features=n_in, out_features=n_out, has_bias=int(bias is not None), label=name
        )


class _Attention(AttentionBuilder):
    """Attention by MNN's own operator, which keeps the cache and scales by the root of a head's size."""

    has_windows = False

    def _attend_plainly(self, layer: int, block: Attention, q: str, k: str, v: str) -> str:
        graph = self._graph
        rope = block.rope and block.rope.of_context(self._n_ctx)
        if rope is not None:
            q, k = (self._rotated(rope, block.head_dim, x) for x in (q, k))
        q = self._operations.times(q, block.scale * math.sqrt(block.head_dim))
        heads = [graph.add("Reshape", x, graph.ints(0, 0, -1, block.head_dim)) for x in (q, k, v)]
        return graph.add(
            ATTENTION,
            *heads,
            self._mask(block.window),
            domain=MNN_OPS,
            kv_cache=1,
            output_dim=block.n_heads * block.head_dim,
            label=f"attention.{layer}",
        )

    def _mask(self, window: int | None) -> str:
        if not self.has_windows:
            return "attention_mask"
        which = self._graph.constant(f"mask {int(window is not None)}", np.array(int(window is not None), np.int32))
        return self._operations.once(which, lambda: self._graph.add("Gather", "attention_mask", which, axis=0))


def mnn_graph(file: ModelFile, spec: ModelSpec, n_ctx: int) -> MnnGraph:
    """The graph of a whole model, for positions below n_ctx. Raises UnsupportedModel."""
    check_blocks(spec.blocks(), BLOCKS, "mnn", file.path)
    graph = Graph(spec.architecture)
    operations = _Linears(graph, file, spec.norm_epsilon)
    attention = _Attention(operations, spec, n_ctx)
    attention.has_windows = window_of(file, spec) is not None
    graph.input("input_ids", np.float32, "n", 1, spec.n_embd)
    graph.input("attention_mask", np.float32, *((2,) if attention.has_windows else ()), 1, 1, "n", "t")
    graph.input("position_ids", np.int32, 1, "n")
    graph.input("logits_index", np.int32, 1)
    x = operations.times(graph.add("Reshape", "input_ids", graph.ints(1, -1, spec.n_embd)), spec.embedding_scale)
    for index, layer in enumerate(spec.layers):
        graph.within(f"layer.{index}.")
        added = attention.add(index, attention_of(layer), x)
        x = graph.add("Add", x, operations.times(added, spec.residual_scale))
        x = graph.add("Add", x, operations.times(_dense(operations, dense_of(layer), x), spec.residual_scale))
    graph.within("")
    assert spec.output is not None
    end, axis = (graph.constant(f"int32 {n}", np.array([n], np.int32)) for n in (1 << 30, 1))
    x = graph.add("Slice", x, "logits_index", end, axis)
    rows = operations.linear(spec.output, None, operations.norm(spec.output_norm, x))
    logits = operations.capped(operations.times(rows, spec.logit_scale), spec.logit_soft_cap)
    graph.output("logits", logits, 1, "m", spec.n_logits)
    return MnnGraph(graph, operations.linears)


def window_of(file: ModelFile, spec: ModelSpec) -> int | None:
    """The window of layers that have one. Raises UnsupportedModel for several: MNN knows one for all."""
    windows = {window for layer in spec.layers if (window := attention_of(layer).window) is not None}
    if len(windows) > 1:
        raise UnsupportedModel(f"{file.path}: MNN has one window for all layers: found {sorted(windows)}")
    return next(iter(windows), None)


def _dense(operations: Operations, block: Dense, x: str) -> str:
    """What a feed-forward network adds."""
    h = operations.norm(block.norm, x)
    gate, up = operations.linear(block.gate, None, h), operations.linear(block.up, None, h)
    product = operations.graph.add("Mul", operations.activated(block.activation, gate), up)
    down = operations.linear(block.down, None, operations.norm(block.sub_norm, product))
    return operations.norm(block.post_norm, down)


def _shape(file: ModelFile, ref: TensorRef) -> tuple[int, int]:
    if isinstance(ref, str):
        n_out, n_in = file.tensors[ref].shape
        return n_out, n_in
    return ref.last - ref.first, file.tensors[ref.name].shape[1]
