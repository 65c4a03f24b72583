"""Qwen3.5 and 3.6: gated delta nets in three of four layers, attention with output gates in the others.

Checkpoints have the value heads of a key head side by side; files have the first one of each key head, then the second
one of each, and so on, as llama.cpp repeats key heads. Where a model has as many heads of both kinds, that is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.kinds import check_kinds
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.nextn import nextn_blocks, nextn_tensors
from edgeinfer.exporters.conversion.recipe import ATTENTION, QK_NORMS, Keys, Recipe
from edgeinfer.exporters.source import SourceTensor

SECTIONS = [11, 11, 10, 0]  # pairs by axis of a position, where config.json does not say them
NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",  # which is before the network all the same
}
# What the recurrences of all Qwen models have.
RECURRENT = {
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
FIXED = {
    "hidden_act": (None, "silu"),
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "swish"),
}
READS = frozenset(
    {"linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"}
    | {"linear_num_value_heads", "full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    | {"mrope_section", "mrope_interleaved", "mamba_ssm_dtype"}
)


# ---- keys ------------------------------------------------------------------------------------------------------------


def check(model: Model) -> None:
    """Raises UnsupportedModel for heads that a file cannot have, and kinds of layers that the tensors are not of."""
    n_keys, n_values = (model.config.integer(f"linear_{kind}_head_dim") for kind in ("key", "value"))
    if n_keys != n_values:
        model.refuse("linear_value_head_dim", f"must equal linear_key_head_dim {n_keys}: found {n_values}")
    if model.config.integer("linear_num_value_heads") % model.config.integer("linear_num_key_heads"):
        model.refuse("linear_num_value_heads", "must be a multiple of linear_num_key_heads")
    key = "full_attention_interval"
    every = model.config.integer(key) if key in model.config else None
    by_interval = None if every is None else [(layer + 1) % every != 0 for layer in range(model.n_layers)]
    check_kinds(model, "linear_attention", by_interval, key)


def keys(model: Model) -> Keys:
    """Those of the recurrences, and which layers have them."""
    config, n_nextn = model.config, len(model.blocks) - model.n_layers
    found: Keys = {
        "ssm.conv_kernel": config.integer("linear_conv_kernel_dim"),
        "ssm.state_size": config.integer("linear_key_head_dim"),
        "ssm.group_count": config.integer("linear_num_key_heads"),
        "ssm.time_step_rank": config.integer("linear_num_value_heads"),
        "ssm.inner_size": config.integer("linear_num_value_heads") * config.integer("linear_value_head_dim"),
        "attention.recurrent_layers": [model.is_recurrent(block) for block in range(len(model.blocks))],
        "full_attention_interval": config.integer("full_attention_interval", 4),
    }
    if n_nextn:
        found["nextn_predict_layers"] = n_nextn
    sections = model.rope.values
    if "mrope_section" in sections:
        found["rope.dimension_sections"] = [*sections.integers("mrope_section", least=0), 0, 0, 0, 0][:4]
    return found


def _keys(model: Model) -> Keys:
    return {"rope.dimension_sections": SECTIONS, **keys(model)}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def tiled(model: Model, tensor: SourceTensor) -> SourceTensor:
    """A tensor of a recurrence as the file has it, with value heads in turns; others as they are."""
    tensor = delta_net(model, tensor)
    n_k, head_dim = _n_k(model), model.config.integer("linear_value_head_dim")
    kind = tensor.name.split(".", 2)[-1]
    if kind in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return _rows_in_turns(model, tensor, head_dim, 2 * n_k)
    if kind == "attn_gate.weight":
        return _rows_in_turns(model, tensor, head_dim)
    if kind in ("ssm_alpha.weight", "ssm_beta.weight"):
        return _rows_in_turns(model, tensor, 1)
    if kind in ("ssm_a", "ssm_dt.bias", "ssm_out.weight"):
        n_each = head_dim if kind == "ssm_out.weight" else 1
        return rows.columns(tensor, _in_turns(model, np.arange(_checked(model, tensor, tensor.n_in, n_each)), n_each))
    return tensor


def delta_net(model: Model, tensor: SourceTensor) -> SourceTensor:
    """A tensor of a recurrence as the file has it, but for its order: decays, and a convolution of two axes."""
    kind = tensor.name.split(".", 2)[-1]
    if kind == "ssm_conv1d.weight":
        return rows.without_axis(tensor, 1)
    if kind == "ssm_a":
        return rows.mapped(tensor, lambda values: -np.exp(values.astype(np.float64)).astype(np.float32))
    return tensor


def _n_k(model: Model) -> int:
    return model.config.integer("linear_num_key_heads") * model.config.integer("linear_key_head_dim")


def _rows_in_turns(model: Model, tensor: SourceTensor, n_each: int, n_before: int = 0) -> SourceTensor:
    """A matrix with the rows of its value heads in turns. n_each: of a head.  n_before: that stay where they are."""
    _checked(model, tensor, tensor.shape[0], n_each, n_before)

    def order(index: NDArray[np.int64]) -> NDArray[np.int64]:
        moved = n_before + _in_turns(model, np.maximum(index - n_before, 0), n_each)
        return np.where(index < n_before, index, moved)

    return rows.arranged(tensor, tensor.shape, order)


def _in_turns(model: Model, index: NDArray[np.int64], n_each: int) -> NDArray[np.int64]:
    """Places in the checkpoint of what the file has at some places, of value heads of n_each numbers."""
    n_key_heads = model.config.integer("linear_num_key_heads")
    n_shared = model.config.integer("linear_num_value_heads") // n_key_heads
    heads, places = index // n_each, index % n_each
    return (heads % n_key_heads * n_shared + heads // n_key_heads) * n_each + places


def _checked(model: Model, tensor: SourceTensor, n: int, n_each: int, n_before: int = 0) -> int:
    """n. Raises UnsupportedModel unless that are all value heads."""
    n_heads = model.config.integer("linear_num_value_heads")
    if n != n_before + n_heads * n_each:
        raise UnsupportedModel(
            f"{model.checkpoint.path}: tensor {tensor.name} must have {n_before} and {n_heads} heads of {n_each} "
            f"numbers: found {n}"
        )
    return n


RECIPES = (
    Recipe(
        name="qwen35",
        classes=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5TextModel"),
        model_types=("qwen3_5_text", "qwen3_5"),
        defaults={**DEFAULTS, "num_key_value_heads": 4},
        fixed={**FIXED, "mlp_only_layers": (None, [])},
        reads=READS,
        attention={**ATTENTION, **QK_NORMS},
        recurrent={
            **RECURRENT,
            "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
            "linear_attn.in_proj_z.weight": "attn_gate.weight",
            "linear_attn.in_proj_b.weight": "ssm_beta.weight",
            "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        },
        norms=NORMS,
        norm_shift=1.0,
        plain_norms=frozenset({"ssm_norm.weight"}),
        part_rotated=True,
        special=nextn_tensors,
        nextn=nextn_blocks,
        changed=tiled,
        check=check,
        keys=_keys,
        pre="qwen35",
    ),
)
