"""The files of a model: one, or several if it is split."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from edgeinfer.common.errors import InvalidGGUF, ModelNotFound, warn
from edgeinfer.models.gguf_reader.header import (
    Cursor,
    check_alignment,
    place_tensors,
    quoted,
    read_counts,
    read_metadata,
    read_tensor_infos,
)
from edgeinfer.models.gguf_reader.mapping import MappedFile, open_file
from edgeinfer.models.gguf_reader.types import MetadataValue, TensorInfo


@dataclass(frozen=True)
class Part:
    """One file: its header read and checked."""

    path: Path
    file: MappedFile
    metadata: dict[str, MetadataValue]
    value_offsets: dict[str, int]  # byte of each metadata value
    tensors: dict[str, TensorInfo]

    def refuse_value(self, key: str, reason: str) -> NoReturn:
        """Raise InvalidGGUF for the value of a key."""
        raise InvalidGGUF(self.path, f"key {key!r} value", self.value_offsets.get(key, 0), reason)


def read_part(path: Path) -> Part:
    """One file of a model. Raises ModelNotFound, InvalidGGUF, ModelFileChanged."""
    file = open_file(path)
    try:
        part = _part(path, file)
    except InvalidGGUF:
        file.check()  # which says it, where somebody writes to it
        raise
    file.check()
    return part


def _part(path: Path, file: MappedFile) -> Part:
    cursor = Cursor(path, file.bytes())
    n_tensors, n_kv = read_counts(cursor)
    metadata, value_offsets = read_metadata(cursor, n_kv, file.release)
    alignment = check_alignment(cursor, metadata, value_offsets)
    infos = read_tensor_infos(cursor, n_tensors)
    tensors = place_tensors(cursor, infos, alignment)
    file.release(0, cursor.at)
    if cursor.notes:
        more = f", and so are {len(cursor.notes) - 1} more" if len(cursor.notes) > 1 else ""
        warn(f"{path}: {cursor.notes[0]}{more}")
    return Part(path, file, metadata, value_offsets, tensors)


def read_all_parts(path: Path, opened: Part) -> list[Part]:
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


def _read_split_part(path: Path, index: int, count: int) -> Part:
    if not path.exists():
        raise ModelNotFound(f"{path}: file {index + 1} of {count} of the split model is missing")
    part = read_part(path)
    for key, wanted in (("split.count", count), ("split.no", index)):
        if part.metadata.get(key) != wanted:
            part.refuse_value(key, f"must be {wanted}: found {part.metadata.get(key)!r:.80}")
    return part


def _check_parts(parts: list[Part]) -> None:
    """Refuse parts of different models, a tensor in two of them, and a total that is not the declared one."""
    first = parts[0]
    seen: dict[str, Path] = {}
    for part in parts:
        for key in ("split.tensors.count", "general.architecture"):
            if key in part.metadata and part.metadata[key] != first.metadata.get(key):
                part.refuse_value(key, f"must be the same as in {first.path.name}")
        for name, info in part.tensors.items():
            if name in seen:
                raise InvalidGGUF(part.path, f"tensor {quoted(name)}", info.offset, f"is in {seen[name].name} too")
            seen[name] = part.path
    declared = _split_number(first, "split.tensors.count", default=len(seen))
    if declared != len(seen):
        first.refuse_value("split.tensors.count", f"is {declared}, but the {len(parts)} files hold {len(seen)} tensors")


def _split_number(part: Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        part.refuse_value(key, f"must be an integer that is not negative: found {value!r:.80}")
    return value
