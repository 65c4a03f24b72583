"""A draft head as a GGUF file; docs/draft-heads.md has its keys, tensors and equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.gguf.writer import Tensor, write_gguf
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import MATCHES, OUTPUT_TYPE, TARGET_LAYERS, fingerprint
from edgeinfer.models.formats import quantize
from edgeinfer.models.gguf import GGMLType, ModelFile

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HeadTypes:
    """Types of a head's matrices."""

    ffn: GGMLType  # of the feed-forward networks and of the output rows
    others: GGMLType  # of the front and of attention, which lose more from few bits

    def of(self, name: str) -> GGMLType:
        """Of a matrix, by its name in a file or in torch."""
        return self.ffn if "ffn_" in name else self.others


def write_draft_head(
    path: Path,
    target: ModelFile,
    spec: ModelSpec,
    sizes: Mapping[str, int | float],
    weights: Mapping[str, Floats],
    draft_vocab: NDArray[np.int32],
    types: HeadTypes,
    taps: bool | tuple[int, ...] = True,
    matches: Sequence[float] = (),
) -> None:
    """Write a head of kind "dgf" for this target; its norms are F32.

    sizes: the keys after "draft-head.", from "embedding_length" to "context_length".  weights: the tensors by name,
    without the rows of the output matrix, which are made of the target's when the head is opened.  draft_vocab:
    (n_logits,) ascending ids of the target.  taps, matches: see HeadSpec.
    Raises UnsupportedModel, ShapeError for weights that the type cannot hold, OSError.
    """
    keys: dict[str, str | int | float | list[int] | list[float]] = {
        "general.architecture": "draft-head",
        "general.type": "adapter",
        "draft-head.kind": "dgf",
        "draft-head.target.architecture": spec.architecture,
        "draft-head.target.name": str(target.metadata.get("general.name") or target.path.stem),
        "draft-head.target.vocab_size": spec.n_vocab,
        "draft-head.target.fingerprint": fingerprint(target),
        f"draft-head.{OUTPUT_TYPE}": types.ffn.name,
        **{f"draft-head.{key}": value for key, value in sizes.items()},
    }
    if not isinstance(taps, bool):
        keys[f"draft-head.{TARGET_LAYERS}"] = list(taps)
    if matches:
        keys[f"draft-head.{MATCHES}"] = list(matches)
    ids = Tensor("draft_vocab", GGMLType.I32, draft_vocab.shape, lambda: [draft_vocab.astype("<i4").view(np.uint8)])
    write_gguf(path, keys, [*(_tensor(name, values, types) for name, values in weights.items()), ids])


def _tensor(name: str, values: Floats, types: HeadTypes) -> Tensor:
    stored = types.of(name) if values.ndim == 2 else GGMLType.F32
    data = quantize(stored, values)
    return Tensor(name, stored, values.shape, lambda: [data])
