"""A folder for a board, read: its streams of weights, scales, arrays and golden vectors, by memory map.

What `edgeinfer export --to fpga` and `BoardWriter` write. The simulators and the tests read these files and no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import BadBoardFolder, ShapeError
from edgeinfer.hls.files.manifest import BoardArray, BoardManifest, BoardTensor, Place, read_manifest
from edgeinfer.hls.geometry import Geometry, round_up
from edgeinfer.hls.packing import Bytes, Trits, from_ports, unpack
from edgeinfer.models.gguf_reader.mapping import MappedFile, map_file

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class GoldenVectors:
    """x int8 (n, n_in) and the products y = x W^T, int32 (n, n_out), of a tensor."""

    tensor: BoardTensor
    x: NDArray[np.int8]
    y: NDArray[np.int32]


@dataclass(frozen=True)
class BoardFolder:
    """See the module. `open` makes one."""

    path: Path
    manifest: BoardManifest

    @classmethod
    def open(cls, path: str | Path) -> BoardFolder:
        """The folder with that name.

        Raises BadBoardFolder for a manifest that is damaged, of another version or with a wrong geometry hash; for a
        file that is missing or not as long as it must be; and for places that are not in the files. Hashes of files are
        not looked at: see edgeinfer.hls.files.integrity.
        """
        folder = cls(Path(path), read_manifest(Path(path)))
        for name in folder.manifest.files:
            check_size(folder, name)
        folder._check_places()
        return folder

    @property
    def geometry(self) -> Geometry:
        """Of the engine that the streams are for."""
        return self.manifest.geometry

    @cached_property
    def tensors(self) -> dict[str, BoardTensor]:
        """The ternary matrices by name, such as "layers.0.qkv"."""
        return {tensor.name: tensor for tensor in self.manifest.tensors}

    @cached_property
    def arrays(self) -> dict[str, BoardArray]:
        """Norms, embeddings, rotations and the stages of golden layers, by name."""
        return {array.name: array for array in self.manifest.arrays}

    # ---- weights -----------------------------------------------------------------------------------------------------

    def ports(self, name: str) -> Bytes:
        """What each port reads of a tensor, (n_ports, bytes)."""
        tensor = self.tensors[name]
        ports = np.stack([self._bytes(place) for place in self.port_places(tensor)])
        self.check()
        return ports

    def port_places(self, tensor: BoardTensor) -> list[Place]:
        """The bytes of each port's file that are a tensor's."""
        return [
            Place(port_file(tensor.stream, port), tensor.offset, tensor.n_bytes)
            for port in range(self.geometry.n_ports)
        ]

    def stream(self, name: str) -> Bytes:
        """The beats of a tensor in their order, see `packing`."""
        return from_ports(self.ports(name), self.geometry)

    def trits(self, name: str) -> Trits:
        """The weights of a tensor, int8 (n_out, n_in). Raises BadBoardFolder for what `unpack` refuses."""
        tensor = self.tensors[name]
        try:
            return unpack(self.stream(name), tensor.n_out, tensor.n_in, self.geometry)
        except ShapeError as error:
            raise BadBoardFolder(f"{self.path}: {name}: {error}") from error

    def scales(self, name: str) -> Floats:
        """(n_out,) float32: weight = trit * scale of its row."""
        tensor = self.tensors[name]
        return self.padded_scales(name)[: tensor.n_out]

    def padded_scales(self, name: str) -> Floats:
        """(rows_padded,) float32, as the file has them."""
        scales = self._bytes(self.tensors[name].scales).view("<f4").astype(np.float32)
        self.check()
        return scales

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def array(self, name: str) -> NDArray[Any]:
        """A norm, a table or a stage, in its own type; a view of the file."""
        array = self.arrays[name]
        return self._bytes(array.place).view(array.dtype).reshape(array.shape)

    def golden(self) -> Iterator[GoldenVectors]:
        """The golden vectors of each tensor that has some."""
        for each in self.manifest.golden:
            tensor = self.tensors[each.tensor]
            x = self._bytes(each.x).view(np.int8).reshape(each.n, tensor.n_in)
            y = self._bytes(each.y).view("<i4").reshape(each.n, tensor.n_out)
            yield GoldenVectors(tensor, x, y)

    def _bytes(self, place: Place) -> Bytes:
        if not place.n_bytes:
            return np.empty(0, dtype=np.uint8)
        if place.file not in self._files:
            self._files[place.file] = map_file(self.path / place.file)
        return self._files[place.file].bytes()[place.offset : place.offset + place.n_bytes]

    @cached_property
    def _files(self) -> dict[str, MappedFile]:
        return {}

    def check(self) -> None:
        """Raises ModelFileChanged if a file that was read has changed since."""
        for file in self._files.values():
            file.check()

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check_places(self) -> None:
        """Raises BadBoardFolder where sizes or places contradict one another."""
        for tensor in self.manifest.tensors:
            self._check_tensor(tensor)
            for place in (*self.port_places(tensor), tensor.scales):
                self._check_place(tensor.name, place)
        for array in self.manifest.arrays:
            n_bytes = math.prod(array.shape) * np.dtype(array.dtype).itemsize
            if array.place.n_bytes != n_bytes:
                self._refuse(f"{array.name} {array.shape} must have {n_bytes} bytes: found {array.place.n_bytes}")
            self._check_place(array.name, array.place)
        for golden in self.manifest.golden:
            if golden.tensor not in self.tensors:
                self._refuse(f"golden vectors must be of a tensor that there is: found {golden.tensor!r:.80}")
            tensor = self.tensors[golden.tensor]
            if (golden.x.n_bytes, golden.y.n_bytes) != (golden.n * tensor.n_in, 4 * golden.n * tensor.n_out):
                self._refuse(f"golden vectors of {golden.tensor} must be {golden.n}: found other sizes")
            for place in (golden.x, golden.y):
                self._check_place(golden.tensor, place)

    def _check_tensor(self, tensor: BoardTensor) -> None:
        geometry = self.geometry
        n_bytes = geometry.stream_bytes(tensor.n_out, tensor.n_in) // geometry.n_ports
        if tensor.n_bytes != n_bytes:
            self._refuse(
                f"{tensor.name} ({tensor.n_out}, {tensor.n_in}) must have {n_bytes} bytes a port: found "
                f"{tensor.n_bytes}"
            )
        rows = round_up(tensor.n_out, geometry.rows)
        if tensor.rows_padded != rows or tensor.scales.n_bytes != 4 * rows:
            self._refuse(f"{tensor.name} must have {rows} rows with the padding: found {tensor.rows_padded}")
        ends = [0, *(part.last for part in tensor.parts)]
        if [part.first for part in tensor.parts] != ends[:-1] or ends[-1] != tensor.n_out:
            self._refuse(f"the parts of {tensor.name} must be its {tensor.n_out} rows in turn: found others")

    def _check_place(self, name: str, place: Place) -> None:
        facts = self.manifest.files.get(place.file)
        if facts is None:
            self._refuse(f"{name} is in {place.file!r:.80}, which the manifest does not list")
        elif place.offset < 0 or place.offset + place.n_bytes > facts.n_bytes:
            self._refuse(
                f"{name} must lie within the {facts.n_bytes} bytes of {place.file}: found {place.n_bytes} from "
                f"{place.offset} on"
            )

    def _refuse(self, reason: str) -> None:
        raise BadBoardFolder(f"{self.path}: manifest.json: {reason}; the manifest was changed: export the model again")


def port_file(stream: str, port: int) -> str:
    """The file that a port reads."""
    return f"{stream}.{port}.bin"


def check_size(folder: BoardFolder, name: str) -> None:
    """Raises BadBoardFolder for a file that is missing, or has not the bytes that the manifest says."""
    path, wanted = folder.path / name, folder.manifest.files[name].n_bytes
    if not path.is_file():
        raise BadBoardFolder(f"{folder.path}: {name} is missing; copy the whole folder, or export the model again")
    found = path.stat().st_size
    if found < wanted:
        raise BadBoardFolder(f"{path}: must have {wanted} bytes: found {found}; it is cut short: copy it again")
    if found > wanted:
        raise BadBoardFolder(f"{path}: must have {wanted} bytes: found {found}; it is of another export")
