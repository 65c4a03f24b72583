"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from edgeinfer.exporters.conversion.recipe import ATTENTION, QKV_BIASES, Recipe
from edgeinfer.exporters.conversion.windows import refuse_windows

WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})

RECIPES = (
    Recipe(
        name="qwen2",
        classes=("Qwen2ForCausalLM", "Qwen2Model"),
        model_types=("qwen2",),
        fixed={"hidden_act": (None, "silu")},
        reads=WINDOW_KEYS,
        attention={**ATTENTION, **QKV_BIASES},
        rope_kinds=frozenset({"llama3"}),
        check=refuse_windows,
    ),
)
