"""Mistral Small 3.1 and Ministral 3: Llama, with queries that may grow with the position. Images are left out."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import BIASES, Keys, Recipe
from edgeinfer.exporters.conversion.windows import context_within_window

_ROPE = {
    **{"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    **{"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1},
}


def _keys(model: Model) -> Keys:
    found = model.rope.values
    keys: Keys = {"context_length": context_within_window(model)}
    if "mscale_all_dim" in found:
        if found.number("mscale", 1.0) != 1:
            found.refuse("mscale", "must be 1")
        keys["rope.scaling.yarn_log_multiplier"] = found.number("mscale_all_dim")
    if found.get("llama_4_scaling_beta"):
        keys["attention.temperature_scale"] = found.number("llama_4_scaling_beta")
    return keys


MINISTRAL3 = Recipe(
    name="mistral3",
    classes=("Ministral3ForCausalLM", "Ministral3Model"),
    model_types=("ministral3", "mistral3/ministral3"),
    defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "head_dim": 128, "rope_parameters": _ROPE},
    fixed={"hidden_act": (None, "silu")},
    reads=frozenset({"sliding_window", "mscale_all_dim", "llama_4_scaling_beta"}),
    optional=BIASES,
    interleaved=True,
    rope_kinds=frozenset({"llama3"}),
    keys=_keys,
)
MISTRAL3 = replace(
    MINISTRAL3, classes=(), model_types=("mistral3", "mistral3/mistral"), defaults={"sliding_window": 4096}
)
RECIPES = (MINISTRAL3, MISTRAL3)
