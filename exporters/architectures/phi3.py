"""Phi-3 to Phi-4: Llama with fused matrices and two sets of frequencies (LongRoPE)."""

from __future__ import annotations

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Keys, Recipe
from edgeinfer.exporters.conversion.rope import original_context


def _keys(model: Model) -> Keys:
    window = model.config.integer("sliding_window", 0, least=0)
    if 0 < window < model.n_ctx:
        model.note(f"sliding_window {window} is written but not applied when the model runs, as in llama.cpp")
    return {
        "attention.sliding_window": window,
        "rope.scaling.original_context_length": original_context(model),
    }


RECIPES = (
    Recipe(
        name="phi3",
        classes=("Phi3ForCausalLM",),
        model_types=("phi3",),
        defaults={"rms_norm_eps": 1e-5},
        fixed={"hidden_act": (None, "silu"), "full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
        reads=frozenset({"sliding_window"}),
        attention={"self_attn.qkv_proj.weight": "attn_qkv.weight", "self_attn.o_proj.weight": "attn_output.weight"},
        dense={"mlp.gate_up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight"},
        rope_kinds=frozenset({"longrope"}),
        part_rotated=True,
        keys=_keys,
    ),
)
