"""A folder of Hugging Face as the source of an export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.overriding import override
from edgeinfer.exporters.architectures import recipe_of
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.checkpoint.adapters import adapter_files
from edgeinfer.exporters.conversion import keys, rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.tensors import tensors
from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.exporters.source import Source, SourceTensor
from edgeinfer.exporters.virtual_file import VirtualModelFile, virtual_tensor
from edgeinfer.exporters.vocabulary import read_vocabulary
from edgeinfer.exporters.vocabulary.chat_templates import template_notes
from edgeinfer.models import read_nextn, read_spec
from edgeinfer.models.gguf import MetadataValue


class HuggingFaceSource(Source):
    """The model of a folder, see Source."""

    def __init__(self, model: Model, metadata: Metadata, tensors: Sequence[SourceTensor]) -> None:
        self._model = model
        self.path = model.checkpoint.path
        self.metadata = metadata
        self.tensors = tensors
        self.notes: Sequence[str] = model.notes

    @property
    @override
    def files(self) -> Sequence[Path]:
        return self._model.checkpoint.files

    @override
    def release(self, name: str) -> None:
        self._model.release()


def open_folder(path: str | Path, vocabulary: bool = True) -> HuggingFaceSource:
    """The language model in a folder with config.json and safetensors files, as GGUF has it.

    vocabulary: without one a file serves sessions, which take token ids.
    Raises ModelNotFound, ModelFileError; UnsupportedModel for what cannot be converted faithfully, with the reason.
    """
    checkpoint = Checkpoint.open(path)
    recipe = recipe_of(checkpoint)
    model = Model(recipe, checkpoint.language())
    _note_parts(checkpoint, model)
    keys.check_config(model)
    found = tensors(model)
    words = read_vocabulary(checkpoint.folder, model.config, found[0].shape[0], recipe.pre) if vocabulary else {}
    if recipe.cuts_vocabulary and words:
        words, found = cut_vocabulary(words, found)
    metadata = keys.metadata(model, checkpoint.folder, found[0].shape[0]) | words
    _check_runs(checkpoint.path, metadata, found)
    for note in template_notes(metadata):
        model.note(note)
    return HuggingFaceSource(model, metadata, found)


def _check_runs(path: Path, metadata: Metadata, tensors: Sequence[SourceTensor]) -> None:
    """Ask whether the engine would run a file with these keys and tensors, before a long export begins.

    path: for messages. Raises UnsupportedModel with the key or tensor of GGUF.
    """
    of_model = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    with VirtualModelFile.of(path, of_model, map(virtual_tensor, tensors)) as file:
        try:
            read_spec(file)
            read_nextn(file)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"this would make a GGUF file that does not run: {error}") from error


def _note_parts(checkpoint: Checkpoint, model: Model) -> None:
    adapters = adapter_files(checkpoint.folder)
    if adapters:
        model.note(
            f"{adapters[0]} is of an adapter (PEFT) beside the model, which is left out: merge it first to have it"
        )
    n_others = len(checkpoint.names) - len(model.checkpoint.names)
    if n_others:
        model.note(f"the language model alone is converted: {n_others} tensors of other parts are left out")
    if checkpoint.quantization not in ("", "mxfp4"):
        model.note(f"the weights are quantised by {checkpoint.quantization}; what is written is made of their floats")


def cut_vocabulary(
    words: Metadata, tensors: Sequence[SourceTensor]
) -> tuple[dict[str, MetadataValue], list[SourceTensor]]:
    """Without the rows of the embeddings, and of the output, after the last token of the vocabulary."""
    tokens = words["tokenizer.ggml.tokens"]
    texts = tokens if isinstance(tokens, list) else []
    n = len(texts)
    while n and texts[n - 1] == f"[PAD{n - 1}]":
        n -= 1
    keys_of = {f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores")}
    cut = {key: value[:n] for key, value in words.items() if key in keys_of and isinstance(value, list)}
    rows_of = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
    found = [rows.part(tensor, 0, n) if tensor.name in rows_of else tensor for tensor in tensors]
    return {**words, **cut}, found
