"""Whether edgeinfer would run the GGUF file of a conversion, asked before a long export begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeinfer.errors import UnsupportedModel
from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.exporters.source import SourceTensor
from edgeinfer.exporters.virtual_file import VirtualModelFile, virtual_tensor
from edgeinfer.models import ModelSpec, read_spec


def check_runs(path: Path, metadata: Metadata, tensors: Sequence[SourceTensor]) -> ModelSpec:
    """What the engine understands of a file with these keys and tensors: shapes, rotation, experts.

    path: for messages. Raises UnsupportedModel with the key or tensor of GGUF.
    """
    of_model = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    with VirtualModelFile.of(path, of_model, map(virtual_tensor, tensors)) as file:
        try:
            return read_spec(file)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"this would make a GGUF file that does not run: {error}") from error
