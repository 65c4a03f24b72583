"""Gemma 3: Gemma 2 with norms on queries and keys, and windows in five of six layers with a rotation of their own.

Rows of the embeddings after the last token of the vocabulary are cut off, as llama.cpp's converter does.
"""

from __future__ import annotations

from edgeinfer.exporters.architectures.gemma2 import DEFAULTS, FIXED, NORMS, check_scale
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, QK_NORMS, Keys, Recipe
from edgeinfer.exporters.conversion.windows import check_period

_LAYERS_27B = 62
_PERIOD = 6


def _check(model: Model) -> None:
    if model.config.get("use_bidirectional_attention"):
        model.refuse(
            "use_bidirectional_attention",
            "is true: this is an encoder such as EmbeddingGemma, and edgeinfer runs models that continue a text",
        )
    check_scale(model, _LAYERS_27B)
    check_period(model, _PERIOD)
    local = model.config.rope("sliding_attention")
    if local.kind != "default":
        model.refuse("rope_parameters", f"must be default for sliding_attention: found {local.kind}")


def _keys(model: Model) -> Keys:
    keys: Keys = {
        "attention.sliding_window": model.config.integer("sliding_window"),
        "rope.freq_base_swa": model.config.rope("sliding_attention").theta,
    }
    if "final_logit_softcapping" in model.config:
        keys["final_logit_softcapping"] = model.config.number("final_logit_softcapping")
    return keys


RECIPES = (
    Recipe(
        name="gemma3",
        classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"),
        model_types=("gemma3_text", "gemma3"),
        defaults={
            **DEFAULTS,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        fixed={key: values for key, values in FIXED.items() if key != "use_bidirectional_attention"}
        | {"attn_logit_softcapping": (None,)},
        reads=frozenset(
            {"query_pre_attn_scalar", "sliding_window", "final_logit_softcapping", "rope_local_base_freq"}
            | {"sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention"}
        ),
        attention={**ATTENTION, **QK_NORMS},
        norms=NORMS,
        norm_shift=1.0,
        cuts_vocabulary=True,
        check=_check,
        keys=_keys,
    ),
)
