"""Strict reader of safetensors files (https://github.com/huggingface/safetensors#format).

u64 length of a header in JSON, {name: {dtype, shape, data_offsets}}, the bytes of the tensors. Each number of the
header is checked against the file before it is used: the tensors must cover the bytes behind the header without overlap
and without a gap, as the format wants it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ModelFileError
from edgeinfer.exporters.checkpoint.json_text import parsed
from edgeinfer.models.gguf_reader.mapping import MappedFile

Bytes = NDArray[np.uint8]

MAX_HEADER_BYTES = 100_000_000  # as in the library of the format
_LFS = b"version "  # with which such a pointer begins
_MOST_AXES = 8
_MOST_ELEMENTS = 1 << 62
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it stands in a file.

    dtype: of the format, such as "BF16".  offset: of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    n_bytes: int

    @property
    def n_rows(self) -> int:
        """Rows in all: those of the matrices of a tensor of three axes one behind the other; a vector is one row."""
        return math.prod(self.shape[:-1])

    def read(self, first: int = 0, last: int | None = None) -> Bytes:
        """The bytes of rows first..last-1, of their own: (n_bytes,). Raises ModelFileError."""
        last = self.n_rows if last is None else last
        if not 0 <= first <= last <= self.n_rows:
            raise ValueError(f"rows of {self.name} must be in 0..{self.n_rows}: found {first}..{last}")
        bits = _BITS[self.dtype] * (self.shape[-1] if self.shape else 1)
        if bits % 8:
            raise ModelFileError(f"{self.file.path}: tensor {self.name}: a row of {self.dtype} must be whole bytes")
        start = self.offset + first * bits // 8
        return np.frombuffer(self.file.read(start, self.offset + last * bits // 8), np.uint8)


def read_header(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises ModelFileError."""
    return _Header(file).tensors()


class _Header:
    def __init__(self, file: MappedFile) -> None:
        self._file = file
        prefix = file.read(0, min(8, file.size))
        if prefix == _LFS:
            self._refuse("is a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`")
        self._length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else file.size
        if self._length > min(file.size - 8, MAX_HEADER_BYTES):
            self._refuse(f"no safetensors file, or cut short: its header is to have {self._length} bytes")

    def tensors(self) -> dict[str, StoredTensor]:
        text = self._file.read(8, 8 + self._length)
        if text[:1] != b"{":
            self._refuse(f"no safetensors file: its header must begin with {{: found {text[:8]!r}")
        found = parsed(text, f"{self._file.path}: broken header")
        if not isinstance(found.get("__metadata__", {}), dict):
            self._refuse("broken header: __metadata__ must be an object of texts")
        entries = [self._tensor(name, entry) for name, entry in found.items() if name != "__metadata__"]
        self._check_places(sorted(entries, key=lambda tensor: (tensor.offset, tensor.n_bytes)))
        return {tensor.name: tensor for tensor in entries}

    def _tensor(self, name: str, entry: object) -> StoredTensor:
        if not isinstance(entry, Mapping):
            self._refuse(f"broken header: tensor {name!r:.80} must be an object: found {entry!r:.80}")
        dtype = entry.get("dtype")
        if not isinstance(dtype, str) or dtype not in _BITS:
            self._refuse(f"tensor {name!r:.80}: dtype must be one of {', '.join(_BITS)}: found {dtype!r:.80}")
        shape = self._integers(name, "shape", entry, _MOST_AXES)
        offsets = self._integers(name, "data_offsets", entry, 2)
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            self._refuse(f"broken header: tensor {name!r:.80}: data_offsets must be two that rise: found {offsets}")
        first, last = offsets
        n_elements = math.prod(shape)
        if n_elements > _MOST_ELEMENTS or (last - first) * 8 != n_elements * _BITS[dtype]:
            self._refuse(f"tensor {name:.80} {dtype} {tuple(shape)} cannot have {last - first} bytes")
        n_data = self._file.size - 8 - self._length
        if last > n_data:
            self._refuse(f"tensor {name:.80} ends at byte {last} of {n_data}: the file is cut short")
        return StoredTensor(name, dtype, tuple(shape), self._file, 8 + self._length + first, last - first)

    def _integers(self, name: str, key: str, entry: Mapping[str, Any], most: int) -> Sequence[int]:
        found = entry.get(key)
        if (
            not isinstance(found, list)
            or len(found) > most
            or any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in found)
        ):
            self._refuse(
                f"broken header: tensor {name!r:.80}: {key} must be a list of up to {most} integers from 0 on: "
                f"found {found!r:.80}"
            )
        return found

    def _check_places(self, tensors: Sequence[StoredTensor]) -> None:
        end = 8 + self._length
        for tensor in tensors:
            if tensor.offset != end:
                problem = "overlaps another tensor" if tensor.offset < end else "leaves a gap before it"
                self._refuse(f"tensor {tensor.name:.80} begins at byte {tensor.offset}, wanted was {end}: it {problem}")
            end += tensor.n_bytes
        if end != self._file.size:
            self._refuse(f"has {self._file.size - end} bytes behind the last tensor, which belong to none")

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelFileError(f"{self._file.path}: {reason}")
