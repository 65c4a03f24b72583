"""The stages of a golden layer: written from the model, and computed again from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.overriding import override
from edgeinfer.exporters.fpga.content import Content, Product, model_facts
from edgeinfer.exporters.fpga.layer import Floats, LayerWeights, stages_of
from edgeinfer.exporters.fpga.options import GOLDEN_TOKENS
from edgeinfer.exporters.fpga.tables import int8_rows, rotations
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.golden import random_bytes
from edgeinfer.hls.files.writer import BoardWriter
from edgeinfer.hls.packing import Trits
from edgeinfer.models.formats import dequantize, quantize
from edgeinfer.models.gguf import GGMLType

LAYER = 0  # whose input are embeddings
FILE = f"golden/layers.{LAYER}.stages.bin"
_PREFIX = f"golden.layers.{LAYER}."
_TOKENS = f"{_PREFIX}tokens"


def write_stages(writer: BoardWriter, content: Content) -> None:
    """Append the stages of the first layer for some tokens, where golden vectors are asked for."""
    if not content.options.n_golden:
        return
    tokens = random_bytes(4 * GOLDEN_TOKENS, LAYER).view("<u4") % np.uint32(content.spec.n_vocab)
    writer.add_array(FILE, _TOKENS, tokens.astype(np.int32))
    for name, values in stages_of(_OfModel(content), _embeddings(content, tokens)):
        writer.add_array(FILE, f"{_PREFIX}{name}", values)


def stage_faults(folder: BoardFolder) -> Iterator[str]:
    """The first stage that is not what the folder's own weights give, if there are stages."""
    if _TOKENS not in folder.arrays:
        return
    tokens = folder.array(_TOKENS)
    for name, wanted in stages_of(_OfFolder(folder), folder_embeddings(folder, tokens)):
        found = folder.array(f"{_PREFIX}{name}")
        if wanted.tobytes() != found.tobytes():
            at = tuple(np.argwhere(wanted != found)[0]) if (wanted != found).any() else (0,) * wanted.ndim
            yield (
                f"{folder.path}: stage {name} of layer {LAYER} at {tuple(map(int, at))}: the folder's weights give "
                f"{wanted[at]}, {FILE} says {found[at]}; a golden value, a weight or a norm was changed"
            )
            return


def folder_embeddings(folder: BoardFolder, tokens: NDArray[np.int32]) -> Floats:
    """What goes into the first layer, (n, n_embd). Raises KeyError without any."""
    rows = folder.array("embed")[tokens]
    if rows.dtype == np.int8:
        found: Floats = rows.astype(np.float32) * folder.array("embed_scales")[tokens][:, None]
        return found
    floats: Floats = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return floats


def _embeddings(content: Content, tokens: NDArray[np.uint32]) -> Floats:
    """The rows of some tokens as the folder has them."""
    tensor = content.stored(str(content.spec.token_embd))
    shape = (1, tensor.shape[1])
    rows = np.concatenate([dequantize(tensor.type, tensor.stored(n, n + 1), shape) for n in map(int, tokens)])
    if content.options.embeddings == "int8":
        codes, scales = int8_rows(rows)
        return codes.astype(np.float32) * scales[:, None]
    return dequantize(GGMLType.BF16, quantize(GGMLType.BF16, rows), rows.shape)


class _OfModel(LayerWeights):
    """See LayerWeights."""

    def __init__(self, content: Content) -> None:
        self.facts: Mapping[str, Any] = model_facts(content)
        self._content = content
        self._vectors = dict(content.vectors())

    @override
    def matrix(self, phase: str) -> tuple[Trits, Floats]:
        return self._product(phase).read()

    @override
    def vector(self, name: str) -> Floats:
        return self._vectors[f"layers.{LAYER}.{name}"]

    @override
    def rotations(self, n: int) -> tuple[Floats, Floats]:
        cosines, sines = rotations(self._content.rope, n)
        return cosines, sines

    def _product(self, phase: str) -> Product:
        return next(each for each in self._content.products if (each.layer, each.phase) == (LAYER, phase))


class _OfFolder(LayerWeights):
    """See LayerWeights."""

    def __init__(self, folder: BoardFolder) -> None:
        self.facts: Mapping[str, Any] = folder.manifest.facts["model"]
        self._folder = folder

    @override
    def matrix(self, phase: str) -> tuple[Trits, Floats]:
        name = f"layers.{LAYER}.{phase}"
        return self._folder.trits(name), self._folder.scales(name)

    @override
    def vector(self, name: str) -> Floats:
        found: Floats = self._folder.array(f"layers.{LAYER}.{name}")
        return found

    @override
    def rotations(self, n: int) -> tuple[Floats, Floats]:
        table = self._folder.array("rope")[:, :n]
        return table[0], table[1]
