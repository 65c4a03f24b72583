"""Qwen3 with experts, 30B-A3B and Qwen3-Coder among them.

The weights of the experts of a token add up to 1 in every GGUF file of this architecture. norm_topk_prob false, which
is what transformers takes where the key is missing, would give other answers.
"""

from __future__ import annotations

from edgeinfer.exporters.architectures.qwen2 import WINDOW_KEYS
from edgeinfer.exporters.architectures.qwen2moe import EVERY_LAYER
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, QK_NORMS, QKV_BIASES, ExpertNames, Keys, Recipe
from edgeinfer.exporters.conversion.windows import refuse_windows


def _check(model: Model) -> None:
    refuse_windows(model)
    if not model.config.flag("norm_topk_prob", False):
        found = "false" if "norm_topk_prob" in model.config else "none, which means false"
        model.refuse(
            "norm_topk_prob",
            f"must be true: found {found}. A qwen3moe file cannot say that the weights of experts do not add up to 1, "
            f"and would give other answers",
        )


def _keys(model: Model) -> Keys:
    return {"expert_feed_forward_length": model.config.integer("moe_intermediate_size")}


RECIPES = (
    Recipe(
        name="qwen3moe",
        classes=("Qwen3MoeForCausalLM",),
        model_types=("qwen3_moe",),
        fixed={"hidden_act": (None, "silu"), **EVERY_LAYER},
        reads=WINDOW_KEYS | {"moe_intermediate_size", "norm_topk_prob"},
        attention={**ATTENTION, **QK_NORMS},
        optional=QKV_BIASES,
        experts=ExpertNames(),
        check=_check,
        keys=_keys,
    ),
)
