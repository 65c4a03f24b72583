"""Muse Glimmer, its language model: gates on what heads give, norms around both blocks, windows in most layers.

Norms of queries and keys have no weights in the checkpoint: the file says by theirs what queries are multiplied by.
"""

from __future__ import annotations

import numpy as np

from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, Keys, Recipe
from edgeinfer.exporters.conversion.windows import has_window
from edgeinfer.exporters.source import SourceTensor


def _check(model: Model) -> None:
    windowed = has_window(model)
    if windowed is None:
        model.refuse("layer_types", "must say which layers have a window: found none")
    turned = [theta != 0 for theta in model.config.numbers("layer_rope_theta", model.n_layers)]
    if turned != windowed:
        model.refuse("layer_rope_theta", "must be 0 in those layers that see everything, and in no other")


def _keys(model: Model) -> Keys:
    config = model.config
    return {
        "final_logit_softcapping": config.number("final_logit_softcapping"),
        "logit_scale": config.number("output_multiplier"),
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": has_window(model) or [],
    }


def _norms(model: Model) -> list[SourceTensor]:
    """Those of queries and keys."""
    factors = {"q": model.config.number("qk_scale_factor"), "k": 1.0}
    return [
        rows.of_array(f"blk.{layer}.attn_{of}_norm.weight", np.full(model.head_dim, factor, np.float32))
        for layer in range(model.n_layers)
        for of, factor in factors.items()
    ]


RECIPES = (
    Recipe(
        name="muse-glimmer",
        classes=("MuseGlimmerForConditionalGeneration",),
        model_types=("muse_glimmer_text", "muse_glimmer"),
        defaults={
            "rms_norm_eps": 1e-5,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.19611613513818404,
            "qk_scale_factor": 3.87,
        },
        fixed={"hidden_activation": (None, "silu"), "hidden_act": (None, "silu"), "post_norm_eps": (None, 1e-8)},
        reads=frozenset(
            {"final_logit_softcapping", "output_multiplier", "qk_scale_factor", "sliding_window", "layer_rope_theta"}
        ),
        attention={**ATTENTION, "self_attn.gate_proj.weight": "attn_gate.weight"},
        norms={
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "pre_feedforward_layernorm.weight": "ffn_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        },
        special=_norms,
        interleaved=True,
        norm_shift=1.0,
        plain_norms=frozenset({"attn_q_norm.weight", "attn_k_norm.weight", "output_norm.weight"}),
        output="required",
        check=_check,
        keys=_keys,
    ),
)
