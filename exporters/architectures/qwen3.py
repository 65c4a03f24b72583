"""Qwen3."""

from __future__ import annotations

from edgeinfer.exporters.architectures.qwen2 import WINDOW_KEYS
from edgeinfer.exporters.conversion.recipe import ATTENTION, QK_NORMS, QKV_BIASES, Recipe
from edgeinfer.exporters.conversion.windows import refuse_windows

RECIPES = (
    Recipe(
        name="qwen3",
        classes=("Qwen3ForCausalLM", "Qwen3Model"),
        model_types=("qwen3",),
        defaults={"head_dim": 128},
        fixed={"hidden_act": (None, "silu")},
        reads=WINDOW_KEYS,
        attention={**ATTENTION, **QK_NORMS},
        optional=QKV_BIASES,
        check=refuse_windows,
    ),
)
