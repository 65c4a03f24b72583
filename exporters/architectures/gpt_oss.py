"""gpt-oss: biases everywhere, attention sinks, windows in every second layer, experts in MXFP4.

Rows of gate and up of its experts alternate, the gate's first. Their MXFP4 blocks are kept, with another order of the
numbers in them; checkpoints with floats have these matrices the other way round, (n_in, n_out).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, BIASES, Keys, Recipe
from edgeinfer.exporters.conversion.windows import check_period
from edgeinfer.exporters.source import SourceTensor

_PERIOD = 2
_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


def _check(model: Model) -> None:
    check_period(model, _PERIOD)


def _keys(model: Model) -> Keys:
    return {
        "attention.sliding_window": model.config.integer("sliding_window"),
        "expert_feed_forward_length": model.config.integer("intermediate_size"),
        "expert_count": model.config.integer("num_local_experts"),
        "expert_used_count": model.config.integer("num_experts_per_tok"),
    }


def _experts(model: Model) -> list[SourceTensor]:
    found = []
    for layer in range(model.n_layers):
        module, ours = f"model.layers.{layer}.mlp.experts", f"blk.{layer}.ffn_{{}}_exps.{{}}"
        both, down = _matrix(model, f"{module}.gate_up_proj"), _matrix(model, f"{module}.down_proj")
        biases, last = model.take(f"{module}.gate_up_proj_bias"), model.take(f"{module}.down_proj_bias")
        index = np.arange(0, biases.n_in // 2 * 2, 2)
        parts = {
            ("gate", "weight"): rows.every_second(both, 0),
            ("up", "weight"): rows.every_second(both, 1),
            ("down", "weight"): down,
            ("gate", "bias"): rows.columns(biases, index),
            ("up", "bias"): rows.columns(biases, index + 1),
            ("down", "bias"): last,
        }
        found += [replace(tensor, name=ours.format(*role)) for role, tensor in parts.items()]
    return found


def _matrix(model: Model, name: str) -> SourceTensor:
    """(n_experts, n_out, n_in) of what is stored as MXFP4 or as floats."""
    if f"{name}_blocks" in model:
        model.taken |= {f"{name}_blocks", f"{name}_scales"}
        return rows.mxfp4(model.checkpoint, f"{name}_blocks", f"{name}_scales")
    found = model.take(name)
    if len(found.shape) != 3:
        model.checkpoint.refuse(name, f"must have three axes: found {found.shape}")
    return rows.transposed(found)


RECIPES = (
    Recipe(
        name="gpt-oss",
        classes=("GptOssForCausalLM",),
        model_types=("gpt_oss",),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64, "rope_parameters": _ROPE},
        fixed={"hidden_act": (None, "silu"), "swiglu_limit": (None, 7.0), "swiglu_alpha": (None, 1.702)},
        reads=frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"}),
        norms={
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
        },
        attention={**ATTENTION, **BIASES, "self_attn.sinks": "attn_sinks.weight"},
        dense={"mlp.router.weight": "ffn_gate_inp.weight", "mlp.router.bias": "ffn_gate_inp.bias"},
        special=_experts,
        output="required",
        check=_check,
        keys=_keys,
    ),
)
