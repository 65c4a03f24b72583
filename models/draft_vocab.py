"""The tokens that a drafter has logits for, where these are not all: a tensor of ids, one for each row of its output.

Draft heads have it, and draft models whose output matrix was cut to frequent tokens (FR-Spec, Zhao et al.,
arXiv:2502.14856). Their embeddings are whole: any token may stand in the text.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.gguf import ModelFile

DRAFT_VOCAB = "draft_vocab"
AS_STORED = "edgeinfer.draft.as_stored"  # a key: the types were chosen for drafting, and none is to be rounded further


def read_draft_vocab(file: ModelFile, name: str, kind: Literal["I32", "I64"], n_vocab: int) -> NDArray[np.int32]:
    """(n_logits,) the ascending ids in a tensor of that type. Raises UnsupportedModel."""
    info = file.tensors.get(name)
    if info is None or info.type.name != kind or len(info.shape) != 1:
        found = "none" if info is None else f"{info.type.name} {info.shape}"
        raise UnsupportedModel(f"{file.path}: tensor {name} must be {kind} (n_logits,): found {found}")
    ids = np.frombuffer(file.data(name).tobytes(), dtype="<i4" if kind == "I32" else "<i8")
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if falls.size:
        first = int(falls[0])
        raise UnsupportedModel(
            f"{file.path}: tensor {name} must be ascending: found {ids[first + 1]} behind {ids[first]}"
        )
    if ids[0] < 0 or ids[-1] >= n_vocab:
        raise UnsupportedModel(f"{file.path}: tensor {name} must be ids in 0..{n_vocab - 1}: found {ids[0]}..{ids[-1]}")
    return ids.astype(np.int32)


def is_as_stored(file: ModelFile) -> bool:
    """Whether a draft model is to have its matrices in memory in the types of its file."""
    return file.metadata.get(AS_STORED) is True


def storage_facts(file: ModelFile) -> tuple[str, ...]:
    """What measurements of a draft model depend on beside its tensors and where it runs."""
    return ("as stored",) if is_as_stored(file) else ()


def has_draft_vocab(file: ModelFile) -> bool:
    """Whether a model has logits for some of its tokens only, and can do nothing but draft."""
    return DRAFT_VOCAB in file.tensors


def draft_vocab_of(file: ModelFile, n_vocab: int) -> NDArray[np.int32] | None:
    """The tokens that a draft model has logits for, None where it has them for all. Raises UnsupportedModel."""
    return read_draft_vocab(file, DRAFT_VOCAB, "I32", n_vocab) if has_draft_vocab(file) else None
