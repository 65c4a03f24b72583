"""The header of a file: metadata and tensors, each number checked against the file before it is used."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidGGUF
from edgeinfer.models._strings import StringTable
from edgeinfer.models.arrays import Numbers, Strings
from edgeinfer.models.gguf_reader.types import OF_IK_LLAMA, TYPE_OF_CODE, GGMLType, MetadataValue, TensorInfo

MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit for keys; here for the names of tensors too
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ELEMENTS = 4 << 20
MAX_HEADER_BYTES = 128 << 20  # a vocabulary of 256 k tokens with its merges takes 20 MiB
MAX_ENTRIES = 64 << 10  # metadata keys, and tensors
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 48
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32


class _ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[_ValueType, np.dtype[Any]] = {
    _ValueType.UINT8: np.dtype("<u1"),
    _ValueType.INT8: np.dtype("<i1"),
    _ValueType.UINT16: np.dtype("<u2"),
    _ValueType.INT16: np.dtype("<i2"),
    _ValueType.UINT32: np.dtype("<u4"),
    _ValueType.INT32: np.dtype("<i4"),
    _ValueType.FLOAT32: np.dtype("<f4"),
    _ValueType.BOOL: np.dtype("<u1"),
    _ValueType.UINT64: np.dtype("<u8"),
    _ValueType.INT64: np.dtype("<i8"),
    _ValueType.FLOAT64: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """Reads one value after the other, each only if the file holds all of it."""

    def __init__(self, path: Path, contents: NDArray[np.uint8]) -> None:
        self.path = path
        self.contents = contents
        self.bytes = contents.data
        self.size = len(contents)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.at = 0
        self.notes: list[str] = []  # of what is wrong and does no harm

    def refuse(self, field: str, offset: int, reason: str) -> NoReturn:
        """Raise InvalidGGUF for a field at a byte of the file."""
        raise InvalidGGUF(self.path, field, offset, reason)

    def take(self, n_bytes: int, field: str) -> int:
        """Step over n_bytes and give back where they start."""
        start = self.at
        if n_bytes > self.limit - start:
            end = f"the file ends at {self.size}" if self.limit == self.size else f"a header may end at {self.limit}"
            self.refuse(field, start, f"needs {n_bytes} bytes, but {end}")
        self.at += n_bytes
        return start

    def u32(self, field: str) -> int:
        """The next 4 bytes."""
        value: int = _U32.unpack_from(self.bytes, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        """The next 8 bytes."""
        value: int = _U64.unpack_from(self.bytes, self.take(8, field))[0]
        return value

    def u64_up_to(self, most: int, field: str) -> int:
        """The next 8 bytes; a larger number is refused."""
        value = self.u64(field)
        if value > most:
            self.refuse(field, self.at - 8, f"must be at most {most}: found {value}")
        return value

    def string(self, field: str, most: int = MAX_STRING_BYTES, errors: str = "strict") -> str:
        """A text. errors: what to do where it is no UTF-8, as for bytes.decode."""
        n_bytes = self.u64_up_to(most, f"{field} length")
        start = self.take(n_bytes, field)
        raw = bytes(self.bytes[start : self.at])
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if errors == "strict":
                self.refuse(field, start + error.start, f"must be UTF-8: {error.reason}")
            self.notes.append(f"{field} is no UTF-8")
            return raw.decode(errors=errors)

    def name(self, field: str, taken: Mapping[str, object], errors: str = "strict") -> str:
        """A key, or the name of a tensor, that is not taken yet. errors: as of `string`."""
        start = self.at
        name = self.string(field, MAX_KEY_BYTES, errors)
        if not name:
            self.refuse(field, start, "must not be empty")
        if name in taken:
            self.refuse(field, start, f"{quoted(name)} occurs twice")
        return name

    def strings(self, n: int, field: str) -> Strings:
        """n strings."""
        table = StringTable.read(self.contents, self.at, self.limit, n, MAX_STRING_BYTES)
        self.at += table.n_bytes
        if len(table) < n:
            element, start = f"{field}[{len(table)}]", self.at
            self.string(element, errors="surrogateescape")  # says what is wrong with it
            self.refuse(element, start, "changed while it was read")
        if table.n_utf8 < n:
            self.notes.append(f"{field}[{table.n_utf8}] is no UTF-8")
        return Strings(table)


def read_counts(cursor: Cursor) -> tuple[int, int]:
    """(n_tensors, n_kv), after magic and version."""
    magic = bytes(cursor.bytes[cursor.take(4, "magic") : 4])
    if magic != b"GGUF":
        cursor.refuse("magic", 0, f"must be b'GGUF': found {magic!r}, this is not a GGUF file")
    version = cursor.u32("version")
    if version == 1:
        cursor.refuse("version", 4, "1 is no longer read: convert the model again with a current tool")
    if version & 0xFFFF == 0:
        cursor.refuse("version", 4, f"{version:#010x} is that of a big-endian file: convert the model to little-endian")
    if version not in (2, 3):
        cursor.refuse("version", 4, f"must be 2 or 3: found {version}")
    return cursor.u64_up_to(MAX_ENTRIES, "n_tensors"), cursor.u64_up_to(MAX_ENTRIES, "n_kv")


def read_metadata(
    cursor: Cursor, n_kv: int, release: Callable[[int, int], None] | None = None
) -> tuple[dict[str, MetadataValue], dict[str, int]]:
    """(values, offset of each value) by key. release: called with the first byte of each value that was read, and the
    one behind it.
    """
    metadata: dict[str, MetadataValue] = {}
    offsets: dict[str, int] = {}
    for index in range(n_kv):
        key = cursor.name(f"key {index}", metadata, errors="backslashreplace")
        field = f"key {quoted(key)}"
        kind = _read_value_type(cursor, f"{field} type")
        if key == "general.alignment" and kind != _ValueType.UINT32:
            cursor.refuse(f"{field} type", cursor.at - 4, f"must be UINT32: found {kind.name}")
        offsets[key] = cursor.at
        metadata[key] = _read_value(cursor, kind, f"{field} value")
        if release is not None:
            release(offsets[key], cursor.at)
    return metadata, offsets


def _read_value_type(cursor: Cursor, field: str) -> _ValueType:
    value = cursor.u32(field)
    if value > _ValueType.FLOAT64:
        cursor.refuse(field, cursor.at - 4, f"must be in 0..12: found {value}")
    return _ValueType(value)


def _read_value(cursor: Cursor, kind: _ValueType, field: str) -> MetadataValue:
    if kind == _ValueType.STRING:
        return cursor.string(field, errors="replace")
    if kind == _ValueType.ARRAY:
        return _read_array(cursor, field)
    return _read_numbers(cursor, kind, 1, field)[0]


def _read_array(cursor: Cursor, field: str) -> Strings | Numbers:
    kind = _read_value_type(cursor, f"{field} element type")
    if kind == _ValueType.ARRAY:
        cursor.refuse(f"{field} element type", cursor.at - 4, "must not be an array: nested arrays are not read")
    n = cursor.u64_up_to(MAX_ARRAY_ELEMENTS, f"{field} length")
    if kind == _ValueType.STRING:
        least = 8 * n  # an empty string still has a length
        if least > cursor.size - cursor.at:
            cursor.refuse(f"{field} length", cursor.at - 8, f"{n} strings do not fit: the file ends at {cursor.size}")
        return cursor.strings(n, field)
    return _read_numbers(cursor, kind, n, field)


def _read_numbers(cursor: Cursor, kind: _ValueType, n: int, field: str) -> Numbers:
    dtype = _DTYPES[kind]
    start = cursor.take(n * dtype.itemsize, field)
    values = np.frombuffer(cursor.bytes, dtype, n, start).copy()
    return Numbers(values != 0 if kind == _ValueType.BOOL else values)


def check_alignment(cursor: Cursor, metadata: dict[str, MetadataValue], value_offsets: dict[str, int]) -> int:
    """Bytes to which the data of tensors is aligned. Raises InvalidGGUF."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.refuse(
            "key 'general.alignment' value",
            value_offsets["general.alignment"],
            f"must be a power of two in 8..{MAX_ALIGNMENT}: found {alignment}",
        )
    return alignment


# --- tensors ----------------------------------------------------------------------------------------------------------


class _Declared(NamedTuple):
    """A tensor as its entry in the header has it; its offset counts from the first byte after the header."""

    shape: tuple[int, ...]
    type: GGMLType
    n_bytes: int
    relative_offset: int
    offset_at: int  # byte of the field that holds relative_offset


_INFO_LAYOUTS = {_U32.pack(n_dims): struct.Struct(f"<4x{n_dims}QIQ") for n_dims in range(1, MAX_DIMS + 1)}


def read_tensor_infos(cursor: Cursor, n_tensors: int) -> dict[str, _Declared]:
    """The entries of all tensors, by name. Raises InvalidGGUF."""
    infos: dict[str, _Declared] = {}
    for index in range(n_tensors):
        name = cursor.name(f"tensor {index} name", infos)
        infos[name] = read_sound_tensor_info(cursor) or read_tensor_info(cursor, f"tensor {quoted(name)}")
    return infos


def read_sound_tensor_info(cursor: Cursor) -> _Declared | None:
    """As read_tensor_info, in half the time; None, and nothing is read, where that would find something wrong."""
    start = cursor.at
    layout = _INFO_LAYOUTS.get(bytes(cursor.bytes[start : start + 4]))
    if layout is None or layout.size > cursor.limit - start:
        return None
    *dims, code, relative_offset = layout.unpack_from(cursor.bytes, start)
    n_elements, kind = math.prod(dims), TYPE_OF_CODE.get(code)
    if kind is None or min(dims) < 1 or n_elements >= MAX_ELEMENTS or dims[0] % kind.block_elements:
        return None
    cursor.at = start + layout.size
    return _Declared(tuple(reversed(dims)), kind, kind.n_bytes(n_elements), relative_offset, cursor.at - 8)


def read_tensor_info(cursor: Cursor, field: str) -> _Declared:
    """One entry, field by field, so that an error names the field. Raises InvalidGGUF."""
    n_dims = cursor.u32(f"{field} n_dims")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.refuse(f"{field} n_dims", cursor.at - 4, f"must be in 1..{MAX_DIMS}: found {n_dims}")
    dims_at = cursor.at
    dims = [cursor.u64(f"{field} dim {index}") for index in range(n_dims)]
    n_elements = 1
    for index, dim in enumerate(dims):
        n_elements *= dim
        if dim < 1 or n_elements >= MAX_ELEMENTS:
            reason = f"must be at least 1, and all of them together fewer than 2^48 elements: found {dim}"
            cursor.refuse(f"{field} dim {index}", dims_at + 8 * index, reason)
    code = cursor.u32(f"{field} type")
    if code not in TYPE_OF_CODE:
        found = OF_IK_LLAMA.get(code)
        reason = "unknown: the file is damaged or newer than edgeinfer"
        if found is not None:
            reason = f"{found} of ik_llama.cpp, which is not read: convert the model to I2_S, TQ1_0 or TQ2_0"
        cursor.refuse(f"{field} type", cursor.at - 4, f"{code} is {reason}")
    kind = GGMLType(code)
    if dims[0] % kind.block_elements:
        reason = f"must be a multiple of the {kind.block_elements} elements of a {kind.name} block: found {dims[0]}"
        cursor.refuse(f"{field} dim 0", dims_at, reason)
    n_bytes = kind.n_bytes(n_elements)
    relative_offset = cursor.u64(f"{field} offset")
    return _Declared(tuple(reversed(dims)), kind, n_bytes, relative_offset, cursor.at - 8)


def place_tensors(cursor: Cursor, infos: dict[str, _Declared], alignment: int) -> dict[str, TensorInfo]:
    """The tensors by name, in the file's order, once all are aligned, inside the file and apart from each other."""
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        offset = data_start + info.relative_offset
        if info.relative_offset % alignment:
            reason = f"must be a multiple of {alignment}: found {info.relative_offset}"
            cursor.refuse(f"tensor {quoted(name)} offset", info.offset_at, reason)
        if offset + info.n_bytes > cursor.size:
            reason = f"its bytes {offset}..{offset + info.n_bytes} lie outside of the file of {cursor.size} bytes"
            cursor.refuse(f"tensor {quoted(name)} offset", info.offset_at, reason)
        tensors[name] = TensorInfo(name, info.shape, info.type, offset, info.n_bytes, part=0)
    by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in zip(by_offset, by_offset[1:], strict=False):
        if before.offset + before.n_bytes > after.offset:
            reason = f"its bytes from {after.offset} on overlap those of tensor {quoted(before.name)}"
            cursor.refuse(f"tensor {quoted(after.name)} offset", infos[after.name].offset_at, reason)
    return tensors


def quoted(name: str) -> str:
    """A name from the file for a message: quoted, with control characters escaped, and not too long."""
    text = repr(name[:81])
    return text if len(text) <= 82 else f"{text[:80]}...'"
