"""Strict GGUF reader: every number of the file is checked against the file before it is used.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian: magic, version,
n_tensors, n_kv; n_kv times (key, type, value); n_tensors times (name, dimensions, type, offset); padding; the bytes of
the tensors. The file is mapped, and memory is never allocated by a declared length alone.

If another process truncates the file while it is mapped, this process ends with SIGBUS; no reader with mmap can prevent
that.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.arguments import check_file_name
from edgeinfer.errors import EdgeInferError, InvalidGGUF, ModelFileError, ModelNotFound, warn
from edgeinfer.models._strings import StringTable
from edgeinfer.models.arrays import Numbers, Strings

MetadataValue: TypeAlias = (
    int | float | bool | str | Strings | Numbers | list[int] | list[float] | list[bool] | list[str]
)

MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit for keys; here for the names of tensors too
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ELEMENTS = 4 << 20
MAX_HEADER_BYTES = 128 << 20  # a vocabulary of 256 k tokens with its merges takes 20 MiB
MAX_ENTRIES = 64 << 10  # metadata keys, and tensors
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 48
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
I2_S_TAIL_BYTES = 32  # behind the last block of a tensor: its scale as float32, and room


class GGMLType(IntEnum):
    """How the elements of a tensor are stored. A row is made of whole blocks."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    I2_S = 36  # of bitnet.cpp; ggml has given the number up
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block_elements(self) -> int:
        """Elements that are stored together."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _BLOCKS[self][1]

    def n_bytes(self, n_elements: int) -> int:
        """Bytes of a tensor of whole blocks."""
        tail = I2_S_TAIL_BYTES if self == GGMLType.I2_S else 0
        return n_elements // self.block_elements * self.block_bytes + tail


TERNARY_TYPES = frozenset({GGMLType.TQ1_0, GGMLType.TQ2_0, GGMLType.I2_S, GGMLType.Q2_0})
_BLOCKS = {  # elements, bytes: ggml-common.h, the block_* structs
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.I2_S: (128, 32),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
}
_TYPE_OF_CODE = {int(kind): kind for kind in GGMLType}
_OF_IK_LLAMA = {134: "IQ1_BN", 135: "IQ2_BN", 335: "IQ2_BN_R4"}  # ternary; their rows had no scale at first


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor. shape is in numpy's order, (n_out, n_in) for a matrix: GGUF's dimensions reversed.

    offset: in bytes, from the start of the file.  part: index of that file in ModelFile.paths.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    n_bytes: int
    part: int

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


MakeBytes: TypeAlias = Callable[[int, int], NDArray[np.uint8]]  # of bytes first..last-1, whole rows


class ModelFile:
    """A GGUF model in one file or several parts; a context manager.

    path: the file that was named.  paths: the files of the model in order, one unless it is split.  metadata: of the
    first file. Arrays are Strings or Numbers, which behave as lists; a float may be NaN or infinite. Invalid UTF-8
    becomes U+FFFD in a text, and "surrogateescape" in an array of texts, with a RuntimeWarning.
    """

    def __init__(self, path: Path, parts: list[_Part]) -> None:
        self.path = path
        self.paths = tuple(part.path for part in parts)
        self.n_bytes = sum(len(part.mapping) for part in parts)
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(parts[0].metadata)
        self._tensors = {name: info for part in parts for name, info in part.tensors.items()}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._tensors)
        self._made: dict[str, MakeBytes] = {}
        self._mappings = [part.mapping for part in parts]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Map and check a model; for a split model, name any of its files.

        Raises ModelNotFound, InvalidGGUF, InvalidArgument.
        """
        path = check_file_name("path", path)
        return cls(path, _read_all_parts(path, _read_part(path)))

    def data(self, name: str, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
        """Bytes first..last-1 of a tensor, (n_bytes,), read-only and without a copy, except for tensors of `define`.

        Raises KeyError; EdgeInferError once closed.
        """
        info = self.tensors[name]
        last = info.n_bytes if last is None else last
        if name in self._made:
            return self._made[name](first, last)
        return np.frombuffer(self._mapping(info.part), np.uint8, last - first, info.offset + first)

    def contents(self, part: int) -> NDArray[np.uint8]:
        """All bytes of a file of the model, read-only, without a copy. Raises EdgeInferError once closed."""
        return np.frombuffer(self._mapping(part), np.uint8)

    def prefetch(self, part: int, runs: Iterable[tuple[int, int]]) -> None:
        """Let the system read bytes first..last-1 of a file, for each such run: together, and ahead of their use."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        mapping = self._mapping(part)
        for first, last in runs:
            start = first // mmap.PAGESIZE * mmap.PAGESIZE
            if last > start:
                with suppress(OSError):  # where it does not help it does no harm
                    mapping.madvise(mmap.MADV_WILLNEED, start, last - start)

    def define(self, name: str, type: GGMLType, shape: tuple[int, ...], make: MakeBytes) -> None:
        """Add a tensor that the file lacks. make: called with the bytes first and last each time that some are read."""
        n_bytes = math.prod(shape) // type.block_elements * type.block_bytes
        self._tensors[name] = TensorInfo(name, shape, type, 0, n_bytes, 0)
        self._made[name] = make

    def makes(self, name: str) -> bool:
        """Whether a tensor was added by define: what is read of it takes memory of its own."""
        return name in self._made

    def release(self, name: str, first: int = 0, last: int | None = None) -> None:
        """Let the system take back the memory that reading bytes first..last-1 of a tensor took.

        Reading them again is sound but slower.
        """
        if name in self._made:
            return
        info = self.tensors[name]
        stop = info.offset + (info.n_bytes if last is None else last)
        _release_pages(self._mapping(info.part), info.offset + first, stop)

    def close(self) -> None:
        """Unmap the file. Arrays from data() stay valid: the mapping is released with the last of them."""
        mappings, self._mappings = self._mappings, []
        for mapping in mappings:
            try:
                mapping.close()
            except BufferError:  # an array still looks at it, and keeps it alive
                continue

    def _mapping(self, part: int) -> mmap.mmap:
        if not self._mappings:
            raise EdgeInferError(f"{self.path}: this model file is closed")
        return self._mappings[part]

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Part:
    """One file: mapped, read and checked."""

    path: Path
    mapping: mmap.mmap
    metadata: dict[str, MetadataValue]
    value_offsets: dict[str, int]  # byte of each metadata value
    tensors: dict[str, TensorInfo]

    def refuse_value(self, key: str, reason: str) -> NoReturn:
        raise InvalidGGUF(self.path, f"key {key!r} value", self.value_offsets.get(key, 0), reason)


def _read_part(path: Path) -> _Part:
    mapping = _map(path)
    cursor = _Cursor(path, mapping)
    n_tensors, n_kv = _read_counts(cursor)
    metadata, value_offsets = _read_metadata(cursor, n_kv)
    alignment = _check_alignment(cursor, metadata, value_offsets)
    infos = _read_tensor_infos(cursor, n_tensors)
    tensors = _place_tensors(cursor, infos, alignment)
    _release_pages(mapping, 0, cursor.at)
    if cursor.notes:
        more = f", and so are {len(cursor.notes) - 1} more" if len(cursor.notes) > 1 else ""
        warn(f"{path}: {cursor.notes[0]}{more}")
    return _Part(path, mapping, metadata, value_offsets, tensors)


# --- split models -----------------------------------------------------------------------------------------------------


def _read_all_parts(path: Path, opened: _Part) -> list[_Part]:
    """All files of the model that `opened` belongs to, in order."""
    count = _split_number(opened, "split.count", default=1)
    if count <= 1:
        return [opened]
    index = _split_number(opened, "split.no", default=0)
    stem = re.fullmatch(r"(.+)-\d{5}-of-\d{5}\.gguf", path.name, re.DOTALL)
    if index >= count:
        opened.refuse_value("split.no", f"must be less than split.count, {count}: found {index}")
    if stem is None or path.name != _part_name(stem[1], index, count):
        wanted = _part_name("NAME", index, count)
        opened.refuse_value("split.no", f"this is file {index + 1} of {count}, its name must be {wanted}")
    parts = []
    for number in range(count):
        name = _part_name(stem[1], number, count)
        part = opened if number == index else _read_split_part(path.with_name(name), number, count)
        tensors = {key: replace(info, part=number) for key, info in part.tensors.items()}
        parts.append(replace(part, tensors=tensors))
    _check_parts(parts)
    return parts


def _part_name(stem: str, index: int, count: int) -> str:
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def _read_split_part(path: Path, index: int, count: int) -> _Part:
    if not path.exists():
        raise ModelNotFound(f"{path}: file {index + 1} of {count} of the split model is missing")
    part = _read_part(path)
    for key, wanted in (("split.count", count), ("split.no", index)):
        if part.metadata.get(key) != wanted:
            part.refuse_value(key, f"must be {wanted}: found {part.metadata.get(key)!r:.80}")
    return part


def _check_parts(parts: list[_Part]) -> None:
    """Refuse parts of different models, a tensor in two of them, and a total that is not the declared one."""
    first = parts[0]
    seen: dict[str, Path] = {}
    for part in parts:
        for key in ("split.tensors.count", "general.architecture"):
            if key in part.metadata and part.metadata[key] != first.metadata.get(key):
                part.refuse_value(key, f"must be the same as in {first.path.name}")
        for name, info in part.tensors.items():
            if name in seen:
                raise InvalidGGUF(part.path, f"tensor {_quoted(name)}", info.offset, f"is in {seen[name].name} too")
            seen[name] = part.path
    declared = _split_number(first, "split.tensors.count", default=len(seen))
    if declared != len(seen):
        first.refuse_value("split.tensors.count", f"is {declared}, but the {len(parts)} files hold {len(seen)} tensors")


def _split_number(part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        part.refuse_value(key, f"must be an integer that is not negative: found {value!r:.80}")
    return value


# --- the file ---------------------------------------------------------------------------------------------------------


def _map(path: Path) -> mmap.mmap:
    """The whole file, read-only. Raises ModelNotFound, InvalidGGUF, ModelFileError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            raise ModelNotFound(f"{path}: {_what_is_there(path, mode)}; give a .gguf file")
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise InvalidGGUF(path, "magic", 0, "the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: {_why_missing(path)}") from None
    except (OSError, OverflowError) as error:
        raise ModelFileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:  # a NUL in the path
        raise ModelNotFound(f"{str(path)!r}: no such file: {error}") from None


def _what_is_there(path: Path, mode: int) -> str:
    return f"is a folder with {_models_in(path)}" if stat.S_ISDIR(mode) else "is not a regular file"


def _why_missing(path: Path) -> str:
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist"
    if not path.parent.is_dir():
        return f"no such file: there is no folder {path.parent}"
    return f"no such file; its folder has {_models_in(path.parent)}"


def _models_in(folder: Path) -> str:
    names = sorted(folder.glob("*.gguf"))  # leaves out what may not be read
    more = f" and {len(names) - 5} more .gguf files" if len(names) > 5 else ""
    return ", ".join(path.name for path in names[:5]) + more if names else "no .gguf files"


def _release_pages(mapping: mmap.mmap, start: int, stop: int) -> None:
    """Drop the whole pages of start..stop; the pages at the edges may hold a neighbour that is in use."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    n_bytes = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
    if n_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, first, n_bytes)


# --- the header -------------------------------------------------------------------------------------------------------


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


class _Cursor:
    """Reads one value after the other, each only if the file holds all of it."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.mapping = mapping
        self.size = len(mapping)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.at = 0
        self.notes: list[str] = []  # of what is wrong and does no harm

    def refuse(self, field: str, offset: int, reason: str) -> NoReturn:
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
        value: int = _U32.unpack_from(self.mapping, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.mapping, self.take(8, field))[0]
        return value

    def u64_up_to(self, most: int, field: str) -> int:
        value = self.u64(field)
        if value > most:
            self.refuse(field, self.at - 8, f"must be at most {most}: found {value}")
        return value

    def string(self, field: str, most: int = MAX_STRING_BYTES, errors: str = "strict") -> str:
        """A text. errors: what to do where it is no UTF-8, as for bytes.decode."""
        n_bytes = self.u64_up_to(most, f"{field} length")
        start = self.take(n_bytes, field)
        raw = self.mapping[start : self.at]
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
            self.refuse(field, start, f"{_quoted(name)} occurs twice")
        return name

    def strings(self, n: int, field: str) -> Strings:
        """n strings."""
        table = StringTable.read(np.frombuffer(self.mapping, np.uint8), self.at, self.limit, n, MAX_STRING_BYTES)
        self.at += table.n_bytes
        if len(table) < n:
            element, start = f"{field}[{len(table)}]", self.at
            self.string(element, errors="surrogateescape")  # says what is wrong with it
            self.refuse(element, start, "changed while it was read")
        if table.n_utf8 < n:
            self.notes.append(f"{field}[{table.n_utf8}] is no UTF-8")
        return Strings(table)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """(n_tensors, n_kv), after magic and version."""
    magic = cursor.mapping[cursor.take(4, "magic") : 4]
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


def _read_metadata(cursor: _Cursor, n_kv: int) -> tuple[dict[str, MetadataValue], dict[str, int]]:
    """(values, offset of each value) by key."""
    metadata: dict[str, MetadataValue] = {}
    offsets: dict[str, int] = {}
    for index in range(n_kv):
        key = cursor.name(f"key {index}", metadata, errors="backslashreplace")
        field = f"key {_quoted(key)}"
        kind = _read_value_type(cursor, f"{field} type")
        if key == "general.alignment" and kind != _ValueType.UINT32:
            cursor.refuse(f"{field} type", cursor.at - 4, f"must be UINT32: found {kind.name}")
        offsets[key] = cursor.at
        metadata[key] = _read_value(cursor, kind, f"{field} value")
    return metadata, offsets


def _read_value_type(cursor: _Cursor, field: str) -> _ValueType:
    value = cursor.u32(field)
    if value > _ValueType.FLOAT64:
        cursor.refuse(field, cursor.at - 4, f"must be in 0..12: found {value}")
    return _ValueType(value)


def _read_value(cursor: _Cursor, kind: _ValueType, field: str) -> MetadataValue:
    if kind == _ValueType.STRING:
        return cursor.string(field, errors="replace")
    if kind == _ValueType.ARRAY:
        return _read_array(cursor, field)
    return _read_numbers(cursor, kind, 1, field)[0]


def _read_array(cursor: _Cursor, field: str) -> Strings | Numbers:
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


def _read_numbers(cursor: _Cursor, kind: _ValueType, n: int, field: str) -> Numbers:
    dtype = _DTYPES[kind]
    start = cursor.take(n * dtype.itemsize, field)
    values = np.frombuffer(cursor.mapping, dtype, n, start).copy()
    return Numbers(values != 0 if kind == _ValueType.BOOL else values)


def _check_alignment(cursor: _Cursor, metadata: dict[str, MetadataValue], value_offsets: dict[str, int]) -> int:
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


def _read_tensor_infos(cursor: _Cursor, n_tensors: int) -> dict[str, _Declared]:
    infos: dict[str, _Declared] = {}
    for index in range(n_tensors):
        name = cursor.name(f"tensor {index} name", infos)
        infos[name] = _read_sound_tensor_info(cursor) or _read_tensor_info(cursor, f"tensor {_quoted(name)}")
    return infos


def _read_sound_tensor_info(cursor: _Cursor) -> _Declared | None:
    """As _read_tensor_info, in half the time; None, and nothing is read, where that would find something wrong."""
    start = cursor.at
    layout = _INFO_LAYOUTS.get(cursor.mapping[start : start + 4])
    if layout is None or layout.size > cursor.limit - start:
        return None
    *dims, code, relative_offset = layout.unpack_from(cursor.mapping, start)
    n_elements, kind = math.prod(dims), _TYPE_OF_CODE.get(code)
    if kind is None or min(dims) < 1 or n_elements >= MAX_ELEMENTS or dims[0] % kind.block_elements:
        return None
    cursor.at = start + layout.size
    return _Declared(tuple(reversed(dims)), kind, kind.n_bytes(n_elements), relative_offset, cursor.at - 8)


def _read_tensor_info(cursor: _Cursor, field: str) -> _Declared:
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
    if code not in _BLOCKS:
        found = _OF_IK_LLAMA.get(code)
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


def _place_tensors(cursor: _Cursor, infos: dict[str, _Declared], alignment: int) -> dict[str, TensorInfo]:
    """The tensors by name, in the file's order, once all are aligned, inside the file and apart from each other."""
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        offset = data_start + info.relative_offset
        if info.relative_offset % alignment:
            reason = f"must be a multiple of {alignment}: found {info.relative_offset}"
            cursor.refuse(f"tensor {_quoted(name)} offset", info.offset_at, reason)
        if offset + info.n_bytes > cursor.size:
            reason = f"its bytes {offset}..{offset + info.n_bytes} lie outside of the file of {cursor.size} bytes"
            cursor.refuse(f"tensor {_quoted(name)} offset", info.offset_at, reason)
        tensors[name] = TensorInfo(name, info.shape, info.type, offset, info.n_bytes, part=0)
    by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in zip(by_offset, by_offset[1:], strict=False):
        if before.offset + before.n_bytes > after.offset:
            reason = f"its bytes from {after.offset} on overlap those of tensor {_quoted(before.name)}"
            cursor.refuse(f"tensor {_quoted(after.name)} offset", infos[after.name].offset_at, reason)
    return tensors


def _quoted(name: str) -> str:
    """A name from the file for a message: quoted, with control characters escaped, and not too long."""
    text = repr(name[:81])
    return text if len(text) <= 82 else f"{text[:80]}...'"
