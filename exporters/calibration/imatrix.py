"""Importance matrices: files of llama.cpp, read and written, and what they say of a tensor.

The GGUF form has, for each matrix, the sums of the squares of its inputs by column (NAME.in_sum2) and the number of
tokens behind them (NAME.counts), for each expert where there are some. The old form (.dat) has means, scaled by a
number of calls.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ModelFileError
from edgeinfer.exporters.gguf.writer import Tensor, write_gguf
from edgeinfer.models.gguf import GGMLType, MetadataValue, ModelFile

Floats = NDArray[np.float32]
_MADE_OF = "edgeinfer.imatrix.made_of"
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Squares:
    """Squares of the inputs of a matrix.  sums: (n_matrices, n_in).  counts: (n_matrices,) tokens that were summed."""

    sums: Floats
    counts: Floats

    def means(self) -> Floats:
        """(n_matrices, n_in): the mean square by column, 1 for a matrix that had no tokens."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.sums / np.maximum(counts, np.float32(1e-30)), np.float32(1)).astype(np.float32)


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix.

    of: by the name of the tensor.  datasets: names of the texts.  n_chunks, chunk_size: pieces of text and their
    tokens.  made_of: a hash of the model, the text and the program, "" where it is not known.
    """

    of: Mapping[str, Squares]
    datasets: Sequence[str] = ()
    n_chunks: int = 0
    chunk_size: int = 0
    made_of: str = ""

    @property
    def n_bytes(self) -> int:
        """What it takes in memory, with the means of all tensors."""
        return sum(2 * each.sums.nbytes + each.counts.nbytes for each in self.of.values())

    def means(self, name: str, n_matrices: int = 1) -> Floats | None:
        """(n_matrices, n_in), see Squares.means; None for a tensor that is not in it.

        The old form has the experts of a tensor one behind the other.
        """
        if name not in self.of:
            return None
        means = self.of[name].means()
        is_flat = len(means) == 1 and means.size % n_matrices == 0
        return means.reshape(n_matrices, -1) if is_flat else means


def read_imatrix(path: Path) -> Imatrix:
    """An importance matrix in either form. Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(f"{path}: no importance matrix can be read there: {error.strerror}") from error
    return _read_gguf(path) if is_gguf else _read_old(path)


def write_imatrix(path: Path, imatrix: Imatrix) -> None:
    """Write the GGUF form, tensors by name, completely or not at all. Raises OSError."""
    metadata: dict[str, MetadataValue] = {
        "general.type": "imatrix",
        "imatrix.datasets": list(imatrix.datasets),
        "imatrix.chunk_count": imatrix.n_chunks,
        "imatrix.chunk_size": imatrix.chunk_size,
    }
    if imatrix.made_of:
        metadata[_MADE_OF] = imatrix.made_of
    tensors = []
    for name, squares in sorted(imatrix.of.items()):
        tensors += [_tensor(name + _SUMS, squares.sums), _tensor(name + _COUNTS, squares.counts[:, None])]
    write_gguf(path, metadata, tensors)


def _tensor(name: str, values: Floats) -> Tensor:
    data = np.ascontiguousarray(values, dtype="<f4")
    return Tensor(name, GGMLType.F32, data.shape, lambda: [data.reshape(-1).view(np.uint8)])


def _read_gguf(path: Path) -> Imatrix:
    with ModelFile.open(path) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise ModelFileError(
                f"{path}: general.type must be imatrix: found {file.metadata.get('general.type')!r:.80}"
            )
        of = {}
        for name in file.tensors:
            if name.endswith(_SUMS):
                tensor = name.removesuffix(_SUMS)
                if tensor + _COUNTS not in file.tensors:
                    raise ModelFileError(f"{path}: {name} is there, but {tensor + _COUNTS} is missing")
                sums, counts = _values(file, name), _values(file, tensor + _COUNTS).reshape(-1)
                of[tensor] = _checked(path, tensor, sums, counts)
        datasets = file.metadata.get("imatrix.datasets", [])
        return Imatrix(
            of,
            [str(each) for each in datasets] if hasattr(datasets, "__iter__") else [],
            _number(file, "imatrix.chunk_count"),
            _number(file, "imatrix.chunk_size"),
            str(file.metadata.get(_MADE_OF, "")),
        )


def _number(file: ModelFile, key: str) -> int:
    value = file.metadata.get(key, 0)
    return value if isinstance(value, int) else 0


def _values(file: ModelFile, name: str) -> Floats:
    """The numbers of a tensor, of two axes."""
    info = file.tensors[name]
    if info.type != GGMLType.F32:
        raise ModelFileError(f"{file.path}: {name} must be F32: found {info.type.name}")
    return file.data(name).view("<f4").astype(np.float32).reshape(-1, info.shape[-1] if info.shape else 1)


def _checked(path: Path, name: str, sums: Floats, counts: Floats) -> Squares:
    """Raises ModelFileError for numbers that are no sums of squares, or counts of another number of matrices."""
    if not len(counts) or sums.size % len(counts):
        raise ModelFileError(f"{path}: {name} has {sums.size} sums, which {len(counts)} counts do not divide")
    for kind, values in (("sums", sums), ("counts", counts)):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ModelFileError(f"{path}: {name} has {kind} that are negative or not finite")
    return Squares(sums.reshape(len(counts), -1), counts)


def _read_old(path: Path) -> Imatrix:
    """The old form: n entries of (name, number of calls, values), then the number of chunks and the data set."""
    data, at, of = path.read_bytes(), 0, {}

    def take(n_bytes: int) -> bytes:
        nonlocal at
        if not 0 <= n_bytes <= len(data) - at:
            raise ModelFileError(f"{path}: is no importance matrix, or is cut short at byte {at}")
        at += n_bytes
        return data[at - n_bytes : at]

    def number() -> int:
        value: int = struct.unpack("<i", take(4))[0]
        return value

    for _ in range(number()):
        name = take(number()).decode(errors="replace")
        n_calls, n_values = number(), number()
        values = np.frombuffer(take(4 * n_values), "<f4").astype(np.float32)
        of[name] = _checked(path, name, values, np.array([max(1, n_calls)], np.float32))
    if not of:
        raise ModelFileError(f"{path}: is no importance matrix: it has no entries")
    n_chunks = number() if len(data) - at >= 4 else 0
    datasets = [take(number()).decode(errors="replace")] if len(data) - at >= 4 else []
    return Imatrix(of, datasets, n_chunks)
