"""What the names of GGUF files say: the quantisation, the part of a split model, and whether a file is a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
_NO_MODELS = ("mmproj", "imatrix")  # projectors of images, importance matrices
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_[A-Z]+)*|I2_S))(?![A-Za-z0-9_])",
    re.IGNORECASE,
)


def stem_of(name: str) -> str:
    """The name, which may have folders, without .gguf and the number of a part."""
    stem = name[: -len(".gguf")] if is_gguf(name) else name
    split = _SPLIT.fullmatch(stem)
    return stem if split is None else split[1]


def is_gguf(name: str) -> bool:
    """Whether the name ends as those of GGUF files do."""
    return name.lower().endswith(".gguf")


def is_model(name: str) -> bool:
    """Whether a GGUF file of this name is a language model or a part of one."""
    base = name.replace("\\", "/").rpartition("/")[2].lower()
    return is_gguf(name) and not any(word in base for word in _NO_MODELS)


def quant_of(name: str) -> str | None:
    """The quantisation that a name, or else a folder in it, tells, in capitals: "Q4_K_M"; None where there is none."""
    for part in reversed(stem_of(name).split("/")):
        if found := _QUANT.findall(part):
            return str(found[-1]).upper()
    return None


def has_quant(name: str, quant: str) -> bool:
    """Whether a quantisation is a word of the name, in capitals or not; Q4_K is none of Q4_K_M."""
    word = rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(word, stem_of(name), re.IGNORECASE) is not None


def models_among(names: Iterable[str]) -> dict[str, Sequence[str]]:
    """The files of each model among these names, by its first one that is there; a split model has several.

    Parts that are missing are left out, see missing_parts.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name in filter(is_model, names):
        split = _SPLIT.fullmatch(name[: -len(".gguf")])
        key = (name, "") if split is None else (split[1], split[3])
        found.setdefault(key, []).append(name)
    return {min(files): sorted(files) for files in found.values()}


def missing_parts(files: Sequence[str]) -> Sequence[int]:
    """Numbers from 1 on of the parts of a split model that are not among its files."""
    split = [_SPLIT.fullmatch(name[: -len(".gguf")]) for name in files]
    if not split or split[0] is None:
        return []
    there = {int(part[2]) for part in split if part is not None}
    return sorted({*range(1, int(split[0][3]) + 1)} - there)
