"""Kinds of layers: what config.json says of them against what the tensors of the checkpoint are."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.exporters.conversion.model import Model

_ATTENTION = frozenset({"full_attention", "attention"})  # as transformers 5 and older code call it


def check_kinds(model: Model, recurrent: str, by_key: Sequence[bool] | None, key: str) -> None:
    """Raises UnsupportedModel where config.json calls a layer recurrent and its tensors are attention's, or vice versa.

    recurrent: what `layer_types` calls such layers.  by_key: whether each layer is one by another key, None where that
    is missing too. What says nothing, as some files that were saved again do, is not compared: the tensors tell.
    """
    types = model.layer_types()
    if types is not None:
        for layer, kind in enumerate(types):
            if kind not in _ATTENTION | {recurrent}:
                model.refuse("layer_types", f"must be {recurrent} or full_attention: found {kind:.80} in layer {layer}")
        by_key, key = [kind == recurrent for kind in types], "layer_types"
    for layer, is_recurrent in enumerate(by_key or []):
        if is_recurrent != model.is_recurrent(layer):
            kinds = (recurrent, "full_attention")
            said, found = kinds if is_recurrent else kinds[::-1]
            model.refuse(key, f"says that layer {layer} is {said}, and its tensors are those of {found}")
