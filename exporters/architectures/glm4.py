"""GLM-4 of 2025: norms before and after attention and network, fused gate and up, a part of each head rotated."""

from __future__ import annotations

from edgeinfer.exporters.conversion.recipe import QKV_BIASES, Recipe

RECIPES = (
    Recipe(
        name="glm4",
        classes=("Glm4ForCausalLM",),
        model_types=("glm4",),
        defaults={"rms_norm_eps": 1.5625e-07, "head_dim": 128, "partial_rotary_factor": 0.5},
        fixed={"hidden_act": (None, "silu")},
        norms={
            "input_layernorm.weight": "attn_norm.weight",
            "post_self_attn_layernorm.weight": "post_attention_norm.weight",
            "post_attention_layernorm.weight": "ffn_norm.weight",
            "post_mlp_layernorm.weight": "post_ffw_norm.weight",
        },
        dense={"mlp.gate_up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight"},
        optional=QKV_BIASES,
        part_rotated=True,
    ),
)
