"""The graph of a decoder or of a draft head with a KV cache, from the blocks of its spec.

Inputs, for n tokens after those that are in the cache, with t positions that they may see (n_ctx in a plain graph):

    input_ids (1, n) int64, position_ids (1, n) int64
    attention_bias (1, 1, n, t) float32: 0 where a token sees a position, HIDDEN where not; attention_bias.W in layers
    with a window of W positions
    logit_rows (m,) int64: of the n tokens, those whose logits are requested
    features (1, n, n_embd) float32: of a head
    cache_slots (n,) int64: of a plain graph, where in the cache the tokens go; else they go after the others, and
    t is the number of positions with them
    past_key.L, past_value.L (1, n_kv_heads, n_ctx, head_dim) float32

Outputs: logits (m, n_logits); hidden_states (1, n, n_embd), what the output matrix reads; present_key.L and
present_value.L, which may be the same memory as the inputs; on demand layer_output.L (1, n, n_embd).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.backends.onnx.attention import AttentionBuilder, bias_name, cache_places, windows_of
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.backends.onnx.library import Style
from edgeinfer.backends.onnx.matrices import Constant, Floats, part_of, weights_of
from edgeinfer.backends.onnx.operations import FLOAT, Operations
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import Attention, Dense, ModelSpec, attention_of, check_blocks, dense_of
from edgeinfer.models.draft_head import FeatureProjection, GatedFusion, HeadSpec, title_of
from edgeinfer.models.gguf import ModelFile

HIDDEN = -30000.0  # an additive mask that half floats have too; exp of it is 0

# The fields of blocks that are looked at here and in attention.py; see check_blocks.
BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "window"),
        *("soft_cap", "query_temperature", "qk_norm", "norm", "post_norm", "sub_norm", "q_norm", "k_norm"),
        *("q_bias", "k_bias", "v_bias", "output_bias"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm"),
}
OF_HEADS: dict[type, tuple[str, ...]] = {
    GatedFusion: ("n_embd", "feature", "token_norm", "token", "mix"),
    FeatureProjection: ("n_embd", "n_rows", "n_normed", "matrix", "norm"),
}


@dataclass(frozen=True)
class Embedding:
    """Where the rows of tokens are: in the model's own file, or a head's target's."""

    model: ModelFile
    name: str
    shape: tuple[int, int]
    scale: float


def build_model(model: ModelFile, spec: ModelSpec, n_ctx: int, style: Style, taps: bool = False) -> Graph:
    """The graph of a whole model, for positions below n_ctx. taps: with the outputs of all layers.

    Raises UnsupportedModel for a block or a tensor type without a rule.
    """
    check_spec(spec, model.path)
    assert spec.token_embd is not None  # whole models have them
    embedding = Embedding(model, spec.token_embd, (spec.n_vocab, spec.n_embd), spec.embedding_scale)
    return _DecoderBuilder(model, spec, embedding, n_ctx, style).build(taps=taps)


def build_head(
    head: ModelFile, spec: HeadSpec, target: ModelFile, target_spec: ModelSpec, n_ctx: int, style: Style
) -> Graph:
    """The graph of a head, with a copy of its target's embeddings; see build_model.

    Raises UnsupportedModel for a head with another front than GatedFusion.
    """
    front, decoder = spec.front, spec.decoder
    if not isinstance(front, GatedFusion):
        raise UnsupportedModel(f"{head.path}: {title_of(spec)} have no ONNX graph: run them on the native engine (-md)")
    check_blocks([("front", front)], OF_HEADS, "onnx", head.path)
    check_spec(decoder, head.path)
    assert target_spec.token_embd is not None
    if decoder.token_embd is not None or decoder.output is None or decoder.output_norm is not None:
        raise UnsupportedModel(
            f"{head.path}: on ONNX Runtime a draft head has its target's embeddings, an output matrix and no norm "
            "before it: run others on the native engine (-md)"
        )
    shape = target_spec.n_vocab, target_spec.n_embd
    embedding = Embedding(target, target_spec.token_embd, shape, decoder.embedding_scale)
    return _DecoderBuilder(head, decoder, embedding, n_ctx, style).build(front)


def build_projection(head: ModelFile, spec: HeadSpec, features: FeatureProjection, style: Style) -> Graph:
    """The graph of a FeatureProjection: rows (1, n, n_rows) in, features (1, n, n_embd) out.

    Raises UnsupportedModel.
    """
    check_blocks([("features", features)], OF_HEADS, "onnx", head.path)
    graph = Graph(spec.decoder.architecture)
    operations = Operations(graph, head, style, spec.decoder.norm_epsilon)
    x = graph.input("rows", np.float32, 1, "n", features.n_rows)
    if features.norm is not None:
        parts = graph.add("Reshape", x, graph.ints(0, 0, -1, features.n_normed))
        x = graph.add("Reshape", operations.divided_by_root(parts), graph.ints(0, 0, -1))
        x = graph.add("Mul", x, operations.vector(features.norm))
    graph.output("features", operations.linear(features.matrix, None, x), 1, "n", features.n_embd)
    return graph


def build_move(spec: ModelSpec) -> Graph:
    """The graph that moves rows of all caches: inputs rows and slots (n,) int64, caches as those of build_model."""
    graph = Graph("move")
    for name in ("rows", "slots"):
        graph.input(name, np.int64, "n")
    places: dict[int, str] = {}  # by the number of heads
    for layer, block in enumerate(attention_of(each) for each in spec.layers):
        dims = (1, block.n_kv_heads, "capacity", block.head_dim)
        if block.n_kv_heads not in places:
            places[block.n_kv_heads] = cache_places(graph, "slots", block.n_kv_heads)
        for kind in ("key", "value"):
            past, present = f"past_{kind}.{layer}", f"present_{kind}.{layer}"
            graph.input(past, np.float32, *dims)
            moved = graph.add("Gather", past, "rows", axis=2)
            scattered = graph.add("ScatterND", past, places[block.n_kv_heads], moved, outputs=[present])
            graph.output(present, scattered, *dims)
    return graph


def check_spec(spec: ModelSpec, path: object) -> None:
    """Raises UnsupportedModel for blocks, or fields of blocks, that have no rule."""
    check_blocks(spec.blocks(), BLOCKS, "onnx", path)
    for index, layer in enumerate(spec.layers):
        if attention_of(layer).n_in != spec.n_embd:
            raise UnsupportedModel(
                f"{path}: layers.{index}.mixer attends from rows of {attention_of(layer).n_in} numbers, other than the "
                f"model's {spec.n_embd}, which the onnx backend cannot run: use another backend"
            )


class _DecoderBuilder:
    """Builds the graph of the blocks of a model or a head, after these embeddings."""

    def __init__(self, model: ModelFile, spec: ModelSpec, embedding: Embedding, n_ctx: int, style: Style) -> None:
        self._spec, self._embedding, self._n_ctx, self._style = spec, embedding, n_ctx, style
        self._graph = Graph(spec.architecture)
        self._operations = Operations(self._graph, model, style, spec.norm_epsilon)
        self._attention = AttentionBuilder(self._operations, spec, n_ctx)

    def build(self, front: GatedFusion | None = None, taps: bool = False) -> Graph:
        graph, spec, operations = self._graph, self._spec, self._operations
        self._inputs(front)
        x = self._embedded()
        if front is not None:
            x = self._fused(front, x)
        for index, layer in enumerate(spec.layers):
            graph.within(f"layer.{index}.")
            added = self._attention.add(index, attention_of(layer), x)
            x = graph.add("Add", x, operations.times(added, spec.residual_scale))
            x = graph.add("Add", x, operations.times(self._dense(dense_of(layer), x), spec.residual_scale))
            if taps:
                graph.output(f"layer_output.{index}", x, 1, "n", spec.n_embd)
        graph.within("")
        x = operations.norm(spec.output_norm, x)
        graph.output("hidden_states", x, 1, "n", spec.n_embd)
        graph.output("logits", self._logits(x), "m", spec.n_logits)
        graph.metadata |= self._metadata()
        return graph

    def _inputs(self, front: GatedFusion | None) -> None:
        graph, spec, attention = self._graph, self._spec, self._attention
        n_positions: int | str = "t" if attention.in_one else self._n_ctx
        graph.input("input_ids", np.int64, 1, "n")
        graph.input("position_ids", np.int64, 1, "n")
        graph.input("logit_rows", np.int64, "m")
        if front is not None:
            graph.input("features", np.float32, 1, "n", spec.n_embd)
        for window in windows_of(spec):
            graph.input(bias_name(window), np.float32, 1, 1, "n", n_positions)
        if spec.layers and not attention.in_one:
            graph.input("cache_slots", np.int64, "n")
        for index, layer in enumerate(spec.layers):
            for kind in ("past_key", "past_value"):
                graph.input(f"{kind}.{index}", np.float32, *attention.cache_dims(attention_of(layer)))

    def _metadata(self) -> dict[str, str]:
        """What a user of the file must know. Sizes of attention are lists, one a layer, where layers differ."""
        spec = self._spec
        values: dict[str, object] = {
            size: getattr(spec, size) for size in ("n_vocab", "n_layers", "n_embd", "n_logits", "n_ctx_train")
        }
        for size in ("n_heads", "n_kv_heads", "head_dim"):
            values[size] = _one_or_all([getattr(attention_of(layer), size) for layer in spec.layers])
        values |= {"n_ctx": self._n_ctx, "hidden_bias": HIDDEN, "style": self._style, "architecture": spec.architecture}
        values["cache"] = "growing" if self._attention.in_one else "slots"
        values["windows"] = [window for window in windows_of(spec) if window is not None]
        return {"edgeinfer": json.dumps(values)}

    def _embedded(self) -> str:
        """Rows of the tokens, (1, n, n_embd)."""
        graph, embedding, times = self._graph, self._embedding, self._operations.times
        weights = weights_of(part_of(embedding.model, embedding.name))
        name = embedding.name
        if isinstance(weights, Floats):
            rows = graph.add("Gather", graph.constant(name, weights.values), "input_ids")
            if weights.values.dtype == np.float16:
                rows = graph.add("Cast", rows, to=FLOAT)
            return times(rows, embedding.scale)
        codes = graph.add("Gather", graph.constant(f"{name}.codes8", weights.codes(8)), "input_ids")
        centred = graph.add("Sub", graph.add("Cast", codes, to=FLOAT), graph.number(128.0))
        rows = graph.add("Mul", centred, self._of_blocks(name, "scales", weights.scales))
        if weights.bases is not None:
            rows = graph.add("Add", rows, self._of_blocks(name, "bases", weights.bases))
        return times(graph.add("Reshape", rows, graph.ints(1, -1, embedding.shape[1])), embedding.scale)

    def _of_blocks(self, name: str, kind: str, values: Constant) -> str:
        """One number for each block of the tokens' rows, (1, n, n_blocks, 1)."""
        rows = self._graph.add("Gather", self._graph.constant(f"{name}.{kind}", values), "input_ids")
        return self._graph.add("Unsqueeze", rows, self._graph.ints(3))

    def _fused(self, front: GatedFusion, e: str) -> str:
        """What goes into the first layer of a head; see GatedFusion."""
        graph, operations = self._graph, self._operations
        a = operations.linear(front.feature, None, "features")
        b = operations.silu(operations.linear(front.token, None, operations.norm(front.token_norm, e)))
        s = graph.add("Sigmoid", operations.linear(front.mix, None, graph.add("Concat", a, b, axis=2)))
        return graph.add("Add", b, graph.add("Mul", s, graph.add("Sub", a, b)))

    def _dense(self, block: Dense, x: str) -> str:
        """What a feed-forward network adds."""
        operations = self._operations
        h = operations.norm(block.norm, x)
        gate, up = operations.linear(block.gate, None, h), operations.linear(block.up, None, h)
        product = self._graph.add("Mul", operations.activated(block.activation, gate), up)
        down = operations.linear(block.down, None, operations.norm(block.sub_norm, product))
        return operations.norm(block.post_norm, down)

    def _logits(self, x: str) -> str:
        """(m, n_logits)."""
        graph, spec, operations = self._graph, self._spec, self._operations
        assert spec.output is not None  # checked for heads; whole models have one
        rows = operations.linear(spec.output, None, graph.add("Gather", x, "logit_rows", axis=1))
        logits = operations.capped(operations.times(rows, spec.logit_scale), spec.logit_soft_cap)
        return graph.add("Squeeze", logits, graph.ints(0))


def _one_or_all(sizes: Sequence[int]) -> int | list[int]:
    """The number that all are, or all of them."""
    return sizes[0] if len(set(sizes)) == 1 else list(sizes)
