"""A model again with its tokens in another order, so that only their text tells that they are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgeinfer.exporters.gguf.writer import Tensor, write_gguf
from edgeinfer.models.arrays import Array
from edgeinfer.models.gguf import MetadataValue, ModelFile

_BY_TOKEN = ("token_embd.weight", "output.weight")


def write_reordered(path: Path, source: Path, order: Sequence[int], **changes: MetadataValue) -> Path:
    """Write the model with token order[i] as token i, and give back its path. changes: of keys, `__` for a point."""
    places = {old: new for new, old in enumerate(order)}
    with ModelFile.open(source) as file:
        metadata = dict(file.metadata)
        for name in ("tokens", "token_type"):
            values = metadata[f"tokenizer.ggml.{name}"]
            assert isinstance(values, Array)
            metadata[f"tokenizer.ggml.{name}"] = [values[old] for old in order]  # type: ignore[assignment]
        for name in ("bos", "eos", "padding"):
            metadata[f"tokenizer.ggml.{name}_token_id"] = places[
                int(str(file.metadata[f"tokenizer.ggml.{name}_token_id"]))
            ]
        metadata |= {key.replace("__", "."): value for key, value in changes.items()}
        tensors = []
        for name, info in file.tensors.items():
            data = file.data(name).copy()
            if name in _BY_TOKEN:
                data = data.reshape(info.shape[0], -1)[list(order)].reshape(-1)
            tensors.append(Tensor(name, info.type, info.shape, lambda data=data: [np.ascontiguousarray(data)]))  # type: ignore[misc]
        write_gguf(path, metadata, tensors)
    return path
