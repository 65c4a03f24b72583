"""OLMo 2 and 3: norms after attention and network, and on whole queries and keys. OLMo 3 has windows."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.exporters.checkpoint import Rope
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, NORMS_AFTER, QK_NORMS, QKV_BIASES, Keys, Recipe
from edgeinfer.exporters.conversion.windows import has_window

_PERIOD = 4


def _check(model: Model) -> None:
    local = _local_rope(model)
    if local is not None:
        if local.kind != "default" or local.theta != model.rope.theta:
            model.refuse(
                "rope_parameters",
                f"must be default with rope_theta {model.rope.theta:g} for sliding_attention: found {local.kind} with "
                f"{local.theta:g}",
            )


def _local_rope(model: Model) -> Rope | None:
    """The rotation in layers with a window. None in files of transformers 4: the other's, but not scaled."""
    nested = model.config.part("rope_parameters")
    if nested is None or nested.part("sliding_attention") is None:
        return None
    return model.config.rope("sliding_attention")


def _keys(model: Model) -> Keys:
    usual = [(layer + 1) % _PERIOD != 0 for layer in range(model.n_layers)]
    local = _local_rope(model)
    return {
        **({} if local is None else {"rope.freq_base_swa": local.theta}),
        "attention.sliding_window": model.config.integer("sliding_window"),
        "attention.sliding_window_pattern": has_window(model) or usual,
    }


OLMO2 = Recipe(
    name="olmo2",
    classes=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    defaults={"rms_norm_eps": 1e-5},
    fixed={"hidden_act": (None, "silu")},
    attention={**ATTENTION, **QK_NORMS},
    norms=NORMS_AFTER,
    optional=QKV_BIASES,
    output="required",
)
OLMO3 = replace(
    OLMO2,
    classes=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    reads=frozenset({"sliding_window"}),
    check=_check,
    keys=_keys,
)
RECIPES = (OLMO2, OLMO3)
