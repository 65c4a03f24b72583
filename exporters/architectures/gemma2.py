"""Gemma 2. The file has its norms with the 1 added that Gemma adds to them."""

from __future__ import annotations

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Keys, Recipe
from edgeinfer.exporters.conversion.windows import check_period

NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
FIXED = {
    "hidden_act": (None, "gelu_pytorch_tanh"),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (None, False),
}
_LAYERS_27B = 46
_PERIOD = 2


def check_scale(model: Model, n_layers_27b: int) -> None:
    """Raises UnsupportedModel unless scores are scaled as runtimes do it without a key: by the width of a head, in the
    27B models by the width that heads would have if they made up the residual stream.
    """
    width = model.n_embd // model.n_heads if model.n_layers == n_layers_27b else model.head_dim
    found = model.config.number("query_pre_attn_scalar")
    if found != width:
        model.refuse("query_pre_attn_scalar", f"must be {width}, GGUF has no key for it here: found {found:g}")


def _check(model: Model) -> None:
    check_scale(model, _LAYERS_27B)
    check_period(model, _PERIOD)


def _keys(model: Model) -> Keys:
    return {
        "attention.sliding_window": model.config.integer("sliding_window"),
        "attn_logit_softcapping": model.config.number("attn_logit_softcapping"),
        "final_logit_softcapping": model.config.number("final_logit_softcapping"),
    }


RECIPES = (
    Recipe(
        name="gemma2",
        classes=("Gemma2ForCausalLM", "Gemma2Model"),
        model_types=("gemma2",),
        defaults=DEFAULTS,
        fixed=FIXED,
        reads=frozenset(
            {"query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
            | {"sliding_window_pattern", "_sliding_window_pattern", "sliding_window_size"}
        ),
        norms=NORMS,
        norm_shift=1.0,
        output="tied",
        check=_check,
        keys=_keys,
    ),
)
