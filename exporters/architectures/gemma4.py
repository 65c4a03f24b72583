"""Gemma 4: layers with a window and small heads, and layers that see everything with large ones.

Norms are in the file as they are. Of the large heads a part is rotated, with frequencies that go on over the whole
head: the file has factors that stop the others. Layers that read the keys and values of others have none in the file.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.architectures import gemma2
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import DENSE, ExpertNames, Keys, Recipe
from edgeinfer.exporters.conversion.tensors import embeddings_of, named
from edgeinfer.exporters.conversion.windows import has_window
from edgeinfer.exporters.source import SourceTensor

_PERIOD = 6
_GLOBAL_HEAD_DIM = 512  # where config.json does not say it
_STOPPED = 1e30  # what frequencies are divided by that do not turn
_ATTENTION = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
}
_KEYS = {"self_attn.k_proj.weight": "attn_k.weight", "self_attn.k_norm.weight": "attn_k_norm.weight"}
_VALUES = ("self_attn.v_proj.weight", "attn_v.weight")
_OF_LAYERS = {
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
_EXPERTS = ExpertNames(
    module="experts",
    router="router.proj.weight",
    count=("num_experts",),
    used="top_k_experts",
    more={
        **DENSE,
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
        "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
        "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    },
    joined=True,
    may_lack=True,
)


# ---- keys ------------------------------------------------------------------------------------------------------------


def _check(model: Model) -> None:
    if not 0 <= _n_shared(model) < model.n_layers:
        model.refuse("num_kv_shared_layers", f"must leave layers with keys of their own: found {_n_shared(model)}")
    check_layers(model)


def check_layers(model: Model) -> None:
    """Raises UnsupportedModel for kinds of layers, or rotations, that a file cannot have."""
    if model.config.flag("enable_moe_block", False) != (model.n_experts > 0):
        model.refuse("enable_moe_block", f"must be true where there are experts, and only there: {model.n_experts} are")
    if model.rope.kind != "proportional":
        model.refuse("rope_parameters", f"must be proportional for full_attention: found {model.rope.kind}")
    local = model.config.rope("sliding_attention")
    if local.kind != "default" or local.share != 1:
        model.refuse("rope_parameters", f"must be default, of whole heads, for sliding_attention: found {local.kind}")
    if not all(_is_windowed(model)) and _is_windowed(model)[-1]:
        model.refuse("layer_types", "must be full_attention in the last layer: found sliding_attention")


def _is_windowed(model: Model) -> list[bool]:
    return has_window(model) or [(layer + 1) % _PERIOD != 0 for layer in range(model.n_layers)]


def _n_shared(model: Model) -> int:
    """The last layers, which read the keys and values of others."""
    return model.config.integer("num_kv_shared_layers", 0, least=0)


def _of_full(model: Model, key: str, given: str) -> int | None:
    """What config.json says of all layers that see everything: under `given`, or in per_layer_config."""
    if model.config.get(given) is not None:
        return model.config.integer(given, most=1 << 14)
    each = model.config.get("per_layer_config")
    if each is None:
        return None
    full = [layer for layer, windowed in enumerate(_is_windowed(model)) if not windowed]
    by_layer = {int(layer): of for layer, of in each.items()} if isinstance(each, dict) else {}
    found = {by_layer.get(layer, {}).get(key) for layer in full}
    if by_layer.keys() - set(full) or len(found) != 1:
        model.refuse("per_layer_config", f"must say the same of all layers of full_attention: found {each!r:.80}")
    value = found.pop()
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        model.refuse("per_layer_config", f"must have positive integers: found {key} {value!r:.80}")
    return value


def _global_head_dim(model: Model) -> int:
    return _of_full(model, "head_dim", "global_head_dim") or _GLOBAL_HEAD_DIM


def keys_of_layers(model: Model) -> Keys:
    """Keys beyond those that most architectures have."""
    config, windowed, full = model.config, _is_windowed(model), _global_head_dim(model)
    keys: Keys = {
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": _n_shared(model),
        "attention.key_length_swa": model.head_dim,
        "attention.value_length_swa": model.head_dim,
        "attention.key_length": full,
        "attention.value_length": full,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": model.head_dim,
        "rope.freq_base_swa": config.rope("sliding_attention").theta,
        "embedding_length_per_layer_input": _n_inputs(model),
    }
    of_full = _of_full(model, "num_key_value_heads", "num_global_key_value_heads")
    if of_full is not None and (config.flag("attention_k_eq_v", False) or "per_layer_config" in config):
        keys["attention.head_count_kv"] = [model.n_kv_heads if each else of_full for each in windowed]
    if config.get("final_logit_softcapping") is not None:
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
    if config.flag("use_double_wide_mlp", False):
        n_ff, first = config.integer("intermediate_size"), model.n_layers - _n_shared(model)
        keys["feed_forward_length"] = [n_ff * (1 + (layer >= first)) for layer in range(model.n_layers)]
    if model.n_experts:
        keys["expert_feed_forward_length"] = config.integer("moe_intermediate_size")
    return keys


def _n_inputs(model: Model) -> int:
    """Numbers that each layer has of its own for a token."""
    return (
        0
        if model.config.get("hidden_size_per_layer_input") in (None, 0)
        else model.config.integer("hidden_size_per_layer_input", most=1 << 16)
    )


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _special(model: Model) -> list[SourceTensor]:
    found = [rows.of_array("rope_freqs.weight", factors(model))]
    for layer in range(model.n_layers):
        found += _of_layer(model, layer)
    if _n_inputs(model):
        found += [
            _table(model),
            named(model, "model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
            named(model, "model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        ]
    return found


def factors(model: Model) -> np.ndarray:
    """What frequencies of large heads are divided by: 1 for the pairs that turn, as in transformers."""
    n_pairs, head_dim = _global_head_dim(model) // 2, _global_head_dim(model)
    return np.where(np.arange(n_pairs) < int(model.rope.share * head_dim // 2), 1.0, _STOPPED)


def _of_layer(model: Model, layer: int) -> list[SourceTensor]:
    """Its keys and values, where it has its own, its scale, and what it makes of its own embeddings."""
    theirs, ours = model.blocks[layer], f"blk.{layer}."
    names = {"layer_scalar": "layer_output_scale.weight"}
    if layer < model.n_layers - _n_shared(model):
        names |= _KEYS
        are_keys = model.config.flag("attention_k_eq_v", False) and not _is_windowed(model)[layer]
        names |= {} if are_keys else dict([_VALUES])
    else:  # some checkpoints have them all the same, and no layer reads them
        model.taken |= {theirs + name for name in (*_KEYS, _VALUES[0]) if theirs + name in model}
    if _n_inputs(model):
        names |= _OF_LAYERS
    return [named(model, theirs + name, ours + to) for name, to in names.items()]


def _table(model: Model) -> SourceTensor:
    """The embeddings of all layers, for the tokens that the model has embeddings of."""
    tensor = model.take("model.embed_tokens_per_layer.weight")
    n_vocab = model.checkpoint.shape(embeddings_of(model))[0]
    if len(tensor.shape) != 2 or tensor.shape[0] < n_vocab:
        raise UnsupportedModel(
            f"{model.checkpoint.path}: tensor {tensor.name} must have a row for each of {n_vocab} tokens: found "
            f"{tensor.shape}"
        )
    return replace(rows.part(tensor, 0, n_vocab), name="per_layer_token_embd.weight")


RECIPES = (
    Recipe(
        name="gemma4",
        classes=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4TextModel"),
        model_types=("gemma4_text", "gemma4"),
        defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 131072,
            "hidden_size_per_layer_input": 256,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        fixed={
            "hidden_act": gemma2.FIXED["hidden_act"],
            "hidden_activation": gemma2.FIXED["hidden_activation"],
            "use_bidirectional_attention": (None, False, "vision"),
            "attn_logit_softcapping": (None,),
        },
        reads=frozenset(
            {"sliding_window", "final_logit_softcapping", "global_head_dim", "num_global_key_value_heads"}
            | {"per_layer_config", "attention_k_eq_v", "hidden_size_per_layer_input", "vocab_size_per_layer_input"}
            | {"num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block", "moe_intermediate_size"}
        ),
        attention=_ATTENTION,
        norms=gemma2.NORMS,
        experts=_EXPERTS,
        special=_special,
        rope_kinds=frozenset({"proportional"}),
        part_rotated=True,
        cuts_vocabulary=True,
        check=_check,
        keys=keys_of_layers,
        pre="gemma4",
    ),
)
