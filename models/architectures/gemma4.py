"""Gemma 4 (Google 2026): windows with small heads, then a layer with large ones that sees everything.

Against Gemma 3: norms as they are in the file, queries that are not scaled, values with a norm, and values that are the
products of keys where the file has no matrix of values. Of the small ones the last layers read keys and values of
layers before them, and each layer has embeddings of its own. Those with experts have a dense network beside them, and a
router with an input of its own.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace

from edgeinfer.models.expert_reader import ExpertReader, ExpertRecipe
from edgeinfer.models.gemma4_layers import PERIOD, attention_by_kind, dense_network, scale_of_layer
from edgeinfer.models.reader import ROPE_FREQS, Architecture, Reader
from edgeinfer.models.spec import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    LayerEnd,
    LayerInputs,
    ModelSpec,
    TensorRows,
)

_EXPERTS = ExpertRecipe(n_ff="own", n_ff_shared="length or whole", is_normalised=True, activation="gelu_tanh")


def _layers(reader: Reader) -> tuple[Layer, ...]:
    n_layers = reader.integer("block_count", 1, 4096)
    n_embd = reader.integer("embedding_length", 1, 1 << 20)
    windowed = reader.windowed(PERIOD)
    producers = _producers(reader, windowed)
    attention = attention_by_kind(reader, n_embd)
    n_kv_heads = reader.of_layers("attention.head_count_kv", 1, 1 << 14)
    has_experts = bool(reader.file.metadata.get(f"{reader.architecture_name}.expert_count"))
    experts = ExpertReader(_EXPERTS, reader, n_embd) if has_experts else None
    n_ff = reader.of_layers("feed_forward_length", 1, 1 << 20)
    layers = []
    for index in range(n_layers):
        of = index if producers[index] is None else producers[index]
        assert of is not None
        mixer = _of_layer(reader, attention[windowed[index]], index, of, n_kv_heads[of])
        ffn = dense_network(index, n_embd, n_ff[index]) if experts is None else _experts(reader, experts, index)
        layers.append(Layer(mixer, ffn, _end(reader, index, n_embd)))
    return tuple(layers)


def _producers(reader: Reader, windowed: list[bool]) -> list[int | None]:
    """For each layer the one whose keys and values it reads, None where it has its own."""
    n_own = len(windowed) - reader.integer("attention.shared_kv_layers", 0, len(windowed) - 1, default=0)
    last = {windowed[index]: index for index in range(n_own)}
    if missing := {*windowed[n_own:]} - last.keys():
        kind = "a window" if True in missing else "no window"
        reader.refuse("attention.shared_kv_layers", f"leaves no layer with {kind} whose keys others could read")
    return [None] * n_own + [last[kind] for kind in windowed[n_own:]]


def _of_layer(reader: Reader, common: Attention, index: int, producer: int, n_kv_heads: int) -> Attention:
    """The attention of a layer. producer: the layer that makes its keys and values, perhaps itself."""
    if common.n_heads % n_kv_heads:
        reader.refuse("attention.head_count_kv", f"must divide the {common.n_heads} heads: found {n_kv_heads}")
    own, of, common = f"blk.{index}.", f"blk.{producer}.", replace(common, n_kv_heads=n_kv_heads)
    fused, of_producer = (reader.fused_attention(prefix, common.n_q, common.n_kv) for prefix in (own, of))
    k = of_producer.get("mixer.k", f"{of}attn_k.weight")
    v = of_producer.get("mixer.v", f"{of}attn_v.weight")
    return replace(
        common,
        q=fused.get("mixer.q", f"{own}attn_q.weight"),
        k=k,
        v=v if isinstance(v, TensorRows) or v in reader.file.tensors else k,
        output=f"{own}attn_output.weight",
        norm=f"{own}attn_norm.weight",
        post_norm=f"{own}post_attention_norm.weight",
        q_norm=f"{own}attn_q_norm.weight",
        k_norm=f"{of}attn_k_norm.weight",
        kv_of=None if producer == index else producer,
    )


def _experts(reader: Reader, experts: ExpertReader, index: int) -> FeedForward:
    """The dense network is the one that all tokens share."""
    prefix = f"blk.{index}."
    found: Experts = experts.of_layer(index, f"{prefix}pre_ffw_norm_2.weight")
    return replace(
        found,
        post_norm=f"{prefix}post_ffw_norm.weight",
        shared_gate=f"{prefix}ffn_gate.weight",
        shared_up=f"{prefix}ffn_up.weight",
        shared_down=f"{prefix}ffn_down.weight",
        router_norm=f"{prefix}ffn_gate_inp.scale",
        router_scale=1 / math.sqrt(found.n_embd),
        shared_norm=f"{prefix}ffn_norm.weight",
        routed_post_norm=f"{prefix}post_ffw_norm_2.weight",
        shared_post_norm=f"{prefix}post_ffw_norm_1.weight",
    )


def _end(reader: Reader, index: int, n_embd: int) -> LayerEnd | None:
    prefix, n_inputs = f"blk.{index}.", _n_inputs(reader)
    end = scale_of_layer(reader, index, n_embd)
    if not n_inputs:
        return end
    return replace(
        end or LayerEnd(n_embd),
        n_inputs=n_inputs,
        gate=f"{prefix}inp_gate.weight",
        projection=f"{prefix}proj.weight",
        post_norm=f"{prefix}post_norm.weight",
    )


def _n_inputs(reader: Reader) -> int:
    """Numbers of the embeddings that each layer has of its own, 0 without any."""
    return reader.integer("embedding_length_per_layer_input", 0, 1 << 16, default=0)


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    spec = replace(
        spec,
        embedding_scale=math.sqrt(spec.n_embd),
        logit_soft_cap=reader.scale("final_logit_softcapping", 0.0) or None,
    )
    if not (n_inputs := _n_inputs(reader)):
        return spec
    inputs = LayerInputs(
        n_embd=spec.n_embd,
        n_layers=spec.n_layers,
        n_inputs=n_inputs,
        n_vocab=spec.n_vocab,
        table="per_layer_token_embd.weight",
        projection="per_layer_model_proj.weight",
        norm="per_layer_proj_norm.weight",
        projection_scale=1 / math.sqrt(spec.n_embd),
        table_scale=math.sqrt(n_inputs),
    )
    return replace(spec, layer_inputs=inputs)


def _unused(reader: Reader) -> Set[str]:
    """Matrices of keys and values that some files have in layers that read those of others."""
    producers = _producers(reader, reader.windowed(PERIOD))
    names = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    return {f"blk.{index}.{name}" for index, of in enumerate(producers) if of is not None for name in names}


ARCHITECTURE = Architecture(
    name="gemma4",
    rope_kind="halves",
    rope_factors=ROPE_FREQS,
    fixed={"rope.scaling.type": ("none", "linear"), "rope.scaling.factor": (1.0,), "rope.scaling.attn_factor": (1.0,)},
    unsupported_keys={"attn_logit_softcapping": "Gemma 4 has no cap on its scores"},
    experts=replace(_EXPERTS, is_required=False),
    layers=_layers,
    unused=_unused,
    refine=_refine,
)
