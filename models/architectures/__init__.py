"""Architectures: one file per `general.architecture` of GGUF, with one `ARCHITECTURE` each."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.draft_vocab import DRAFT_VOCAB, has_draft_vocab
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.nextn import NextnBlock
from edgeinfer.models.reader import Architecture
from edgeinfer.models.spec import ModelSpec

# Of architectures that no file can have, by file.
_NAMES = {
    "bitnet_25": "bitnet-25",
    "bitnet_b158": "bitnet-b1.58",
    "ernie4_5_moe": "ernie4_5-moe",
    "falcon_h1": "falcon-h1",
    "gpt_oss": "gpt-oss",
    "muse_glimmer": "muse-glimmer",
}


def supported_architectures() -> list[str]:
    """Names of the architectures that have a file here, sorted."""
    return sorted(_files())


def read_spec(file: ModelFile) -> ModelSpec:
    """Spec of a model file. Raises UnsupportedModel if its architecture is unknown or its tensors do not fit."""
    if has_draft_vocab(file):
        n_tokens = file.tensors[DRAFT_VOCAB].n_elements
        raise UnsupportedModel(
            f"{file.path}: has logits for {n_tokens} of its tokens only, so it can draft for another model (-md) and "
            "do nothing else; export the model without --draft-vocab"
        )
    return read_draft_spec(file)


def read_draft_spec(file: ModelFile) -> ModelSpec:
    """The same of a draft model, which may have logits for some of its tokens only (models/draft_vocab.py)."""
    return _architecture(file).read(file)


def read_nextn(file: ModelFile) -> tuple[NextnBlock, ...]:
    """The blocks of a model file that draft, () where it has none. Raises UnsupportedModel if they do not fit it."""
    return _architecture(file).read_nextn(file)


def _architecture(file: ModelFile) -> Architecture:
    """That of a file. Raises UnsupportedModel for one that is not known."""
    name, files = file.metadata.get("general.architecture"), _files()
    if not isinstance(name, str) or name not in files:
        known = ", ".join(supported_architectures())
        raise UnsupportedModel(f"{file.path}: architecture {name!r:.80} is not supported; supported: {known}")
    architecture: Architecture = importlib.import_module(f"{__name__}.{files[name]}").ARCHITECTURE
    return architecture


@cache
def _files() -> dict[str, str]:
    """The files of the architectures, without `.py`, by architecture."""
    files = (module.name for module in pkgutil.iter_modules(__path__))
    return {_NAMES.get(file, file): file for file in files}
