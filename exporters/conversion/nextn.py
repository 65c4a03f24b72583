"""The block of a checkpoint that drafts (multi-token prediction), as transformers' `mtp.*`, kept as GGUF's `nextn.*`.

It reads the embedding of a token beside the hidden state before it, both normed, through one matrix (fc), and is a
layer like those with attention. Texts do not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.source import SourceTensor

_FRONT = re.compile(r"((?:model\.)?mtp\.).+")
_NAMES = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head_norm.weight",
}
_OPTIONAL = {"embed_tokens.weight": "embed_tokens.weight"}  # where it has embeddings of its own


def nextn_blocks(model: Model) -> Sequence[str]:
    """What stands before the names of its layer; none where there is no such block, or one that GGUF cannot have."""
    names = _names(model)
    if not names:
        if model.config.integer("mtp_num_hidden_layers", 0, least=0):
            model.note("config.json names a block that drafts (MTP), which the checkpoint does not have")
        return ()
    layers = {match[1] for name in names if (match := re.match(r".*?mtp\.layers\.(\d+)\.", name))}
    if layers != {"0"}:
        model.taken |= set(names)
        model.note(f"the block that drafts (MTP) has {len(layers)} layers, and GGUF has it with one: it is left out")
        return ()
    return (f"{_front(names)}layers.0.",)


def nextn_tensors(model: Model) -> list[SourceTensor]:
    """Those of the block beside its layer, under the names of GGUF. Raises ModelFileError for a missing one."""
    if len(model.blocks) == model.n_layers:
        return []
    front, ours = _front(_names(model)), f"blk.{model.n_layers}.nextn."
    names = {**_NAMES, **{name: to for name, to in _OPTIONAL.items() if front + name in model}}
    return [replace(model.take(front + name), name=ours + to) for name, to in names.items()]


def _names(model: Model) -> list[str]:
    return [name for name in model.checkpoint.names if _FRONT.fullmatch(name)]


def _front(names: Sequence[str]) -> str:
    match = _FRONT.fullmatch(names[0])
    assert match is not None
    return match[1]
