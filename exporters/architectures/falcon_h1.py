"""Falcon-H1: attention and Mamba2 side by side in each block. The factors of config.json go into the weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.architectures.granitehybrid import MAMBA, mamba_tensor
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, BIASES, Keys, Recipe
from edgeinfer.exporters.source import SourceTensor

# The factors of a tensor, by its name after "blk.<index>." or its whole one, in llama.cpp's order: each product is
# rounded.
_FACTORS = {
    "token_embd.weight": ("embedding_multiplier",),
    "output.weight": ("lm_head_multiplier",),
    "attn_q.weight": ("attention_in_multiplier",),
    "attn_k.weight": ("key_multiplier", "attention_in_multiplier"),
    "attn_v.weight": ("attention_in_multiplier",),
    "attn_output.weight": ("attention_out_multiplier",),
    "ssm_out.weight": ("ssm_out_multiplier",),
}
_LISTS = {"ffn_gate.weight": ("mlp_multipliers", 0), "ffn_down.weight": ("mlp_multipliers", 1)}
_OF_MAMBA = ("mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _changed(model: Model, tensor: SourceTensor) -> SourceTensor:
    name, config = tensor.name, model.config
    kind = name.split(".", 2)[-1] if name.startswith("blk.") else name
    tensor = mamba_tensor(config.integer("mamba_n_groups"), tensor)
    if kind == "ssm_in.weight":
        return rows.scaled(_times(tensor, config.number("ssm_in_multiplier", 1.0)), _input_factors(model))
    if kind in _LISTS:
        key, place = _LISTS[kind]
        return _times(tensor, config.numbers(key, 2)[place])
    for key in _FACTORS.get(kind, ()):
        tensor = _times(tensor, config.number(key, 1.0))
    return tensor


def _times(tensor: SourceTensor, factor: float) -> SourceTensor:
    return tensor if factor == 1.0 else rows.mapped(tensor, lambda weights: weights * np.float32(factor))


def _input_factors(model: Model) -> NDArray[np.float32]:
    """Of each row of the first product of Mamba2: of z, v, B, C and the steps."""
    config = model.config
    n_inner, n_k = config.integer("mamba_d_ssm"), config.integer("mamba_n_groups") * config.integer("mamba_d_state")
    sizes = (n_inner, n_inner, n_k, n_k, config.integer("mamba_n_heads"))
    return np.repeat(np.array(config.numbers("ssm_multipliers", 5), np.float32), sizes)


def _keys(model: Model) -> Keys:
    config = model.config
    return {
        "ssm.conv_kernel": config.integer("mamba_d_conv"),
        "ssm.state_size": config.integer("mamba_d_state"),
        "ssm.group_count": config.integer("mamba_n_groups"),
        "ssm.time_step_rank": config.integer("mamba_n_heads"),
        "ssm.inner_size": config.integer("mamba_d_ssm"),
    }


def _check(model: Model) -> None:
    """Raises UnsupportedModel where heads and sizes differ, and for a norm before the gate."""
    config = model.config
    n_heads, head_dim = config.integer("mamba_n_heads"), config.integer("mamba_d_head")
    if n_heads * head_dim != config.integer("mamba_d_ssm"):
        found = config.integer("mamba_d_ssm")
        model.refuse("mamba_d_ssm", f"must be {n_heads} heads of {head_dim}, {n_heads * head_dim}: found {found}")
    if config.flag("mamba_rms_norm", False) and config.flag("mamba_norm_before_gate", True):
        model.refuse("mamba_norm_before_gate", "must be false: GGUF has the norm after the gate")


RECIPES = (
    Recipe(
        name="falcon-h1",
        classes=("FalconH1ForCausalLM",),
        model_types=("falcon_h1",),
        fixed={
            "hidden_act": (None, "silu"),
            "mamba_conv_bias": (None, True),
            "mamba_proj_bias": (None, False),
            "mlp_bias": (None, False),
            "projectors_bias": (None, False),
            "mamba_use_mlp": (None, True),
        },
        reads=frozenset(key for keys in _FACTORS.values() for key in keys)
        | {"mlp_multipliers", "ssm_multipliers", "ssm_in_multiplier", "mamba_rms_norm", "mamba_norm_before_gate"}
        | {*_OF_MAMBA, "mamba_chunk_size", "mamba_expand", "time_step_min", "time_step_max", "time_step_floor"}
        | {"time_step_rank", "num_logits_to_keep", "attn_layer_indices", "mlp_expansion_factor", "time_step_limit"},
        attention={**ATTENTION, **{f"mamba.{name}": to for name, to in MAMBA.items() if name != "norm.weight"}},
        optional={**BIASES, "mamba.norm.weight": "ssm_norm.weight"},
        norms={"input_layernorm.weight": "attn_norm.weight", "pre_ff_layernorm.weight": "ffn_norm"},
        dense={f"feed_forward.{role}_proj.weight": f"ffn_{role}.weight" for role in ("gate", "up", "down")},
        final_norm=("model.final_layernorm.weight", "output_norm.weight"),
        output="required",  # which has a factor of its own
        changed=_changed,
        check=_check,
        keys=_keys,
        pre="falcon-h1",
    ),
)
