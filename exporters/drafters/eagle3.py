"""EAGLE-3 draft heads of Hugging Face (Li et al., arXiv:2503.01840), as llama.cpp's converter writes them.

A head is one layer, whose tensors checkpoints call `midlayer.`, `layers.0.` or the same after `model.`. What it lacks
is its target's: the vocabulary always, embeddings and output matrix where the checkpoint has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.architectures import all_recipes
from edgeinfer.exporters.checkpoint import Checkpoint, Config
from edgeinfer.exporters.conversion import keys, rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import NORMS, Keys, Recipe
from edgeinfer.exporters.conversion.rope import rope_tensors
from edgeinfer.exporters.conversion.tensors import EMBEDDINGS, OUTPUT, check_all_taken, layer_tensors, named
from edgeinfer.exporters.drafters.checked_head import checked_head
from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.exporters.huggingface import HuggingFaceSource
from edgeinfer.exporters.source import Source, SourceTensor
from edgeinfer.models.arrays import Array
from edgeinfer.models.draft_head import EAGLE3, EAGLE3_VOCAB
from edgeinfer.models.gguf import GGMLType

_LAYERS_OF_TARGET = 3  # whose rows a feature is made of
_DRAFT_TO_TARGET, _IS_DRAFTED = "d2t", "t2d"
_IDS = "eagle_aux_hidden_state_layer_ids"
_OPTIONS = {  # of eagle_config, with the values of the network that all readers of these heads compute
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
RECIPE = Recipe(
    name=EAGLE3,
    classes=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    model_types=(),
    fixed={"num_hidden_layers": (1,), "hidden_act": (None, "silu"), "use_sliding_window": (None, False)},
    reads=frozenset(
        f"draft_vocab_size target_hidden_size norm_before_residual norm_before_fc {_IDS} eagle_config sliding_window "
        "max_window_layers transformer_layer_config speculators_config speculators_model_type".split()
    ),
    norms={**NORMS, "hidden_norm.weight": "attn_norm_2.weight"},
    interleaved=True,
    rope_kinds=frozenset({"llama3"}),
)


@dataclass(frozen=True)
class _Target:
    """What a head must know of its target."""

    source: Source
    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    words: Metadata  # its vocabulary, as keys of GGUF

    @classmethod
    def of(cls, source: Source) -> _Target:
        """Raises UnsupportedModel for what is no whole model with a vocabulary."""
        architecture = str(source.metadata.get("general.architecture"))
        n_layers = source.metadata.get(f"{architecture}.block_count")
        shape = next((tensor.shape for tensor in source.tensors if tensor.name == "token_embd.weight"), None)
        words = {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.")}
        tokens = words.get("tokenizer.ggml.tokens")
        if not isinstance(n_layers, int) or shape is None or not isinstance(tokens, Array | list):
            raise UnsupportedModel(f"{source.path}: must be a whole language model with a vocabulary, to be a target")
        if len(tokens) != shape[0]:
            raise UnsupportedModel(
                f"{source.path}: must have as many tokens as embeddings to be the target of an EAGLE-3 head: found "
                f"{len(tokens)} and {shape[0]}"
            )
        return cls(source, architecture, n_layers, shape[1], shape[0], words)


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an EAGLE-3 head: it says how many tokens it drafts, and has one layer."""
    config = _whole_config(checkpoint.config)
    return "draft_vocab_size" in config and config.get("num_hidden_layers") == 1


def eagle3_source(checkpoint: Checkpoint, target: Source) -> HuggingFaceSource:
    """A head as llama.cpp's converter writes it, and as edgeinfer reads it beside its target.

    Raises ModelFileError; UnsupportedModel for a head of another target, or that the engine would not run.
    """
    beside, head = _Target.of(target), _renamed(checkpoint)
    model = Model(RECIPE, head)
    keys.check_config(model)
    _check_target(model, beside)
    found = _tensors(model, beside)
    metadata: Keys = {**keys.metadata(model, head.folder, beside.n_vocab), **_own_keys(model, beside), **beside.words}
    return checked_head(HuggingFaceSource(model, metadata, found))


def _whole_config(config: Config) -> Config:
    """With the sizes that Red Hat's speculators keep in an object of their own."""
    part = config.part("transformer_layer_config")
    return config if part is None else Config({**config.values, **part.values}, config.path)


def _renamed(checkpoint: Checkpoint) -> Checkpoint:
    """The same with names as a model of one layer has them. Raises ModelFileError where two have one name."""
    names: dict[str, str] = {}
    for stored in checkpoint.names:
        ours = stored.removeprefix("model.")
        ours = f"layers.0.{ours.removeprefix('midlayer.')}" if ours.startswith("midlayer.") else ours
        ours = f"model.{ours}" if ours.startswith(("layers.", "embed_tokens.", "norm.")) else ours
        if ours in names:
            raise ModelFileError(f"{checkpoint.path}: tensors {names[ours]:.80} and {stored:.80} would both be {ours}")
        names[ours] = stored
    return checkpoint.renamed(names, _whole_config(checkpoint.config))


# ---- Keys ------------------------------------------------------------------------------------------------------------


def _own_keys(model: Model, target: _Target) -> Keys:
    values: Keys = {
        "target_layers": _layers_of_target(model, target),
        "target_hidden_size": target.n_embd,
        "norm_before_residual": model.config.flag("norm_before_residual", False),
        "norm_before_fc": model.config.flag("norm_before_fc", False),
    }
    return {f"{EAGLE3}.{key}": value for key, value in values.items()}


def _layers_of_target(model: Model, target: _Target) -> list[int]:
    """Layers whose inputs a feature is made of: as config.json says, or those of the paper.

    The list in eagle_config, of SpecForge and ModelOpt, counts outputs of layers, which SGLang and TensorRT-LLM turn
    into inputs; the list at the top counts inputs, as vLLM and llama.cpp do.
    """
    own = model.config.part("eagle_config")
    found = [2, target.n_layers // 2, target.n_layers - 3]
    if model.config.get(_IDS):
        found = model.config.integers(_IDS, _LAYERS_OF_TARGET)
    elif own is not None and own.get(_IDS):
        found = [layer + 1 for layer in own.integers(_IDS, _LAYERS_OF_TARGET)]
    if not all(1 <= layer <= target.n_layers for layer in found):
        model.refuse(
            _IDS,
            f"must be {_LAYERS_OF_TARGET} layers in 1..{target.n_layers} of {target.source.path}: found "
            f"{', '.join(map(str, found))}",
        )
    return found


# ---- The target ------------------------------------------------------------------------------------------------------


def _check_target(model: Model, target: _Target) -> None:
    """Raises UnsupportedModel where the checkpoint says that it is a head for another model."""
    path = target.source.path
    fc = model.checkpoint.shape("fc.weight")
    expected = {
        "target_hidden_size": (model.config.get("target_hidden_size"), target.n_embd, "rows"),
        "vocab_size": (model.config.get("vocab_size"), target.n_vocab, "tokens"),
        "fc.weight": (fc[-1] if fc else 0, _LAYERS_OF_TARGET * target.n_embd, "inputs"),
    }
    for what, (found, its, unit) in expected.items():
        if found is not None and found != its:
            raise UnsupportedModel(
                f"{model.checkpoint.path}: {what} is {found}, but {path} would need {its} {unit}: use the target that "
                "the head was trained for"
            )
    for name in _architectures_of_target(model.config):
        known = {recipe.name for recipe in all_recipes() if name in recipe.classes}
        if known and target.architecture not in known:
            raise UnsupportedModel(
                f"{model.checkpoint.path}: is a head for a {name}, but {path} is a {target.architecture}: use the "
                "target that the head was trained for"
            )
    own = model.config.part("eagle_config")
    for key, value in _OPTIONS.items() if own is not None else ():
        if own is not None and own.get(key) not in (None, value):
            own.refuse(key, f"must be {str(value).lower()}")


def _architectures_of_target(config: Config) -> list[str]:
    part = config.part("speculators_config")
    verifier = part.part("verifier") if part is not None else None
    return verifier.texts("architectures") if verifier is not None and "architectures" in verifier else []


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def _tensors(model: Model, target: _Target) -> list[SourceTensor]:
    found = [named(model, EMBEDDINGS, "token_embd.weight")] if EMBEDDINGS in model else []
    found += _output(model, target)
    found += [named(model, "model.norm.weight", "output_norm.weight"), named(model, "fc.weight", "fc.weight")]
    if model.config.flag("norm_before_fc", False):
        found.append(named(model, "input_norm.weight", "enc.output_norm.weight"))
    found += [*rope_tensors(model), *layer_tensors(model, 0)]
    check_all_taken(model)
    return found


def _output(model: Model, target: _Target) -> list[SourceTensor]:
    """The output matrix, and the tokens of its rows in ascending order."""
    output = [named(model, OUTPUT, "output.weight")] if OUTPUT in model else []
    if _DRAFT_TO_TARGET not in model:
        if _IS_DRAFTED in model:
            model.checkpoint.refuse(_DRAFT_TO_TARGET, f"is missing, but there is {_IS_DRAFTED}")
        return output
    if not output:
        model.checkpoint.refuse(OUTPUT, f"is missing, whose rows {_DRAFT_TO_TARGET} has the tokens of")
    ids = _token_ids(model, target, output[0].shape[0])
    order = np.argsort(ids, kind="stable")
    if np.any(order != np.arange(len(ids))):
        model.note("the rows of the output matrix are put in the order of their tokens")
        output = [rows.arranged(output[0], output[0].shape, lambda some: order[some])]
    return [*output, _integers(EAGLE3_VOCAB, ids[order])]


def _token_ids(model: Model, target: _Target, n_rows: int) -> NDArray[np.int64]:
    """The target's token of each row of the output matrix: d2t has what is to be added to the row's number."""
    checkpoint, name = model.checkpoint, _DRAFT_TO_TARGET
    model.taken.add(name)
    offsets = checkpoint.integers(name).reshape(-1)
    if len(offsets) != n_rows:
        checkpoint.refuse(name, f"must have a number for each of the {n_rows} rows of lm_head: found {len(offsets)}")
    ids = offsets + np.arange(n_rows)
    if np.any((ids < 0) | (ids >= target.n_vocab)):
        checkpoint.refuse(
            name,
            f"must give ids in 0..{target.n_vocab - 1}, those of {target.source.path}: found {ids.min()}..{ids.max()}",
        )
    if len(np.unique(ids)) != n_rows:
        checkpoint.refuse(name, "must give each token once: found some twice")
    if _IS_DRAFTED in model:
        model.taken.add(_IS_DRAFTED)
        drafted = checkpoint.integers(_IS_DRAFTED).reshape(-1)
        if len(drafted) != target.n_vocab:
            raise UnsupportedModel(
                f"{checkpoint.path}: tensor {_IS_DRAFTED} is of {len(drafted)} tokens, but {target.source.path} has "
                f"{target.n_vocab}: use the target that the head was trained for"
            )
        if not np.array_equal(np.flatnonzero(drafted), np.sort(ids)):
            checkpoint.refuse(_IS_DRAFTED, f"must name the tokens of {name}: found others")
    return ids


def _integers(name: str, values: NDArray[np.int64]) -> SourceTensor:
    data: NDArray[Any] = values.astype("<i8").view(np.uint8)
    floats = values.astype(np.float32)[None]
    return SourceTensor(
        name, values.shape, GGMLType.I64, lambda first, last: floats[first:last], lambda first, last: data
    )
