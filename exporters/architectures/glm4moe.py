"""GLM-4.5 and 4.6: a sigmoid for each expert, a bias on the choice, a shared network, dense layers first.

The last layers of a checkpoint draft tokens (multi-token prediction). edgeinfer does not draft with them, so they are
left out.
"""

from __future__ import annotations

import re

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import QK_NORMS, QKV_BIASES, ExpertNames, Keys, Recipe, shared_experts

_SIGMOID = 2  # as GGUF numbers the functions of a router


def _has_experts(model: Model, layer: int) -> bool:
    return layer >= _n_dense(model)


def _n_dense(model: Model) -> int:
    return model.config.integer("first_k_dense_replace", least=0)


def _check(model: Model) -> None:
    """Leave out the layers after the model's own, as many as config.json says."""
    n_more = model.config.integer("num_nextn_predict_layers", 0, least=0)
    after = re.compile(r"model\.layers\.(\d+)\..*")
    found = {name: int(match[1]) for name in model.checkpoint.names if (match := after.fullmatch(name))}
    left = {name for name, layer in found.items() if model.n_layers <= layer < model.n_layers + n_more}
    if left:
        model.note(f"the layers that predict tokens further ahead (MTP) are left out: {len(left)} tensors")
    model.taken |= left


def _keys(model: Model) -> Keys:
    config = model.config
    return {
        "expert_group_count": config.integer("n_group"),
        "expert_group_used_count": config.integer("topk_group"),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts", least=0),
        "leading_dense_block_count": _n_dense(model),
        "nextn_predict_layers": 0,
        "expert_gating_func": _SIGMOID,
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "expert_weights_norm": config.flag("norm_topk_prob"),
    }


RECIPES = (
    Recipe(
        name="glm4moe",
        classes=("Glm4MoeForCausalLM",),
        model_types=("glm4_moe",),
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        fixed={"hidden_act": (None, "silu"), "scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")},
        reads=frozenset(
            {"n_group", "topk_group", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace"}
            | {"routed_scaling_factor", "norm_topk_prob", "num_nextn_predict_layers"}
        ),
        norms={
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
        },
        optional={**QKV_BIASES, **QK_NORMS},
        experts=ExpertNames(
            count=("n_routed_experts", "num_experts", "num_local_experts"),
            more={
                "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
                **shared_experts("mlp.shared_experts"),
            },
        ),
        has_experts=_has_experts,
        part_rotated=True,
        check=_check,
        keys=_keys,
    ),
)
