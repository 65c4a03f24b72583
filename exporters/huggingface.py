"""A folder of Hugging Face as the source of an export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeinfer.exporters.architectures import recipe_of
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.conversion import keys, rows
from edgeinfer.exporters.conversion.check import check_runs
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.tensors import tensors
from edgeinfer.exporters.gguf import Metadata
from edgeinfer.exporters.source import SourceTensor
from edgeinfer.exporters.vocabulary import read_vocabulary
from edgeinfer.models.gguf import MetadataValue

_OF_TOKENS = ("tokens", "token_type", "scores")
_UNUSED = 5  # in tokenizer.ggml.token_type


class HuggingFaceSource:
    """The model of a folder, see Source."""

    def __init__(self, model: Model, metadata: Metadata, tensors: Sequence[SourceTensor]) -> None:
        self._checkpoint = model.checkpoint
        self.path = model.checkpoint.path
        self.metadata = metadata
        self.tensors = tensors
        self.notes: Sequence[str] = model.notes

    @property
    def files(self) -> Sequence[Path]:
        """See Source."""
        return self._checkpoint.files

    def release(self, name: str) -> None:
        """See Source.release. Of all tensors: what one is made of is known to its recipe alone."""
        self._checkpoint.release_all()


def open_folder(path: str | Path, vocabulary: bool = True) -> HuggingFaceSource:
    """The language model in a folder with config.json and safetensors files, as GGUF has it.

    vocabulary: without one a file serves sessions, which take token ids.
    Raises ModelNotFound, ModelFileError; UnsupportedModel for what cannot be converted faithfully, with the reason.
    """
    checkpoint = Checkpoint.open(path)
    recipe = recipe_of(checkpoint)
    model = Model(recipe, checkpoint.language())
    recipe.check(model)
    found = tensors(model)
    words = read_vocabulary(checkpoint.folder, model.config, found[0].shape[0]) if vocabulary else {}
    if recipe.cuts_vocabulary and words:
        words, found = _cut(words, found)
    metadata = keys.metadata(model, checkpoint.folder, found[0].shape[0]) | words
    check_runs(checkpoint.path, metadata, found)
    return HuggingFaceSource(model, metadata, found)


def _cut(words: Metadata, tensors: Sequence[SourceTensor]) -> tuple[dict[str, MetadataValue], list[SourceTensor]]:
    """Without the rows of the embeddings, and of the output, behind the last token of the vocabulary."""
    of_tokens = {key: words[f"tokenizer.ggml.{key}"] for key in _OF_TOKENS if f"tokenizer.ggml.{key}" in words}
    kinds = list(of_tokens["token_type"])  # type: ignore[arg-type]
    n = max(id for id, kind in enumerate(kinds) if kind != _UNUSED) + 1
    cut: dict[str, MetadataValue] = {f"tokenizer.ggml.{key}": list(each)[:n] for key, each in of_tokens.items()}
    rows_of = ("token_embd.weight", "output.weight")
    found = [rows.part(tensor, 0, n) if tensor.name in rows_of else tensor for tensor in tensors]
    return {**words, **cut}, found
