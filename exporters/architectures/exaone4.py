"""EXAONE 4.0: norms after attention and network, and on each query and key; windows in three of four layers of 32B."""

from __future__ import annotations

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, NORMS_AFTER, QK_NORMS, Keys, Recipe
from edgeinfer.exporters.conversion.windows import has_window


def _keys(model: Model) -> Keys:
    window = model.config.integer("sliding_window", 0, least=0)
    windowed = has_window(model) or _pattern(model)
    if not window or not any(windowed):
        return {}
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed}


def _pattern(model: Model) -> list[bool]:
    """What sliding_window_pattern says: letters, L for a window, or a period."""
    found = model.config.get("sliding_window_pattern")
    layers = range(model.n_layers)
    if isinstance(found, str) and found:
        return [found[layer % len(found)] == "L" for layer in layers]
    if isinstance(found, int) and found > 0:
        return [(layer + 1) % found != 0 for layer in layers]
    return [False for _ in layers]


RECIPES = (
    Recipe(
        name="exaone4",
        classes=("Exaone4ForCausalLM",),
        model_types=("exaone4",),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        fixed={"hidden_act": (None, "silu")},
        reads=frozenset({"sliding_window", "sliding_window_pattern"}),
        attention={**ATTENTION, **QK_NORMS},
        norms=NORMS_AFTER,
        rope_kinds=frozenset({"llama3"}),
        keys=_keys,
    ),
)
