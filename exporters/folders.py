"""Folders of Hugging Face as sources: models, assistants of Gemma 4, and EAGLE-3 heads beside their target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.drafters.eagle3 import eagle3_source, is_eagle3
from edgeinfer.exporters.drafters.gemma4_assistant import assistant_source, is_assistant
from edgeinfer.exporters.huggingface import open_folder
from edgeinfer.exporters.source import Source, open_source


@contextmanager
def open_model_or_head(path: Path, target: Path | None) -> Iterator[Source]:
    """The model or the head in a folder. target: the model that a head drafts for. See open_source."""
    checkpoint = Checkpoint.open(path)
    if is_eagle3(checkpoint):
        if target is None:
            raise InvalidArgument(f"{path} is an EAGLE-3 draft head: name the model that it belongs to (--target)")
        with open_source(target) as beside:
            yield eagle3_source(checkpoint, beside)
        return
    yield assistant_source(checkpoint) if is_assistant(checkpoint) else open_folder(path)
