"""Writing a GGUF file from metadata and tensors; edgeinfer.models.gguf describes the format."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.files import written_whole
from edgeinfer.models.arrays import Array, Numbers, Strings
from edgeinfer.models.gguf import DEFAULT_ALIGNMENT, GGMLType, MetadataValue

Metadata: TypeAlias = Mapping[str, MetadataValue]
Progress: TypeAlias = Callable[[float], None]

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64 = 4, 5, 6, 7, 8, 9, 10, 11
_KINDS = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7}
_KINDS |= {"uint64": 10, "int64": 11, "float64": 12}
_FORMATS = {_UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOL: "?", _UINT64: "Q", _INT64: "q"}


@dataclass(frozen=True)
class Tensor:
    """A tensor whose bytes are made when they are written, so that only one is in memory at a time.

    shape: in numpy's order.  pieces: the bytes as GGUF stores them, concatenated.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[np.uint8]]]

    @property
    def n_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.type.n_bytes(math.prod(self.shape))


@dataclass(frozen=True)
class Layout:
    """Where everything of a file lies.

    header: its first bytes, with the padding behind them.  offsets: of each tensor, in bytes from the start of the
    file.  n_bytes: of the whole file.
    """

    header: bytes
    offsets: Mapping[str, int]
    n_bytes: int


def layout(metadata: Metadata, tensors: Sequence[Tensor]) -> Layout:
    """The layout of a file with this metadata and these tensors, one behind the other."""
    header = _header(metadata, tensors)
    header += bytes(_padded(len(header)) - len(header))
    offsets, at = {}, len(header)
    for tensor in tensors:
        offsets[tensor.name] = at
        at += _padded(tensor.n_bytes)
    return Layout(header, offsets, at)


def write_gguf(path: Path, metadata: Metadata, tensors: Sequence[Tensor], progress: Progress | None = None) -> None:
    """Write a file completely or not at all.

    Integers become UINT32, or a larger type if needed, floats FLOAT32; lists of integers INT32, and arrays of a file
    keep their type.  progress: called with
    the share that is done. Raises OSError, and what making a tensor raises.
    """
    total, done = sum(tensor.n_bytes for tensor in tensors), 0
    with written_whole(path) as file:
        file.write(_header(metadata, tensors))
        for tensor in tensors:
            _pad(file)
            _write(file, tensor)
            done += tensor.n_bytes
            if progress is not None:
                progress(done / total)
        _pad(file)


def _write(file: BinaryIO, tensor: Tensor) -> None:
    start = file.tell()
    for piece in tensor.pieces():
        file.write(np.ascontiguousarray(piece).data)
    if file.tell() - start != tensor.n_bytes:
        raise ValueError(f"tensor {tensor.name} must have {tensor.n_bytes} bytes: found {file.tell() - start}")


def _header(metadata: Metadata, tensors: Sequence[Tensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts += [_string(tensor.name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type, offset)]
        offset += _padded(tensor.n_bytes)
    return b"".join(parts)


def _string(text: str, errors: str = "replace") -> bytes:
    encoded = text.encode(errors=errors)  # a name of a file may be no UTF-8
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: MetadataValue) -> bytes:
    if isinstance(value, Numbers):
        return _numbers(np.asarray(value))
    if isinstance(value, Strings):  # of a file: what is no UTF-8 there stays as it is
        texts = b"".join(_string(text, "surrogateescape") for text in value.tolist())
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + texts
    if isinstance(value, Array):
        value = value.tolist()
    if isinstance(value, list):
        kind = _kind_of_elements(value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + _elements(kind, value)
    kind = _kind(value)
    return struct.pack("<I", kind) + _elements(kind, [value])


def _numbers(values: NDArray[Any]) -> bytes:
    """An array of numbers in their own type."""
    kind = _KINDS[values.dtype.name]
    data = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<IIQ", _ARRAY, kind, len(values)) + data


def _elements(kind: int, values: Sequence[str | bool | int | float]) -> bytes:
    if kind == _STRING:
        return b"".join(_string(str(value)) for value in values)
    return struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)


def _kind(value: str | bool | int | float) -> int:
    if isinstance(value, str):
        return _STRING
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, float):
        return _FLOAT32
    if value < 0:
        return _INT32 if value >= -(2**31) else _INT64
    return _UINT32 if value < 2**32 else _UINT64


def _kind_of_elements(values: Sequence[str | bool | int | float]) -> int:
    if not values:
        return _INT32
    if isinstance(values[0], bool) or not isinstance(values[0], int):
        return _kind(values[0])
    fit = all(isinstance(value, int) and -(2**31) <= value < 2**31 for value in values)
    return _INT32 if fit else _INT64


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _pad(file: BinaryIO) -> None:
    at = file.tell()
    file.write(bytes(_padded(at) - at))
