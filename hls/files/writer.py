"""A folder for a board, written: streams of weights by port, arrays, golden vectors, headers, manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.common.errors import ShapeError
from edgeinfer.hls.files.folder import port_file
from edgeinfer.hls.files.golden import golden_inputs, products
from edgeinfer.hls.files.headers import HEADERS
from edgeinfer.hls.files.manifest import (
    ALIGNMENT,
    FORMAT,
    NAME,
    VERSION,
    BoardArray,
    BoardManifest,
    BoardTensor,
    FileFacts,
    GoldenProduct,
    Part,
    Place,
    geometry_json,
)
from edgeinfer.hls.geometry import Geometry, round_up
from edgeinfer.hls.packing import Bytes, Trits, pack, to_ports


class BoardWriter:
    """Writes into a folder that there is; a context, in which `finish` is the last call.

    Files grow as things are added, and are hashed on the way.
    """

    def __init__(self, folder: Path, geometry: Geometry) -> None:
        self.folder = folder
        self.geometry = geometry
        self.tensors: list[BoardTensor] = []
        self.arrays: list[BoardArray] = []
        self.golden: list[GoldenProduct] = []
        self._files: dict[str, _HashedFile] = {}
        self._open = ExitStack()

    def __enter__(self) -> BoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    # ---- what a folder holds -----------------------------------------------------------------------------------------

    def add_matrix(
        self,
        name: str,
        trits: Trits,
        scales: ArrayLike,
        phase: str = "",
        layer: int | None = None,
        parts: Sequence[Part] = (),
        n_golden: int = 0,
    ) -> BoardTensor:
        """Pack a matrix (n_out, n_in) and append it; with n_golden golden vectors. Raises ShapeError, OSError.

        scales: one number a row, or one for all.  parts: the tensors that its rows are, itself if there are none.
        """
        tensor = self.add_stream(name, pack(trits, self.geometry), trits.shape, scales, phase, layer, parts)
        if n_golden:
            x = golden_inputs(trits, n_golden, len(self.tensors))
            self.add_golden(tensor, x, products(trits, x))
        return tensor

    def add_stream(
        self,
        name: str,
        stream: Bytes,
        shape: tuple[int, int],
        scales: ArrayLike,
        phase: str = "",
        layer: int | None = None,
        parts: Sequence[Part] = (),
        file: str = "weights",
    ) -> BoardTensor:
        """Append the stream of a matrix of that shape, which `pack` made. See add_matrix."""
        n_out, n_in = shape
        if n_out < 1 or n_in < 1:
            raise ShapeError(f"{name} must have rows and inputs: found shape {shape}")
        rows = round_up(n_out, self.geometry.rows)
        padded = np.zeros(rows, dtype="<f4")
        padded[:n_out] = np.broadcast_to(np.asarray(scales, dtype=np.float32).reshape(-1), (n_out,))
        ports = to_ports(stream, self.geometry)
        places = [self.append(port_file(file, port), data) for port, data in enumerate(ports)]
        tensor = BoardTensor(
            name=name,
            phase=phase,
            layer=layer,
            n_out=n_out,
            n_in=n_in,
            rows_padded=rows,
            stream=file,
            offset=places[0].offset,
            n_bytes=ports.shape[1],
            scales=self.append("scales.bin", padded),
            parts=tuple(parts) or (Part(name, 0, n_out),),
        )
        self.tensors.append(tensor)
        return tensor

    def add_golden(self, tensor: BoardTensor, x: NDArray[np.int8], y: NDArray[np.int32]) -> None:
        """Golden vectors x (n, n_in) of a tensor with their products y (n, n_out)."""
        if x.shape[1] != tensor.n_in or y.shape != (len(x), tensor.n_out):
            raise ShapeError(f"golden vectors of {tensor.name}: found x {x.shape} and y {y.shape}")
        places = [
            self.append(f"golden/{tensor.name}.x.bin", x.astype(np.int8)),
            self.append(f"golden/{tensor.name}.y.bin", y.astype("<i4")),
        ]
        self.golden.append(GoldenProduct(tensor.name, len(x), *places))

    def add_array(self, file: str, name: str, values: NDArray[Any]) -> BoardArray:
        """Append numbers to a file, little-endian in their own type."""
        values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        array = BoardArray(name, values.dtype.str, values.shape, self.append(file, values))
        self.arrays.append(array)
        return array

    def add_rows(
        self, file: str, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[NDArray[Any]]
    ) -> None:
        """Append an array that is made some rows at a time."""
        start = self._file(file).aligned()
        for piece in pieces:
            self._file(file).write(np.ascontiguousarray(piece, dtype=dtype))
        n_bytes = self._file(file).n_bytes - start
        if n_bytes != int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize:
            raise ShapeError(f"{name} must have shape {shape}: found {n_bytes} bytes")
        self.arrays.append(BoardArray(name, np.dtype(dtype).str, shape, Place(file, start, n_bytes)))

    def append(self, file: str, values: NDArray[Any]) -> Place:
        """Append an array's bytes, from the next multiple of ALIGNMENT on."""
        start = self._file(file).aligned()
        self._file(file).write(np.ascontiguousarray(values))
        return Place(file, start, values.nbytes)

    def write_text(self, file: str, text: str) -> None:
        """A file of its own with a text."""
        self._file(file).write(np.frombuffer(text.encode(), dtype=np.uint8))

    def take_file(self, file: str) -> None:
        """List a file that something else wrote into the folder."""
        self._files[file] = _HashedFile.of_file(self.folder / file)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def content(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest's content with the files as they are now."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "geometry": geometry_json(self.geometry),
            "tensors": [tensor.as_json() for tensor in self.tensors],
            "arrays": [array.as_json() for array in self.arrays],
            "golden": [golden.as_json() for golden in self.golden],
            "files": {
                name: {"bytes": file.n_bytes, "sha256": file.digest.hexdigest()}
                for name, file in sorted(self._files.items())
            },
            **facts,
        }

    def finish(self, facts: Mapping[str, Any] | None = None) -> BoardManifest:
        """Write the headers and the manifest; gives its content. facts: what it says beside: `model`, `source`, ..."""
        facts = facts or {}
        for name, text_of in HEADERS.items():
            self.write_text(name, text_of(self._manifest(facts)))
        self._open.close()
        made = self._manifest(facts)
        text = json.dumps(made.facts, indent=1, sort_keys=True) + "\n"
        (self.folder / NAME).write_text(text, encoding="utf-8", newline="\n")
        return made

    def _manifest(self, facts: Mapping[str, Any]) -> BoardManifest:
        content = self.content(facts)
        files = {name: FileFacts(each["bytes"], each["sha256"]) for name, each in content["files"].items()}
        return BoardManifest(self.geometry, self.tensors, self.arrays, self.golden, files, content)

    def _file(self, name: str) -> _HashedFile:
        if name not in self._files:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            self._files[name] = _HashedFile(self._open.enter_context(path.open("wb")))
        return self._files[name]


def write_folder(
    folder: Path,
    geometry: Geometry,
    matrices: Mapping[str, tuple[Trits, ArrayLike]],
    n_golden: int = 3,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """A folder of matrices (trits and scales) alone, such as for a test. folder: there, and empty."""
    with BoardWriter(folder, geometry) as writer:
        for name, (trits, scales) in matrices.items():
            writer.add_matrix(name, trits, scales, n_golden=n_golden)
        writer.finish(facts)


class _HashedFile:
    """A file that is hashed as it grows."""

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self.n_bytes = 0
        self.digest = hashlib.sha256()

    @classmethod
    def of_file(cls, path: Path) -> _HashedFile:
        """One that is there already, and does not grow."""
        found = cls(None)
        data = path.read_bytes()
        found.n_bytes = len(data)
        found.digest.update(data)
        return found

    def write(self, values: NDArray[Any]) -> None:
        """Append contiguous numbers."""
        data = values.reshape(-1).view(np.uint8).data
        assert self._file is not None
        self._file.write(data)
        self.digest.update(data)
        self.n_bytes += len(data)

    def aligned(self) -> int:
        """The size, after zeros up to a multiple of ALIGNMENT."""
        missing = round_up(self.n_bytes, ALIGNMENT) - self.n_bytes
        if missing:
            self.write(np.zeros(missing, dtype=np.uint8))
        return self.n_bytes
