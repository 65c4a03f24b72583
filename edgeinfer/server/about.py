"""What clients are told of a model: sizes, type of weights, what it can do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.common.errors import TemplateError
from edgeinfer.engine import Engine
from edgeinfer.exporters.gguf.file_types import name_of_file_type
from edgeinfer.models.gguf import ModelFile

_SIZES = ("context_length", "block_count", "embedding_length")


@dataclass(frozen=True)
class About:
    """What the header of a file says.  n_bytes: of the file.  modified: seconds since 1970."""

    architecture: str
    quantisation: str
    n_parameters: int
    n_bytes: int
    modified: float
    template: str  # of chats, "" without one
    n_ctx_train: int
    n_layers: int
    n_embd: int

    @property
    def size(self) -> str:
        """Number of parameters, such as "1.5B"."""
        for unit, n in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
            if self.n_parameters >= n:
                return f"{self.n_parameters / n:.1f}{unit}"
        return str(self.n_parameters)


def about(path: Path) -> About:
    """What the header of a model says. Raises ModelFileError, OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with ModelFile.open(path) as file:
            number = file.metadata.get("general.file_type")
            quantisation = name_of_file_type(number) if isinstance(number, int) else None
            n = sum(int(info.n_elements) for info in file.tensors.values())
            architecture = str(file.metadata.get("general.architecture") or "-")
            template = file.metadata.get("tokenizer.chat_template")
            sizes = [file.metadata.get(f"{architecture}.{key}") for key in _SIZES]
            return About(
                architecture,
                quantisation or "unknown",
                n,
                file.n_bytes,
                path.stat().st_mtime,
                template if isinstance(template, str) else "",
                *(size if isinstance(size, int) else 0 for size in sizes),
            )


@dataclass(frozen=True)
class Abilities:
    """What a model can do.

    chats, reasons: whether it has a chat template, and marks its reasoning. What chats calls tools, too: where the
    template has no place for them they are in the system message.
    """

    chats: bool
    reasons: bool


def abilities(engine: Engine) -> Abilities:
    """What a model can do."""
    try:
        format = engine.output_format
    except TemplateError:
        return Abilities(False, False)
    return Abilities(True, bool(format.reasoning) or format.uses_channels)
