"""LFM2 and LFM2.5: gated convolutions over three tokens in most layers, attention in the others."""

from __future__ import annotations

from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.kinds import check_kinds
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Keys, Recipe
from edgeinfer.exporters.source import SourceTensor

ATTENTION = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
}
CONVOLUTION = {
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
}
NORMS = {"operator_norm.weight": "attn_norm.weight", "ffn_norm.weight": "ffn_norm.weight"}
GATED = {"w1": "gate", "w3": "up", "w2": "down"}
DENSE = {f"feed_forward.{theirs}.weight": f"ffn_{ours}.weight" for theirs, ours in GATED.items()}
FINAL_NORM = ("model.embedding_norm.weight", "token_embd_norm.weight")
SPELLINGS = {"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
DEFAULTS = {
    "intermediate_size": 12288,
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
FIXED = {"hidden_act": (None, "silu"), "conv_bias": (None, False)}
READS = frozenset(
    {"conv_L_cache", "full_attn_idxs"}
    # what the first files have and transformers does not look at
    | {"block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "theta"}
    | {"block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"}
    # of the part for images
    | {"do_image_splitting", "downsample_factor", "encoder_patch_size", "max_image_tokens", "max_num_patches"}
    | {"max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "projector_bias", "tile_size"}
    | {"projector_use_layernorm", "use_image_special_tokens", "use_thumbnail"}
)


def check(model: Model) -> None:
    """Raises UnsupportedModel where config.json says other kinds of layers than the tensors are of."""
    key = "full_attn_idxs"
    attends = set(model.config.integers(key)) if key in model.config else None
    by_index = None if attends is None else [layer not in attends for layer in range(model.n_layers)]
    check_kinds(model, "conv", by_index, key)


def keys(model: Model) -> Keys:
    """Those of the convolutions: layers without heads of keys have one."""
    return {
        "attention.head_count_kv": [
            0 if model.is_recurrent(layer) else model.n_kv_heads for layer in range(model.n_layers)
        ],
        "shortconv.l_cache": model.config.integer("conv_L_cache"),
    }


def convolution(model: Model, tensor: SourceTensor) -> SourceTensor:
    """The weights of a convolution as a matrix; others as they are."""
    return rows.without_axis(tensor, 1) if tensor.name.endswith("shortconv.conv.weight") else tensor


def _keys(model: Model) -> Keys:
    """With the width of the networks as the tensors have it: what config.json says is adjusted in several ways."""
    width = model.checkpoint.shape(f"{model.blocks[0]}feed_forward.w1.weight")[0]
    return {**keys(model), "feed_forward_length": width}


RECIPES = (
    Recipe(
        name="lfm2",
        classes=("Lfm2ForCausalLM", "LFM2ForCausalLM"),
        model_types=("lfm2",),
        defaults=DEFAULTS,
        spellings=SPELLINGS,
        fixed=FIXED,
        reads=READS | {"block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"},
        attention=ATTENTION,
        recurrent=CONVOLUTION,
        norms=NORMS,
        dense=DENSE,
        final_norm=FINAL_NORM,
        changed=convolution,
        check=check,
        keys=_keys,
        pre="lfm2",
    ),
)
