"""The graph of a decoder as ONNX Runtime GenAI feeds it.

GenAI gives input_ids and position_ids (1, n), attention_mask (1, t) and the caches, and takes logits (1, m, n_vocab).
From these the adapter makes the other inputs of edgeinfer.backends.onnx.decoder: t is the number of positions that the
mask is for, and logit_rows are all rows, or the last one.
"""

from __future__ import annotations

import numpy as np

from edgeinfer.backends.onnx import build_model
from edgeinfer.backends.onnx.attention import bias_name, windows_of
from edgeinfer.backends.onnx.decoder import HIDDEN, check_spec
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ModelSpec, attention_of
from edgeinfer.models.gguf import ModelFile

_FED = ("input_ids", "position_ids")


def genai_graph(file: ModelFile, spec: ModelSpec, n_ctx: int, all_rows: bool) -> Graph:
    """The graph of a whole model, for positions below n_ctx.

    all_rows: logits of all tokens of a pass, which drafts need; else those of the last.
    Raises UnsupportedModel for what has no rule here or in GenAI, which has caches of one shape for all layers.
    """
    check_spec(spec, file.path)
    _check_caches(file, spec)
    decoder = build_model(file, spec, n_ctx, "contrib")
    graph = Graph(decoder.name, constants=decoder.constants, metadata=decoder.metadata)
    caches = [value for value in decoder.inputs if value.name.startswith("past_")]
    graph.inputs = [value for value in decoder.inputs if value.name in _FED]
    graph.input("attention_mask", np.int64, 1, "t")
    graph.inputs += caches
    graph.within("adapter.")
    _add_biases(graph, spec)
    _add_logit_rows(graph, all_rows)
    for node in decoder.nodes:
        if "hidden_states" not in node.outputs:
            graph.nodes.append(node)
    _add_outputs(graph, decoder, spec, "n" if all_rows else 1)
    return graph


def _check_caches(file: ModelFile, spec: ModelSpec) -> None:
    """Raises UnsupportedModel."""
    shapes = {(attention_of(layer).n_kv_heads, attention_of(layer).head_dim) for layer in spec.layers}
    if len(shapes) > 1:
        raise UnsupportedModel(
            f"{file.path}: ONNX Runtime GenAI has caches of one shape for all layers, and this model has "
            f"{len(shapes)}, {sorted(shapes)} (heads, numbers a head): export it with --to onnx or --to gguf"
        )
    head_dim = next(iter(shapes))[1]
    if head_dim % 8:
        raise UnsupportedModel(
            f"{file.path}: heads have {head_dim} numbers, and ONNX Runtime's attention needs a multiple of 8: export "
            "it with --to onnx --operators plain or --to gguf"
        )


def _add_biases(graph: Graph, spec: ModelSpec) -> None:
    """The inputs attention_bias of the decoder, from positions and the length of the mask."""
    n_seen = graph.add("Squeeze", graph.add("Shape", "attention_mask", start=1), graph.ints(0))
    slots = graph.add("Range", _scalar(graph, 0), n_seen, _scalar(graph, 1))
    own = graph.add("Unsqueeze", "position_ids", graph.ints(1, 3))  # (1, 1, n, 1)
    visible = graph.add("LessOrEqual", slots, own)
    for window in windows_of(spec):
        near = visible
        if window is not None:
            is_near = graph.add("Less", graph.add("Sub", own, slots), graph.ints(window))
            near = graph.add("And", visible, is_near)
        graph.add("Where", near, graph.number(0.0), graph.number(HIDDEN), outputs=[bias_name(window)])


def _add_logit_rows(graph: Graph, all_rows: bool) -> None:
    n = graph.add("Shape", "input_ids", start=1)
    if all_rows:
        count = graph.add("Squeeze", n, graph.ints(0))
        graph.add("Range", _scalar(graph, 0), count, _scalar(graph, 1), outputs=["logit_rows"])
    else:
        graph.add("Sub", n, graph.ints(1), outputs=["logit_rows"])


def _add_outputs(graph: Graph, decoder: Graph, spec: ModelSpec, n_rows: int | str) -> None:
    """Outputs of the decoder but for hidden_states, the logits with an axis of sequences in front."""
    made = graph.nodes.pop()  # the last node names the rows of logits
    assert made.outputs == ("logits",) and made.op == "Identity"
    graph.output("logits", graph.add("Unsqueeze", made.inputs[0], graph.ints(0)), 1, n_rows, spec.n_logits)
    graph.outputs += [value for value in decoder.outputs if value.name.startswith("present_")]


def _scalar(graph: Graph, value: int) -> str:
    return graph.constant(f"scalar {value}", np.array(value, dtype=np.int64))
