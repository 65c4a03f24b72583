"""Latent attention with experts: DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437), GLM-4.7-Flash (Z.ai 2026).

Files of before 2025-04, which have the matrices of keys and values of all heads as one, are refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.rope import yarn_magnitude
from edgeinfer.models.spec import Experts, LatentAttention, Mixer, ModelSpec

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# GLM-4.7-Flash, whose first files do not say what their routers make of the products: layers and tokens.
_LAYERS_OF_GLM, _VOCABULARY_OF_GLM = (47, 48), 154_880


def _latent_attention(reader: Reader, layer: int) -> Mixer:
    n_embd = reader.integer("embedding_length", 1, 1 << 20)
    n_heads = reader.integer("attention.head_count", 1, 1 << 14)
    n_latent = reader.integer("attention.kv_lora_rank", 1, 1 << 14)
    n_turned = reader.integer("rope.dimension_count", 2, 1 << 14)
    n_plain = reader.integer("attention.key_length_mla", n_turned + 1, 1 << 14) - n_turned
    n_value = reader.integer("attention.value_length_mla", 1, 1 << 14)
    for key, n in (("key_length", n_latent + n_turned), ("value_length", n_latent), ("head_count_kv", 1)):
        if reader.integer(f"attention.{key}", 1, 1 << 14, default=n) != n:
            reader.refuse(f"attention.{key}", f"must be {n}, one row for all heads: convert the model again")
    prefix = f"blk.{layer}.attn_"
    _check_heads(reader, f"{prefix}k_b.weight", (n_heads, n_latent, n_plain))
    _check_heads(reader, f"{prefix}v_b.weight", (n_heads, n_value, n_latent))
    block = LatentAttention(
        n_embd=n_embd,
        n_heads=n_heads,
        n_plain=n_plain,
        n_turned=n_turned,
        n_latent=n_latent,
        n_value=n_value,
        scale=_growth(reader) ** 2 / math.sqrt(n_plain + n_turned),
        rope=replace(reader.rope(n_turned, reader.rope_base()), magnitude=1.0),
        kv=f"{prefix}kv_a_mqa.weight",
        kv_norm=f"{prefix}kv_a_norm.weight",
        k_b=f"{prefix}k_b.weight",
        v_b=f"{prefix}v_b.weight",
        output=f"{prefix}output.weight",
        norm=f"{prefix}norm.weight",
    )
    if f"{prefix}q_a.weight" not in reader.file.tensors:
        return replace(block, q=f"{prefix}q.weight")
    return replace(
        block,
        n_q_latent=reader.integer("attention.q_lora_rank", 1, 1 << 14),
        q_a=f"{prefix}q_a.weight",
        q_norm=f"{prefix}q_a_norm.weight",
        q_b=f"{prefix}q_b.weight",
    )


def _check_heads(reader: Reader, name: str, shape: tuple[int, int, int]) -> None:
    """The rows of a head's matrix are counted by three axes, where the file has them."""
    info = reader.file.tensors.get(name)
    if info is not None and len(info.shape) == 3 and info.shape != shape:
        reader.refuse_tensor(name, f"must have shape {shape}: found {info.shape}")


def _growth(reader: Reader) -> float:
    """What YaRN multiplies queries and keys by; nothing is left to the rotation (DeepSeek's mscale_all_dim).

    The file's number is a tenth of that.
    """
    if reader.file.metadata.get("deepseek2.rope.scaling.type") != "yarn":
        return 1.0
    factor = reader.number("rope.scaling.factor", 0.0, 1e6, default=1.0)
    share = reader.number(_LOG_MULTIPLIER, 0.0, 10.0) / 0.1
    return 1 + share * (yarn_magnitude(factor) - 1)


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    """With the routers of files that do not say what they are."""
    says_it = bool(reader.file.metadata.get("deepseek2.expert_gating_func"))
    n_layers = reader.integer("block_count", 1, 4096) - reader.integer("nextn_predict_layers", 0, 4095, default=0)
    if says_it or n_layers not in _LAYERS_OF_GLM or spec.n_vocab != _VOCABULARY_OF_GLM:
        return spec
    layers = (
        replace(layer, ffn=replace(layer.ffn, router_function="sigmoid")) if isinstance(layer.ffn, Experts) else layer
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


ARCHITECTURE = Architecture(
    name="deepseek2",
    rope_kind="interleaved",
    optional=frozenset(),
    without=frozenset({"mixer.norm", "mixer.q", "mixer.k", "mixer.v", "mixer.output"}),
    mixer=_latent_attention,
    experts=ExpertRecipe(
        n_ff="own",
        n_ff_shared="count",
        optional=frozenset({"selection_bias"}),
        reads=frozenset(
            {"leading_dense_block_count", "expert_gating_func", "expert_weights_norm", "expert_weights_scale"}
        ),
    ),
    skips_nextn=True,
    has_nextn=True,
    fixed={"rope.scaling.attn_factor": (1.0,)},
    reads=frozenset({_LOG_MULTIPLIER}),
    unsupported_keys={"attention.temperature_scale": "queries that are scaled by position are not supported here"},
    refine=_refine,
)
