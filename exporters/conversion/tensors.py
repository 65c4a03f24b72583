"""The tensors of a checkpoint under the names and in the shapes of GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.rope import rope_tensors
from edgeinfer.exporters.source import SourceTensor

_PIECE_BYTES = 32 << 20
_COMPUTED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # old files keep it, it follows from config.json
_KEPT_EXACT = re.compile(r".*(_norm|ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d|shortconv\.conv)\.weight")
_LAYER = re.compile(r"blk\.\d+\.")
_PERMUTED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def tensors(model: Model) -> list[SourceTensor]:
    """All tensors of the file. Raises ModelFileError for a missing one, UnsupportedModel for one without a place."""
    found = [named(model, embeddings_of(model), "token_embd.weight"), *_output(model)]
    found.append(named(model, *model.recipe.final_norm))
    found += rope_tensors(model)
    for block in range(len(model.blocks)):
        found += layer_tensors(model, block)
    found += [finished(model, tensor) for tensor in model.recipe.special(model)]
    check_all_taken(model)
    return found


def named(model: Model, theirs: str, ours: str) -> SourceTensor:
    """A tensor that becomes one tensor of the GGUF file."""
    return finished(model, replace(model.take(theirs), name=ours))


def finished(model: Model, tensor: SourceTensor) -> SourceTensor:
    """The last steps of every tensor, once it has its GGUF name."""
    recipe, name = model.recipe, tensor.name
    tensor = recipe.changed(model, tensor)
    if recipe.norm_shift and name.endswith("norm.weight") and _LAYER.sub("", name) not in recipe.plain_norms:
        tensor = rows.shifted(tensor, recipe.norm_shift)
    if recipe.interleaved and _PERMUTED.fullmatch(name):
        tensor = _permuted(model, tensor)
    is_small = len(tensor.shape) == 1 or name.endswith(".bias") or _KEPT_EXACT.fullmatch(name)
    return rows.as_f32(tensor) if is_small else tensor


def _permuted(model: Model, tensor: SourceTensor) -> SourceTensor:
    n_heads = model.n_heads if ".attn_q." in tensor.name else model.n_kv_heads
    if tensor.shape[0] != n_heads * model.head_dim:
        raise UnsupportedModel(
            f"{model.checkpoint.path}: tensor {tensor.name} must have {n_heads} heads of {model.head_dim} rows: found "
            f"{tensor.shape}"
        )
    return rows.pairs_together(tensor, model.head_dim)


def layer_tensors(model: Model, layer: int) -> list[SourceTensor]:
    """Those of one layer, or of a block after the layers. Raises ModelFileError for a missing one."""
    recipe, theirs, ours = model.recipe, model.blocks[layer], f"blk.{layer}."
    always = {**recipe.norms, **(recipe.recurrent if model.is_recurrent(layer) else recipe.attention)}
    optional = dict(recipe.optional)
    found = []
    if recipe.experts is not None and model.has_experts(layer):
        always |= {recipe.experts.router: "ffn_gate_inp.weight", **recipe.experts.more}
        optional |= recipe.experts.optional
        found = _experts(model, layer)
    else:
        always |= recipe.dense
    names: Mapping[str, str] = {**always, **{name: to for name, to in optional.items() if theirs + name in model}}
    return [*(named(model, theirs + name, ours + to) for name, to in names.items()), *found]


def _experts(model: Model, layer: int) -> list[SourceTensor]:
    """The matrices of all experts, three tensors."""
    names = model.recipe.experts
    assert names is not None
    module, ours = model.blocks[layer] + names.module, f"blk.{layer}.ffn_{{}}_exps.weight"
    if f"{module}.gate_up_proj" in model:
        if names.joined:
            roles = {"gate_up": "gate_up_proj", "down": "down_proj"}
            return [replace(model.take(f"{module}.{of}"), name=ours.format(role)) for role, of in roles.items()]
        return _joined_experts(model, f"{module}.gate_up_proj", f"{module}.down_proj", ours)
    found = []
    for theirs, kind in names.matrices.items():
        each = [model.take(f"{module}.{expert}.{theirs}.weight") for expert in range(model.n_experts)]
        for tensor in each:
            model.checkpoint.check_shape(tensor.name, each[0].shape)
        found.append(replace(rows.stacked(each), name=ours.format(kind)))
    return found


def _joined_experts(model: Model, gate_up: str, down: str, ours: str) -> list[SourceTensor]:
    """The same of tensors that have all experts, gate above up."""
    both = model.take(gate_up)
    if len(both.shape) != 3 or both.shape[1] % 2:
        model.checkpoint.refuse(gate_up, f"must have three axes, the second one even: found {both.shape}")
    n = both.shape[1] // 2
    return [
        replace(rows.part(both, 0, n), name=ours.format("gate")),
        replace(rows.part(both, n, 2 * n), name=ours.format("up")),
        replace(model.take(down), name=ours.format("down")),
    ]


def _is_tied(model: Model) -> bool:
    """Whether embeddings and output matrix are one, as config.json or the architecture says it."""
    return model.config.flag("tie_word_embeddings", False)


def embeddings_of(model: Model) -> str:
    """The name that the embeddings have: that of the output matrix in tied checkpoints that store it alone.

    Raises ModelFileError where there are none.
    """
    if EMBEDDINGS in model or OUTPUT not in model:
        return EMBEDDINGS
    if not _is_tied(model) and model.recipe.output != "tied":
        model.checkpoint.refuse(
            EMBEDDINGS,
            f"is missing, and {OUTPUT} stands for it only where config.json says tie_word_embeddings true: it does not",
        )
    return OUTPUT


def _output(model: Model) -> list[SourceTensor]:
    """The output matrix, none where it is that of the embeddings."""
    kind, name = model.recipe.output, "output.weight"
    tied = _is_tied(model)
    if EMBEDDINGS not in model and kind != "required":
        return []
    if OUTPUT not in model:
        if model.given.get("tie_word_embeddings") is False:
            model.checkpoint.refuse(OUTPUT, "is missing, and config.json says tie_word_embeddings false")
        if kind != "required":
            return []
        model.note("the output matrix is a copy of the embeddings, as GGUF needs one in this architecture")
        return [named(model, EMBEDDINGS, name)]
    if (not tied and kind != "tied") or EMBEDDINGS not in model:
        return [named(model, OUTPUT, name)]
    if kind != "required" and _are_equal(model.take(OUTPUT), model.take(EMBEDDINGS)):
        return []
    if kind == "tied":
        model.checkpoint.refuse(OUTPUT, f"must equal {EMBEDDINGS} in {model.recipe.name}: found other numbers")
    if kind == "optional":
        model.note("tie_word_embeddings is true, but lm_head.weight differs from the embeddings, so both are written")
    return [named(model, OUTPUT, name)]


def _are_equal(one: SourceTensor, other: SourceTensor) -> bool:
    if one.shape != other.shape:
        return False
    step = max(1, _PIECE_BYTES // (4 * one.n_in))
    runs = ((first, min(first + step, one.n_rows)) for first in range(0, one.n_rows, step))
    return all(np.array_equal(one.rows(*run), other.rows(*run)) for run in runs)


def check_all_taken(model: Model) -> None:
    """Raises UnsupportedModel for a tensor that would be lost, which could change every answer."""
    left = sorted(name for name in set(model.checkpoint.names) - model.taken if not _COMPUTED.fullmatch(name))
    if left:
        raise UnsupportedModel(
            f"{model.checkpoint.path}: {len(left)} tensors have no place in a {model.recipe.name} model, first "
            f"{left[0]:.120} {model.checkpoint.shape(left[0])}"
        )
