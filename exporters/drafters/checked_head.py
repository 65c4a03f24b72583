"""Whether the engine would run a draft head, asked before a long export begins."""

from __future__ import annotations

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.huggingface import HuggingFaceSource
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models.draft_head import read_head


def checked_head(source: HuggingFaceSource) -> HuggingFaceSource:
    """The head as it is. Raises UnsupportedModel with the key or tensor of GGUF that the engine would refuse."""
    with model_file_of(source) as file:
        file.path = source.path
        try:
            read_head(file)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"this would make a GGUF file that does not run: {error}") from error
    return source
