"""Qwen3.5 and 3.6 (Qwen team 2026): three layers with a gated delta net, then one of attention with output gates.

Text only: its positions for images (`rope.dimension_sections`) are equal for text, so that the rotation is the common
one of a part of each head. The blocks after the model's own (`nextn_predict_layers`), which draft, are no layers.
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.models.arrays import Array
from edgeinfer.models.reader import QK_NORMS, Architecture, Reader, each_attention
from edgeinfer.models.spec import Attention, GatedDeltaNet, KeyHeadOrder, Mixer, ModelSpec

_INTERVAL = 4  # every fourth layer has attention where the file does not say it


def gated_delta_net(reader: Reader, layer: int) -> Mixer | None:
    """The recurrence of a layer, None where it has attention. Value heads take turns with the key heads."""
    if not _is_recurrent(reader, layer):
        return None
    prefix = f"blk.{layer}.ssm_"
    return replace(_common(reader, layer, "modulo"), beta=f"{prefix}beta.weight", alpha=f"{prefix}alpha.weight")


def grouped_delta_net(reader: Reader, layer: int) -> Mixer | None:
    """The same where the value heads of a key head are neighbours, and b and a come from one matrix."""
    if not _is_recurrent(reader, layer):
        return None
    return replace(_common(reader, layer, "divided"), beta_alpha=f"blk.{layer}.ssm_ba.weight")


def gated_attention(reader: Reader, spec: ModelSpec) -> ModelSpec:
    """The spec with output gates, which come with the queries, and the scale that the file may have."""
    _check_sections(reader)

    def gated(mixer: Attention) -> Attention:
        return replace(mixer, output_gate="in_q", scale=reader.scale("attention.scale", mixer.scale))

    return each_attention(spec, gated)


def _common(reader: Reader, layer: int, key_heads: KeyHeadOrder) -> GatedDeltaNet:
    n_key_heads = reader.integer("ssm.group_count", 1, 1 << 12)
    n_value_heads = reader.integer("ssm.time_step_rank", 1, 1 << 12)
    if n_value_heads % n_key_heads:
        reason = f"must be a multiple of the {n_key_heads} heads of keys: found {n_value_heads}"
        reader.refuse("ssm.time_step_rank", reason)
    head_dim = reader.integer("ssm.state_size", 1, 1 << 10)
    n_inner = reader.integer("ssm.inner_size", 1, 1 << 20)
    if n_inner != n_value_heads * head_dim:
        reason = f"must be {n_value_heads} heads of {head_dim}, {n_value_heads * head_dim}: found {n_inner}"
        reader.refuse("ssm.inner_size", reason)
    prefix = f"blk.{layer}."
    return GatedDeltaNet(
        n_embd=reader.integer("embedding_length", 1, 1 << 20),
        n_conv=reader.integer("ssm.conv_kernel", 2, 16),
        conv=f"{prefix}ssm_conv1d.weight",
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        head_dim=head_dim,
        key_heads=key_heads,
        qkv=f"{prefix}attn_qkv.weight",
        gate=f"{prefix}attn_gate.weight",
        decay=f"{prefix}ssm_a",
        step_bias=f"{prefix}ssm_dt.bias",
        out_norm=f"{prefix}ssm_norm.weight",
        output=f"{prefix}ssm_out.weight",
        norm=f"{prefix}attn_norm.weight",
    )


def _is_recurrent(reader: Reader, layer: int) -> bool:
    """As the file says for each layer, or all but every nth."""
    key = "attention.recurrent_layers"
    n_layers = reader.integer("block_count", 1, 4096)  # with those that draft
    flags = reader.file.metadata.get(f"{reader.architecture_name}.{key}")
    if flags is None:
        return (layer + 1) % reader.integer("full_attention_interval", 1, 4096, default=_INTERVAL) != 0
    if not isinstance(flags, (Array, list)) or len(flags) != n_layers or not all(flag in (0, 1) for flag in flags):
        reader.refuse(key, f"must be {n_layers} times true or false: found {flags!r:.80}")
    return bool(flags[layer])


def _check_sections(reader: Reader) -> None:
    """The sections change nothing for text, where all positions of a token are the same number."""
    key = "rope.dimension_sections"
    sections = reader.file.metadata.get(f"{reader.architecture_name}.{key}", [1, 0, 0, 0])
    found = list(sections) if isinstance(sections, (Array, list)) else []
    if len(found) != 4 or not all(isinstance(each, int) and each >= 0 for each in found) or not any(found):
        reader.refuse(key, f"must be 4 numbers of pairs, not all 0: found {sections!r:.80}")


ARCHITECTURE = Architecture(
    name="qwen35",
    rope_kind="halves",
    required=QK_NORMS,
    optional=frozenset(),
    renamed={"ffn.norm": "post_attention_norm.weight"},
    fused=False,  # attn_qkv is of the recurrence
    qk_norm="per_head",
    skips_nextn=True,
    has_nextn=True,
    recurrence=gated_delta_net,
    refine=gated_attention,
)
