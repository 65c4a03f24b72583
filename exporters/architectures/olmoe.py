"""OLMoE: norms on whole queries and keys, weights of experts that need not add up to 1."""

from __future__ import annotations

from edgeinfer.exporters.conversion.recipe import ATTENTION, QK_NORMS, ExpertNames, Recipe

RECIPES = (
    Recipe(
        name="olmoe",
        classes=("OlmoeForCausalLM",),
        model_types=("olmoe",),
        defaults={"rms_norm_eps": 1e-5},
        fixed={"hidden_act": (None, "silu"), "norm_topk_prob": (None, False), "clip_qkv": (None,)},
        attention={**ATTENTION, **QK_NORMS},
        experts=ExpertNames(),
        output="required",
    ),
)
