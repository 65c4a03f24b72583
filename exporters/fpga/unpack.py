"""The ternary matrices of a folder for a board, given back: as a GGUF file or as arrays of numpy."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import BadBoardFolder, InvalidArgument, UnsupportedModel
from edgeinfer.common.files import written_whole
from edgeinfer.exporters.gguf.writer import Progress, Tensor, write_gguf
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.integrity import changed_files
from edgeinfer.hls.files.manifest import BoardTensor, Part
from edgeinfer.hls.packing import Trits
from edgeinfer.models.formats import PACK
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType

Floats = NDArray[np.float32]
Found = tuple[BoardTensor, Part]


class Unpacker:
    """The matrices of the source that a folder holds. The first stage of the output matrix is none of them."""

    def __init__(self, folder: BoardFolder) -> None:
        self.folder = folder
        self.parts: list[Found] = [
            (tensor, part) for tensor in folder.tensors.values() if tensor.phase != "head" for part in tensor.parts
        ]
        self._read = lru_cache(maxsize=1)(folder.trits)  # parts of a matrix follow each other

    def trits(self, found: Found) -> Trits:
        """Int8 (n_out, n_in) of a tensor of the source."""
        tensor, part = found
        return self._read(tensor.name)[part.first : part.last]

    def scales(self, found: Found) -> Floats:
        """The scale of each row."""
        tensor, part = found
        return self.folder.scales(tensor.name)[part.first : part.last]


def unpack_folder(path: Path, out: Path, progress: Progress | None = None) -> str:
    """Write the ternary matrices of a folder, with the trits and scales of its source; gives what was written.

    out: a GGUF file of these tensors alone, in I2_S where each has one scale and else in TQ2_0; or `.npz`, with int8
    NAME and float32 NAME.scales.
    Raises BadBoardFolder, OSError; UnsupportedModel for a matrix that no GGUF type holds exactly; InvalidArgument.
    """
    if out.suffix not in (".gguf", ".npz"):
        raise InvalidArgument(f"--out must end in .gguf or .npz: found {out.name!r}")
    unpacker = Unpacker(BoardFolder.open(path))
    for fault in changed_files(unpacker.folder):
        raise BadBoardFolder(fault)
    if out.suffix == ".npz":
        _write_arrays(unpacker, out, progress)
        return f"{len(unpacker.parts)} matrices as arrays"
    kind = _type_for(unpacker)
    facts = unpacker.folder.manifest.facts.get("model", {})
    metadata = {
        "general.architecture": str(facts.get("architecture", "llama")),
        "general.name": str(facts.get("name", path.name)),
        "general.description": "ternary matrices alone",
    }
    write_gguf(out, metadata, [_tensor(unpacker, found, kind) for found in unpacker.parts], progress)
    return f"{len(unpacker.parts)} matrices in {kind.name}"


def _type_for(unpacker: Unpacker) -> GGMLType:
    """The type that holds all matrices exactly. Raises UnsupportedModel, naming a tensor, if there is none."""
    scales = [unpacker.scales(found) for found in unpacker.parts]
    kind = GGMLType.I2_S if all((each == each[:1]).all() for each in scales) else GGMLType.TQ2_0
    for (tensor, part), each in zip(unpacker.parts, scales, strict=True):
        if tensor.n_in % kind.block_elements:
            raise UnsupportedModel(
                f"tensor {part.name}: {kind.name} needs rows of a multiple of {kind.block_elements} inputs: found "
                f"{tensor.n_in}; take --out FILE.npz"
            )
        if kind == GGMLType.TQ2_0 and (each.astype(np.float16) != each).any():
            raise UnsupportedModel(
                f"tensor {part.name}: TQ2_0 has scales in float16, which these are not; take --out FILE.npz"
            )
    return kind


def _tensor(unpacker: Unpacker, found: Found, kind: GGMLType) -> Tensor:
    tensor, part = found
    return Tensor(part.name, kind, (part.last - part.first, tensor.n_in), partial(_bytes, unpacker, found, kind))


def _bytes(unpacker: Unpacker, found: Found, kind: GGMLType) -> list[NDArray[np.uint8]]:
    scales = unpacker.scales(found)
    scales = scales[:1].reshape(1, 1) if kind == GGMLType.I2_S else scales[:, None]
    return [PACK[kind](found[1].name, TernaryMatrix(unpacker.trits(found), scales))]


def _write_arrays(unpacker: Unpacker, out: Path, progress: Progress | None) -> None:
    with written_whole(out) as file, zipfile.ZipFile(file, "w") as archive:
        for done, found in enumerate(unpacker.parts, 1):
            for name, values in _arrays(unpacker, found):
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, values)
            if progress is not None:
                progress(done / len(unpacker.parts))


def _arrays(unpacker: Unpacker, found: Found) -> Iterator[tuple[str, NDArray[np.int8] | Floats]]:
    name = found[1].name
    yield name, unpacker.trits(found)
    yield f"{name}.scales", unpacker.scales(found)
