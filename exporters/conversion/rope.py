"""The rotation of a checkpoint as keys and tensors of GGUF.

llama.cpp knows linear scaling and YaRN by keys; everything else is in tensors of factors that frequencies are divided
by: those of Llama 3 in rope_freqs, those of LongRoPE in rope_factors_long and rope_factors_short. It reads no such
tensor in gpt-oss, whose ramp of YaRN does not end at whole pairs: rope.scaling.yarn_truncate is edgeinfer's own key.
"""

from __future__ import annotations

import math

import numpy as np

from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Keys
from edgeinfer.exporters.source import SourceTensor
from edgeinfer.models.rope import inverse_frequencies

_COMMON = frozenset({"default", "linear", "yarn", "dynamic"})
_ALWAYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "max_position_embeddings"}
_OF_KIND = {
    "default": {"factor", "original_max_position_embeddings"},  # some files have them, transformers does not look
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "alpha", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "extrapolation_factor"}
    | {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "llama_4_scaling_beta"},
    "proportional": set(),
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "long_factor", "short_factor"}
    | {"long_mscale", "short_mscale"},
}


def rope_keys(model: Model) -> Keys:
    """Keys of the rotation, of a model that passed check_rope. Raises ModelFileError."""
    rope = model.rope
    keys: Keys = {"rope.freq_base": rope.theta, "rope.dimension_count": model.n_rotated}
    if rope.kind == "linear":
        return keys | {"rope.scaling.type": "linear", "rope.scaling.factor": rope.values.number("factor")}
    if rope.kind == "yarn":
        return keys | _yarn(model)
    if rope.kind == "longrope":
        return keys | _long_keys(model)
    if rope.kind == "dynamic":
        model.note(f"rope_type dynamic changes the rotation after {model.n_ctx} tokens only, and is left out")
    return keys


def check_rope(model: Model) -> None:
    """Raises UnsupportedModel for a kind of scaling, or a key of it, that is not known here."""
    rope = model.rope
    if rope.share != 1 and not model.recipe.part_rotated:
        model.refuse("partial_rotary_factor", f"must be 1, a part of a head is not rotated here: found {rope.share:g}")
    known = _COMMON | model.recipe.rope_kinds
    if rope.kind not in known:
        model.refuse(
            "rope_type", f"must be one of {', '.join(sorted(known))} in {model.recipe.name}: found {rope.kind}"
        )
    of_kind = rope.values.values.keys() - _ALWAYS - _OF_KIND[rope.kind] - model.recipe.reads
    # Where rope_scaling is absent these are keys of the whole.
    others = sorted(key for key in of_kind if rope.values.prefix != model.config.prefix)
    if others:
        rope.values.refuse(others[0], f"is not known with rope_type {rope.kind}, so what it asks for would be lost")


def rope_tensors(model: Model) -> list[SourceTensor]:
    """Tensors of factors. Raises ModelFileError for lists of another length."""
    if model.rope.kind == "llama3":
        return [rows.of_array("rope_freqs.weight", _llama3_factors(model))]
    if model.rope.kind == "longrope":
        n = model.n_rotated // 2
        found = {kind: model.rope.values.numbers(f"{kind}_factor", n) for kind in ("long", "short")}
        return [rows.of_array(f"rope_factors_{kind}.weight", np.array(each)) for kind, each in found.items()]
    return []


def original_context(model: Model) -> int:
    """The context before it was extended, as one of three places says it."""
    key = "original_max_position_embeddings"
    return model.rope.values.integer(key, model.config.integer(key, model.n_ctx))


def _factor(model: Model) -> float:
    """By how much the context was extended."""
    return model.rope.values.number("factor", model.n_ctx / original_context(model))


def _yarn(model: Model) -> Keys:
    found = model.rope.values
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": _factor(model),
        "rope.scaling.original_context_length": original_context(model),
    }
    for theirs, ours in {
        "extrapolation_factor": "ext_factor",
        "attn_factor": "attn_factor",
        "attention_factor": "attn_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    }.items():
        if theirs in found:
            keys[f"rope.scaling.yarn_{ours}"] = found.number(theirs)
    if not found.flag("truncate", True):
        keys["rope.scaling.yarn_truncate"] = False
        model.note(
            "rope_parameters.truncate false: edgeinfer rotates as the model was trained; llama.cpp has no key for it, "
            "and its ramp of YaRN begins and ends at whole pairs"
        )
    if "mscale_all_dim" in found and "mscale_all_dim" not in model.recipe.reads:
        found.refuse("mscale_all_dim", f"cannot be written for {model.recipe.name}")
    return keys


def _long_keys(model: Model) -> Keys:
    """LongRoPE (Ding et al., arXiv:2402.13753): its factor on queries and keys, which GGUF has no rule for."""
    n_ctx, factor = original_context(model), _factor(model)
    found = model.rope.values
    usual = math.sqrt(1 + math.log(factor) / math.log(n_ctx)) if factor > 1 else 1.0
    return {
        "rope.scaling.attn_factor": found.number("attention_factor", usual),
        "rope.scaling.original_context_length": n_ctx,
    }


def _llama3_factors(model: Model) -> np.ndarray:
    """What Llama 3.1 divides its frequencies by: 1 for waves that are short, `factor` for those longer than a context.

    (n_rotated / 2,); transformers, modeling_rope_utils.py.
    """
    found = model.rope.values
    factor, n_ctx = found.number("factor"), original_context(model)
    low, high = found.number("low_freq_factor"), found.number("high_freq_factor")
    if high <= low:
        found.fail("high_freq_factor", f"above low_freq_factor {low:g}")
    waves = [2 * math.pi / each for each in inverse_frequencies(model.rope.theta, model.n_rotated)]
    shares = [min(max((n_ctx / wave - low) / (high - low), 0.0), 1.0) for wave in waves]
    return np.array([1 / ((1 - share) / factor + share) for share in shares])
