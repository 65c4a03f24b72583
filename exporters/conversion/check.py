"""Whether edgeinfer would run the GGUF file of a conversion, asked before a long export begins."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from edgeinfer.errors import UnsupportedModel
from edgeinfer.exporters.gguf.writer import Metadata, layout
from edgeinfer.exporters.source import Bytes, SourceTensor
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.formats import quantize
from edgeinfer.models.gguf import GGMLType, ModelFile


def check_runs(path: Path, metadata: Metadata, tensors: Sequence[SourceTensor]) -> ModelSpec:
    """What the engine understands of a file with these keys and tensors: shapes, rotation, experts.

    path: for messages. Raises UnsupportedModel with the key or tensor of GGUF.
    """
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        of_model = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
        header.write_bytes(layout(of_model, []).header)
        with ModelFile.open(header) as file:
            for tensor in tensors:
                file.define(tensor.name, tensor.type, tensor.shape, partial(_bytes, tensor))
            file.path = path
            try:
                return read_spec(file)
            except UnsupportedModel as error:
                raise UnsupportedModel(f"this would make a GGUF file that does not run: {error}") from error


def _bytes(tensor: SourceTensor, first: int, last: int) -> Bytes:
    """Of a whole tensor of F32, which those are that say something about the rotation."""
    return quantize(GGMLType.F32, tensor.rows(0, tensor.n_rows))[first:last]
