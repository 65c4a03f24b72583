"""Names of the tensors of a language model, without what models that also see or hear put in front of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgeinfer.common.errors import ModelFileError

# Where the language model is, as files call it: most nested first.
_FRONTS = (
    "model.language_model.model.",
    "language_model.model.",
    "model.language_model.",
    "model.text_model.",
    "text_model.model.",
    "language_model.",
    "model.model.",
    "model.",
    "backbone.",
    "",
)
_INNER = re.compile(
    r"(embed_tokens|embeddings|layers\.\d+|norm|norm_f|embedding_norm|embed_tokens_per_layer|per_layer_model_projection|"
    r"per_layer_projection_norm)\..+"
)
_USUAL = {"embeddings.weight": "embed_tokens.weight", "norm_f.weight": "norm.weight"}  # what Nemotron calls otherwise
_OTHER_PARTS = re.compile(r"(^|\.)(vision|visual|audio|image|multi_modal|mm_|embed_vision|embed_audio)")
_OUTER = re.compile(r"(?:.*\.)?(lm_head\..+)")


def language_names(names: Iterable[str]) -> dict[str, str]:
    """Names of the tensors of a language model: "model.layers.…", "lm_head.weight", to the names that are stored.

    Tensors of other parts, such as "vision_tower.…", are left out. Raises ModelFileError where two have one name.
    """
    found: dict[str, str] = {}
    names = list(names)
    front = next((front for front in _FRONTS if any(_is_inner(name, front) for name in names)), None)
    if front is None:
        return {name: name for name in names}
    for name in names:
        outer = _OUTER.fullmatch(name)
        if _is_inner(name, front):
            inner = name.removeprefix(front)
            ours = "model." + _USUAL.get(inner, inner)
        elif outer:
            ours = outer[1]
        elif _is_of_other_part(name):
            continue
        else:
            ours = name
        if ours in found:
            raise ModelFileError(f"tensors {found[ours]:.80} and {name:.80} would both be {ours:.80}")
        found[ours] = name
    return found


def _is_inner(name: str, front: str) -> bool:
    return name.startswith(front) and _INNER.fullmatch(name.removeprefix(front)) is not None


def _is_of_other_part(name: str) -> bool:
    return _OTHER_PARTS.search(name) is not None
