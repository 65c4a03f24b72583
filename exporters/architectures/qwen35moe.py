"""Qwen3.5 and 3.6 with experts, 35B-A3B among them: qwen35 with a shared network whose share is routed."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.exporters.architectures import qwen35
from edgeinfer.exporters.architectures.qwen2moe import EVERY_LAYER
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ExpertNames, Keys, shared_experts

EXPERTS = ExpertNames(
    more={**shared_experts("mlp.shared_expert"), "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight"}
)
# In GGUF every layer has experts, and the weights of those of a token add up to 1.
FIXED = {**qwen35.FIXED, **EVERY_LAYER, "norm_topk_prob": (None, True)}
READS = qwen35.READS | {"moe_intermediate_size", "shared_expert_intermediate_size"}
DEFAULTS = {
    **qwen35.DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def keys(model: Model) -> Keys:
    """Those of qwen3next too."""
    return {
        **qwen35.keys(model),
        "expert_feed_forward_length": model.config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": model.config.integer("shared_expert_intermediate_size"),
    }


def _keys(model: Model) -> Keys:
    return {"rope.dimension_sections": qwen35.SECTIONS, **keys(model)}


RECIPES = (
    replace(
        qwen35.RECIPES[0],
        name="qwen35moe",
        classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeTextModel"),
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        defaults={**DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
        fixed=FIXED,
        reads=READS,
        experts=EXPERTS,
        keys=_keys,
    ),
)
