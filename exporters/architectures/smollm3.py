"""SmolLM3: Llama without rotation in every fourth layer, which no key of GGUF says."""

from __future__ import annotations

from edgeinfer.exporters.architectures.qwen2 import WINDOW_KEYS
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Recipe
from edgeinfer.exporters.conversion.windows import refuse_windows

_PERIOD = 4


def _check(model: Model) -> None:
    refuse_windows(model)
    expected = [int(layer % _PERIOD != _PERIOD - 1) for layer in range(model.n_layers)]
    if "no_rope_layers" in model.config and model.config.integers("no_rope_layers", model.n_layers) != expected:
        model.refuse("no_rope_layers", f"must be 0 in every fourth layer and 1 in others, {expected}")
    if model.config.integer("no_rope_layer_interval", _PERIOD) != _PERIOD and "no_rope_layers" not in model.config:
        model.refuse("no_rope_layer_interval", f"must be {_PERIOD}")


RECIPES = (
    Recipe(
        name="smollm3",
        classes=("SmolLM3ForCausalLM",),
        model_types=("smollm3",),
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
        fixed={"hidden_act": (None, "silu")},
        reads=WINDOW_KEYS | {"no_rope_layers", "no_rope_layer_interval"},
        interleaved=True,
        check=_check,
    ),
)
