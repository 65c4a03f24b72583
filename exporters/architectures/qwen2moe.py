"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts, and a shared one whose share is routed."""

from __future__ import annotations

from edgeinfer.exporters.architectures.qwen2 import WINDOW_KEYS
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import QKV_BIASES, ExpertNames, Keys, Recipe, shared_experts
from edgeinfer.exporters.conversion.windows import refuse_windows

# In GGUF every layer has experts, and the weights of those of a token are not made to add up to 1.
EVERY_LAYER = {"decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])}


def _keys(model: Model) -> Keys:
    return {
        "expert_feed_forward_length": model.config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": model.config.integer("shared_expert_intermediate_size"),
    }


RECIPES = (
    Recipe(
        name="qwen2moe",
        classes=("Qwen2MoeForCausalLM",),
        model_types=("qwen2_moe",),
        fixed={"hidden_act": (None, "silu"), "norm_topk_prob": (None, False), **EVERY_LAYER},
        reads=WINDOW_KEYS | {"moe_intermediate_size", "shared_expert_intermediate_size"},
        optional=QKV_BIASES,
        experts=ExpertNames(
            more={
                **shared_experts("mlp.shared_expert"),
                "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
            }
        ),
        output="required",
        check=refuse_windows,
        keys=_keys,
    ),
)
