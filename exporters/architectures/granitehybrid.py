"""Granite 4: Mamba2 in most layers, with and without experts. Models whose layers all attend are `granite` in GGUF."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgeinfer.exporters.architectures import granite, granitemoe
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.kinds import check_kinds
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import BIASES, Keys, Recipe
from edgeinfer.exporters.source import SourceTensor

MAMBA = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
ROUTER = {"block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight"}
READS = frozenset({"mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"})
# Which change no text: how passes are cut, and where training began.
UNREAD = frozenset({"mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor", "time_step_limit"})


def mamba_tensor(n_groups: int, tensor: SourceTensor) -> SourceTensor:
    """A tensor as the file has it: decays, a convolution of two axes, vectors as columns; others as they are."""
    kind = tensor.name.split(".", 2)[-1]
    if kind == "ssm_conv1d.weight":
        return rows.without_axis(tensor, 1)
    if kind == "ssm_a":
        decays = rows.mapped(tensor, lambda values: -np.exp(values.astype(np.float64)).astype(np.float32))
        return rows.cut(decays, 1)
    if kind == "ssm_d":
        return rows.cut(tensor, 1)
    return rows.cut(tensor, tensor.n_in // n_groups) if kind == "ssm_norm.weight" else tensor


def _changed(model: Model, tensor: SourceTensor) -> SourceTensor:
    return mamba_tensor(model.config.integer("mamba_n_groups"), tensor)


def _n_experts(model: Model) -> int:
    return model.config.integer("num_local_experts", 0, least=0)


def _check(model: Model) -> None:
    check_kinds(model, "mamba" if "mamba" in (model.layer_types() or []) else "linear_attention", None, "layer_types")


def _networks(model: Model) -> list[SourceTensor]:
    return granitemoe.networks(model) if _n_experts(model) else granite.shared_networks(model)


def _keys(model: Model) -> Keys:
    config = model.config
    n_heads, n_shared = config.integer("mamba_n_heads"), config.integer("shared_intermediate_size")
    found: Keys = {
        **granite.factors(model),
        "attention.head_count_kv": [
            0 if model.is_recurrent(layer) else model.n_kv_heads for layer in range(model.n_layers)
        ],
        "rope.scaling.finetuned": config.choice("position_embedding_type", ("rope", "nope"), "rope") == "rope",
        "ssm.conv_kernel": config.integer("mamba_d_conv"),
        "ssm.state_size": config.integer("mamba_d_state"),
        "ssm.group_count": config.integer("mamba_n_groups"),
        "ssm.time_step_rank": n_heads,
        "ssm.inner_size": n_heads * config.integer("mamba_d_head"),
    }
    if not _n_experts(model):
        return found | {"feed_forward_length": n_shared}
    return found | {
        "expert_count": _n_experts(model),
        "expert_used_count": config.integer("num_experts_per_tok"),
        "expert_shared_feed_forward_length": n_shared,
    }


def _without_mamba(checkpoint: Checkpoint) -> Recipe | None:
    """The recipe for a model whose layers all attend; None for others."""
    return None if any(".mamba." in name for name in checkpoint.names) else granite.HYBRID


RECIPES = (
    replace(
        granite.HYBRID,
        name="granitehybrid",
        defaults={"mamba_d_conv": 4, "mamba_n_groups": 1},
        fixed={
            "hidden_act": (None, "silu"),
            "normalization_function": (None, "rmsnorm"),
            "mamba_conv_bias": (None, True),
            "mamba_proj_bias": (None, False),
        },
        reads=granite.HYBRID.reads | {"num_local_experts"} | READS | UNREAD,
        optional={**BIASES, **ROUTER},
        recurrent={f"mamba.{theirs}": ours for theirs, ours in MAMBA.items()},
        special=_networks,
        changed=_changed,
        check=_check,
        keys=_keys,
        instead=_without_mamba,
    ),
)
