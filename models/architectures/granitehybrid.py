"""Granite 4 with Mamba2 in most layers, with and without experts (IBM 2025): attention where heads have keys."""

from __future__ import annotations

from edgeinfer.models.architectures import granite
from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import BIASES, Architecture, Reader
from edgeinfer.models.spec import Mamba2, Mixer


def mamba2(reader: Reader, layer: int) -> Mixer | None:
    """The recurrence of a layer whose heads have no keys, None where they do."""
    n_heads = reader.integer("attention.head_count", 1, 1 << 14)
    if reader.of_layers("attention.head_count_kv", 0, n_heads, default=n_heads)[layer]:
        return None
    return mamba2_of(reader, layer)


def mamba2_of(reader: Reader, layer: int, has_norm: bool = True) -> Mamba2:
    """The recurrence of a layer. has_norm: whether there is one before the last product."""
    n_heads = reader.integer("ssm.time_step_rank", 1, 1 << 12)
    n_inner = reader.integer("ssm.inner_size", 1, 1 << 20)
    if n_inner % n_heads:
        reader.refuse("ssm.inner_size", f"must be a multiple of the {n_heads} heads: found {n_inner}")
    n_groups = reader.integer("ssm.group_count", 1, 1 << 12)
    if n_heads % n_groups:
        reader.refuse("ssm.group_count", f"must divide the {n_heads} heads: found {n_groups}")
    prefix = f"blk.{layer}."
    bias = f"{prefix}ssm_conv1d.bias"
    return Mamba2(
        n_embd=reader.integer("embedding_length", 1, 1 << 20),
        n_conv=reader.integer("ssm.conv_kernel", 2, 16),
        conv=f"{prefix}ssm_conv1d.weight",
        n_heads=n_heads,
        head_dim=n_inner // n_heads,
        n_groups=n_groups,
        n_per_key=reader.integer("ssm.state_size", 1, 1 << 12),
        input=f"{prefix}ssm_in.weight",
        decay=f"{prefix}ssm_a",
        skip=f"{prefix}ssm_d",
        step_bias=f"{prefix}ssm_dt.bias",
        output=f"{prefix}ssm_out.weight",
        norm=f"{prefix}attn_norm.weight",
        conv_bias=bias if bias in reader.file.tensors else None,
        out_norm=f"{prefix}ssm_norm.weight" if has_norm else None,
    )


ARCHITECTURE = Architecture(
    name="granitehybrid",
    rope_kind="interleaved",
    optional=BIASES,
    experts=ExpertRecipe(is_required=False, n_ff_shared="length or none", is_normalised=True),
    recurrence=mamba2,
    refine=granite.with_factors,
)
