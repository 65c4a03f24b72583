"""Assistants of Gemma 4 of Hugging Face, as llama.cpp's converter writes them, and with the clusters of their tokens.

An assistant has layers like its target's without keys and values, embeddings of its own, and projections to its width
and back. Assistants of the small models have clusters of tokens, of which few are looked at: the converter leaves them
out, and llama.cpp loads a file that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.architectures import gemma4
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.conversion import keys, rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Keys
from edgeinfer.exporters.conversion.tensors import named, tensors
from edgeinfer.exporters.drafters.checked_head import checked_head
from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.exporters.huggingface import HuggingFaceSource, cut_vocabulary
from edgeinfer.exporters.source import SourceTensor
from edgeinfer.exporters.vocabulary import read_vocabulary
from edgeinfer.models.draft_head import ASSISTANT, CENTROIDS, CENTROIDS_USED, ORDERING
from edgeinfer.models.gguf import GGMLType

_CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_CENTROIDS, _ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
_DEFAULTS = {"backbone_hidden_size": 1536, "num_centroids": 2048, "centroid_intermediate_top_k": 32}


def is_assistant(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an assistant of a Gemma 4."""
    config = checkpoint.config
    return config.architecture in _CLASSES or config.get("model_type") in _MODEL_TYPES


def assistant_source(checkpoint: Checkpoint, vocabulary: bool = True) -> HuggingFaceSource:
    """An assistant as llama.cpp's converter writes it, and as edgeinfer reads it beside its target.

    vocabulary: without one nothing says whether it is that of a target. Raises ModelFileError; UnsupportedModel for
    what a file cannot say.
    """
    model = Model(_RECIPE, checkpoint.language())
    keys.check_config(model)
    found: Sequence[SourceTensor] = [*tensors(model), *([_ordering(model)] if _has_clusters(model) else ())]
    n_vocab = found[0].shape[0]
    words: Metadata = read_vocabulary(checkpoint.folder, model.config, n_vocab, _RECIPE.pre) if vocabulary else {}
    if words:
        words, found = cut_vocabulary(words, list(found))
    metadata = keys.metadata(model, checkpoint.folder, n_vocab)
    if found[0].shape[0] < n_vocab and _has_clusters(model):
        model.note("the clusters of tokens are left out, as the embeddings have rows that are no tokens")
        found = [tensor for tensor in found if tensor.name not in (CENTROIDS, ORDERING)]
        del metadata[f"{ASSISTANT}.{CENTROIDS_USED}"]
    return checked_head(HuggingFaceSource(model, {**metadata, **words}, found))


# ---- keys ------------------------------------------------------------------------------------------------------------


def _check(model: Model) -> None:
    n_shared = model.config.integer("num_kv_shared_layers", 0, least=0)
    if n_shared not in (0, model.n_layers):  # 0 is what it is before transformers has set it
        model.refuse("num_kv_shared_layers", f"must be all {model.n_layers} layers in an assistant: found {n_shared}")
    gemma4.check_layers(model)


def _keys(model: Model) -> Keys:
    found = gemma4.keys_of_layers(model) | {
        "attention.shared_kv_layers": model.n_layers,
        "nextn_predict_layers": model.n_layers,
        "embedding_length_out": model.config.integer("backbone_hidden_size", most=1 << 20),
    }
    if _has_clusters(model):
        found[CENTROIDS_USED] = model.config.integer("centroid_intermediate_top_k", most=1 << 20)
    return found


def _has_clusters(model: Model) -> bool:
    return model.config.flag("use_ordered_embeddings", False)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _special(model: Model) -> list[SourceTensor]:
    found = [rows.of_array("rope_freqs.weight", gemma4.factors(model))]
    found += [
        named(model, f"{front}layer_scalar", f"blk.{layer}.layer_output_scale.weight")
        for layer, front in enumerate(model.blocks)
    ]
    found += [named(model, f"{name}_projection.weight", f"nextn.{name}_projection.weight") for name in ("pre", "post")]
    model.taken |= {name for name in (_CENTROIDS, _ORDERING) if name in model}
    if not _has_clusters(model):  # some checkpoints have them all the same
        return found
    n_clusters = model.config.integer("num_centroids", most=1 << 20)
    model.checkpoint.check_shape(_CENTROIDS, (n_clusters, model.n_embd))
    return [*found, named(model, _CENTROIDS, CENTROIDS)]


def _ordering(model: Model) -> SourceTensor:
    """All tokens, cluster by cluster."""
    ids: NDArray[np.int64] = model.checkpoint.integers(_ORDERING).reshape(-1)
    data = ids.astype("<i4").view(np.uint8)
    floats = ids.astype(np.float32)[None]
    return SourceTensor(
        ORDERING, ids.shape, GGMLType.I32, lambda first, last: floats[first:last], lambda first, last: data
    )


_OF_GEMMA4 = gemma4.RECIPES[0]
_RECIPE = replace(
    _OF_GEMMA4,
    name=ASSISTANT,
    classes=_CLASSES,
    model_types=_MODEL_TYPES,
    defaults={**_OF_GEMMA4.defaults, **_DEFAULTS},
    fixed={
        **_OF_GEMMA4.fixed,
        "hidden_size_per_layer_input": (0,),
        "enable_moe_block": (None, False),
        "use_double_wide_mlp": (None, False),
    },
    reads=_OF_GEMMA4.reads | {"use_ordered_embeddings", *_DEFAULTS},
    experts=None,
    special=_special,
    check=_check,
    keys=_keys,
)
