"""The manifest of a folder for a board: what lies where in its files.

`manifest.json` has, beside what follows here, `model` (facts of the architecture), `source`, `licence` and `tool`. It
has no dates, so the same input gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edgeinfer.common.errors import BadBoardFolder, InvalidArgument
from edgeinfer.hls.geometry import Geometry

NAME = "manifest.json"
FORMAT = "edgeinfer-fpga"
VERSION = 1
ALIGNMENT = 64  # bytes, of what begins in a file: a burst of a 128-bit port
DTYPES = ("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<f2", "<f4")  # of arrays
_MOST = 1 << 48  # bytes, rows and the like: products of two are still far from what numpy counts with


@dataclass(frozen=True)
class Place:
    """Bytes of a file, by its name in the folder."""

    file: str
    offset: int
    n_bytes: int

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {"file": self.file, "offset": self.offset, "bytes": self.n_bytes}


@dataclass(frozen=True)
class Part:
    """Rows first..last-1 of a matrix, which are a tensor of the source."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class BoardTensor:
    """A ternary matrix (n_out, n_in) and its place.

    phase: "qkv", "o", "gate_up", "down" or "head".  layer: None for the head.  stream: port p reads `stream.p.bin`,
    n_bytes from offset on in each of these files.  scales: float32 of rows_padded rows, 0 past n_out.
    """

    name: str
    phase: str
    layer: int | None
    n_out: int
    n_in: int
    rows_padded: int
    stream: str
    offset: int
    n_bytes: int
    scales: Place
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "name": self.name,
            "phase": self.phase,
            "layer": self.layer,
            "shape": [self.n_out, self.n_in],
            "rows_padded": self.rows_padded,
            "stream": self.stream,
            "offset": self.offset,
            "bytes": self.n_bytes,
            "scales": self.scales.as_json(),
            "parts": [{"name": part.name, "rows": [part.first, part.last]} for part in self.parts],
        }


@dataclass(frozen=True)
class BoardArray:
    """Numbers of a plain type, such as a norm or a stage of a golden layer. dtype: numpy's, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), **self.place.as_json()}


@dataclass(frozen=True)
class GoldenProduct:
    """Products that an engine must give: x int8 (n, n_in), y int32 (n, n_out) of a tensor."""

    tensor: str
    n: int
    x: Place
    y: Place

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {"tensor": self.tensor, "n": self.n, "x": self.x.as_json(), "y": self.y.as_json()}


@dataclass(frozen=True)
class FileFacts:
    """What a file must be."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class BoardManifest:
    """See the module. facts: the whole content."""

    geometry: Geometry
    tensors: Sequence[BoardTensor]
    arrays: Sequence[BoardArray]
    golden: Sequence[GoldenProduct]
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Any]


def geometry_json(geometry: Geometry) -> dict[str, Any]:
    """The shape of an engine and its hash, for the manifest."""
    return {
        "encoding": geometry.encoding,
        "rows": geometry.rows,
        "tables": geometry.tables,
        "ports": geometry.n_ports,
        "beat_bytes": geometry.beat_bytes,
        "hash": geometry.hash(),
    }


def read_manifest(folder: Path) -> BoardManifest:
    """The manifest of a folder.

    Raises BadBoardFolder for a folder without one, for another version, and for a hash that is not the geometry's.
    """
    path = folder / NAME
    try:
        facts = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object, parse_constant=_no_number)
    except (FileNotFoundError, NotADirectoryError):
        raise BadBoardFolder(f"{folder}: has no {NAME}: this is no folder of `edgeinfer export --to fpga`") from None
    except (ValueError, RecursionError) as error:
        raise BadBoardFolder(f"{path}: must be JSON: {error}; export the model again") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise BadBoardFolder(f"{path}: is no manifest of `edgeinfer export --to fpga`")
    if type(facts.get("version")) is not int or facts["version"] != VERSION:
        raise BadBoardFolder(
            f"{path}: version must be {VERSION}: found {facts.get('version')!r:.40}; export the model again, or use "
            "the edgeinfer that wrote it"
        )
    try:
        return _parsed(path, facts)
    except (_Wrong, InvalidArgument) as error:
        raise BadBoardFolder(f"{path}: {error}; the manifest was changed: export the model again") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadBoardFolder(f"{path}: entry {error} is missing or of another kind; export the model again") from error


def _parsed(path: Path, facts: Mapping[str, Any]) -> BoardManifest:
    if not isinstance(facts.get("model", {}), dict):
        raise _Wrong(f"model must be an object: found {facts['model']!r:.40}")
    _check_keys(facts.get("model", {}))
    manifest = BoardManifest(
        _geometry(path, facts["geometry"]),
        [_tensor(each) for each in facts["tensors"]],
        [_array(each) for each in facts["arrays"]],
        [_golden(each) for each in facts["golden"]],
        {
            _file(name): FileFacts(_count(each["bytes"], 0), _text(each["sha256"]))
            for name, each in facts["files"].items()
        },
        facts,
    )
    tensors, arrays, golden = manifest.tensors, manifest.arrays, manifest.golden
    _check_once("tensor", (tensor.name for tensor in tensors))
    _check_once("tensor of the source", (part.name for tensor in tensors for part in tensor.parts))
    _check_once("array", (array.name for array in arrays))
    _check_once("golden vectors", (each.tensor for each in golden))
    return manifest


def _geometry(path: Path, facts: Mapping[str, Any]) -> Geometry:
    rows, tables, ports = (_count(facts[name], 1) for name in ("rows", "tables", "ports"))
    geometry = Geometry(_text(facts["encoding"]), rows, tables, ports)
    if facts["hash"] != geometry.hash():
        raise BadBoardFolder(
            f"{path}: the geometry hash must be {geometry.hash()}, that of {geometry.encoding} with {geometry.rows} "
            f"rows, {geometry.tables} tables and {geometry.n_ports} ports: found {facts['hash']!r:.40}; the files are "
            "of another engine: export the model again"
        )
    return geometry


def _tensor(facts: Mapping[str, Any]) -> BoardTensor:
    n_out, n_in = facts["shape"]
    layer = facts["layer"]
    return BoardTensor(
        name=_text(facts["name"]),
        phase=_word(facts["phase"]),
        layer=None if layer is None else _count(layer, 0),
        n_out=_count(n_out, 1),
        n_in=_count(n_in, 1),
        rows_padded=_count(facts["rows_padded"], 1),
        stream=_file(facts["stream"]),
        offset=_offset(facts["offset"]),
        n_bytes=_count(facts["bytes"], 1),
        scales=_place(facts["scales"]),
        parts=tuple(_part(each) for each in facts["parts"]),
    )


def _part(facts: Mapping[str, Any]) -> Part:
    first, last = facts["rows"]
    return Part(_text(facts["name"]), _count(first, 0), _count(last, 1))


def _array(facts: Mapping[str, Any]) -> BoardArray:
    if facts["dtype"] not in DTYPES:
        raise _Wrong(f"dtype must be one of {', '.join(DTYPES)}: found {facts['dtype']!r:.40}")
    shape = tuple(_count(each, 0) for each in facts["shape"])
    return BoardArray(_text(facts["name"]), facts["dtype"], shape, _place(facts))


def _golden(facts: Mapping[str, Any]) -> GoldenProduct:
    return GoldenProduct(_text(facts["tensor"]), _count(facts["n"], 1), _place(facts["x"]), _place(facts["y"]))


def _place(facts: Mapping[str, Any]) -> Place:
    return Place(_file(facts["file"]), _offset(facts["offset"]), _count(facts["bytes"], 0))


# ---- values ----------------------------------------------------------------------------------------------------------


class _Wrong(ValueError):
    """A value of the manifest, with what was wanted and found."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where a key stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _count(value: object, least: int) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise _Wrong(f"sizes and places must be whole numbers from {least} to {_MOST}: found {value!r:.40}")
    return value


def _offset(value: object) -> int:
    found = _count(value, 0)
    if found % ALIGNMENT:
        raise _Wrong(f"offsets must be multiples of {ALIGNMENT}: found {found}")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"names must be texts: found {value!r:.40}")
    return value


def _word(value: object) -> str:
    """A name of the headers, which are C: nothing else can stand in them."""
    word = _text(value)
    if re.fullmatch("[A-Za-z0-9_]*", word) is None:
        raise _Wrong(f"phases and the keys of model must be letters, digits and _: found {word!r:.80}")
    return word


def _check_keys(facts: Mapping[str, Any]) -> None:
    for key, value in facts.items():
        _word(key)
        if isinstance(value, dict):
            _check_keys(value)


def _file(value: object) -> str:
    """A file of the folder, or of a folder in it."""
    name = _text(value)
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or "/".join(parts) != name or ".." in parts or set(name) & set("\\:\0"):
        raise _Wrong(f"files must be in the folder: found {name!r:.80}")
    return name


def _check_once(what: str, names: Iterable[str]) -> None:
    found: set[str] = set()
    for name in names:
        if name in found:
            raise _Wrong(f"each {what} must be there once: found {name!r:.80} twice")
        found.add(name)
