"""Qwen3-Next 80B-A3B: as qwen35moe, but the value heads of a key head stay side by side.

Checkpoints have the queries, keys, values and gates of a key head in one run of rows; files have them apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.architectures import qwen35, qwen35moe
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.nextn import nextn_tensors
from edgeinfer.exporters.conversion.rows import Order
from edgeinfer.exporters.source import SourceTensor

_QKVZ = "linear_attn.in_proj_qkvz.weight"


def _special(model: Model) -> list[SourceTensor]:
    found = nextn_tensors(model)
    for block, theirs in enumerate(model.blocks):
        if model.is_recurrent(block):
            found += _apart(model, theirs + _QKVZ, f"blk.{block}.")
    return found


def _apart(model: Model, name: str, ours: str) -> list[SourceTensor]:
    """Queries, keys and values as one matrix, and the gates. Raises ModelFileError for another shape."""
    head_dim, n_heads = (model.config.integer(f"linear_{key}") for key in ("key_head_dim", "num_key_heads"))
    n_values = model.config.integer("linear_num_value_heads") // n_heads * head_dim  # of a key head
    tensor, n_run = model.take(name), 2 * head_dim + 2 * n_values
    model.checkpoint.check_shape(name, (n_heads * n_run, model.n_embd))
    starts, sizes = (0, head_dim, 2 * head_dim), (head_dim, head_dim, n_values)
    qkv = [_of_heads(n_run, start, n, n_heads) for start, n in zip(starts, sizes, strict=True)]
    gate = _of_heads(n_run, n_run - n_values, n_values, n_heads)
    return [
        replace(_taken(tensor, np.concatenate(qkv)), name=f"{ours}attn_qkv.weight"),
        replace(_taken(tensor, gate), name=f"{ours}attn_gate.weight"),
    ]


def _of_heads(n_run: int, start: int, n: int, n_heads: int) -> NDArray[np.int64]:
    """Rows start..start + n - 1 of the run of each head."""
    return (np.arange(n_heads)[:, None] * n_run + start + np.arange(n)).reshape(-1)


def _taken(tensor: SourceTensor, index: NDArray[np.int64]) -> SourceTensor:
    order: Order = lambda places: index[places]  # noqa: E731
    return rows.arranged(tensor, (len(index), tensor.n_in), order)


RECIPES = (
    replace(
        qwen35moe.RECIPES[0],
        name="qwen3next",
        classes=("Qwen3NextForCausalLM", "Qwen3NextModel"),
        model_types=("qwen3_next",),
        defaults={**qwen35moe.DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10},
        recurrent={**qwen35.RECURRENT, "linear_attn.in_proj_ba.weight": "ssm_ba.weight"},
        special=_special,
        changed=qwen35.delta_net,
        keys=qwen35moe.keys,
        pre="qwen2",
    ),
)
