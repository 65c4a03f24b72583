"""A GGUF file from metadata and the bytes of tensors; edgeinfer.gguf has the format."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.gguf import DEFAULT_ALIGNMENT, GGMLType

_UINT32, _FLOAT32, _STRING = 4, 6, 8


@dataclass(frozen=True)
class Tensor:
    """shape in numpy's order, data as GGUF stores it."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def write_gguf(path: Path, metadata: Mapping[str, str | int | float], tensors: Sequence[Tensor]) -> None:
    """Write a file; it is whole or not there, whatever happens. Integers become UINT32, floats FLOAT32.

    Raises OSError.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("xb") as file:
            file.write(_header(metadata, tensors))
            for tensor in tensors:
                _pad(file)
                file.write(np.ascontiguousarray(tensor.data).data)
            _pad(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _header(metadata: Mapping[str, str | int | float], tensors: Sequence[Tensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts += [_string(tensor.name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type, offset)]
        offset += _padded(tensor.data.nbytes)
    return b"".join(parts)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    return struct.pack("<If", _FLOAT32, value)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _pad(file: BinaryIO) -> None:
    at = file.tell()
    file.write(bytes(_padded(at) - at))
