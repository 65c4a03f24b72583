"""LFM2 with experts, 8B-A1B among them: some dense layers first, then sigmoid routers with a bias on the choice."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.exporters.architectures import lfm2
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ExpertNames, Keys

_SIGMOID = 2  # as GGUF numbers the functions of a router


def _has_experts(model: Model, layer: int) -> bool:
    return layer >= _n_dense(model)


def _n_dense(model: Model) -> int:
    return model.config.integer("num_dense_layers", least=0)


def _keys(model: Model) -> Keys:
    return {
        **lfm2.keys(model),
        "expert_feed_forward_length": model.config.integer("moe_intermediate_size"),
        "leading_dense_block_count": _n_dense(model),
        "expert_gating_func": _SIGMOID,
    }


RECIPES = (
    replace(
        lfm2.RECIPES[0],
        name="lfm2moe",
        classes=("Lfm2MoeForCausalLM",),
        model_types=("lfm2_moe",),
        defaults={
            **lfm2.DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
        },
        # What the file cannot say otherwise: every router has a bias, and weights add up to 1.
        fixed={
            **lfm2.FIXED,
            "norm_topk_prob": (None, True),
            "use_expert_bias": (None, True),
            "routed_scaling_factor": (None, 1.0),
        },
        reads=lfm2.READS | {"moe_intermediate_size", "num_dense_layers"},
        experts=ExpertNames(
            module="feed_forward.experts",
            matrices=lfm2.GATED,
            router="feed_forward.gate.weight",
            more={"feed_forward.expert_bias": "exp_probs_b.bias"},
        ),
        has_experts=_has_experts,
        keys=_keys,
    ),
)
