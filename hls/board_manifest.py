"""The manifest of a folder for a board: what lies where in its files.

`manifest.json` has, beside what follows here, `model` (facts of the architecture), `source`, `licence` and `tool`. It
has no dates, so the same input gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import BadBoardFolder, InvalidArgument
from edgeinfer.hls.geometry import Geometry

NAME = "manifest.json"
FORMAT = "edgeinfer-fpga"
VERSION = 1
ALIGNMENT = 64  # bytes, of what begins in a file: a burst of a 128-bit port


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
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise BadBoardFolder(f"{folder}: has no {NAME}: this is no folder of `edgeinfer export --to fpga`") from None
    except ValueError as error:
        raise BadBoardFolder(f"{path}: must be JSON: {error}; export the model again") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise BadBoardFolder(f"{path}: is no manifest of `edgeinfer export --to fpga`")
    if facts.get("version") != VERSION:
        raise BadBoardFolder(
            f"{path}: version must be {VERSION}: found {facts.get('version')!r:.40}; export the model again, or use "
            "the edgeinfer that wrote it"
        )
    try:
        return _parsed(path, facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise BadBoardFolder(f"{path}: {error}") from error
        raise BadBoardFolder(f"{path}: entry {error} is missing or of another kind; export the model again") from error


def _parsed(path: Path, facts: Mapping[str, Any]) -> BoardManifest:
    geometry = _geometry(path, facts["geometry"])
    return BoardManifest(
        geometry,
        [_tensor(each) for each in facts["tensors"]],
        [_array(each) for each in facts["arrays"]],
        [
            GoldenProduct(each["tensor"], int(each["n"]), _place(each["x"]), _place(each["y"]))
            for each in facts["golden"]
        ],
        {name: FileFacts(int(each["bytes"]), str(each["sha256"])) for name, each in facts["files"].items()},
        facts,
    )


def _geometry(path: Path, facts: Mapping[str, Any]) -> Geometry:
    geometry = Geometry(facts["encoding"], int(facts["rows"]), int(facts["tables"]), int(facts["ports"]))
    if facts["hash"] != geometry.hash():
        raise BadBoardFolder(
            f"{path}: the geometry hash must be {geometry.hash()}, that of {geometry.encoding} with {geometry.rows} "
            f"rows, {geometry.tables} tables and {geometry.n_ports} ports: found {facts['hash']!r:.40}; the files are "
            "of another engine: export the model again"
        )
    return geometry


def _tensor(facts: Mapping[str, Any]) -> BoardTensor:
    n_out, n_in = facts["shape"]
    return BoardTensor(
        name=facts["name"],
        phase=facts["phase"],
        layer=facts["layer"],
        n_out=int(n_out),
        n_in=int(n_in),
        rows_padded=int(facts["rows_padded"]),
        stream=facts["stream"],
        offset=int(facts["offset"]),
        n_bytes=int(facts["bytes"]),
        scales=_place(facts["scales"]),
        parts=tuple(Part(part["name"], *map(int, part["rows"])) for part in facts["parts"]),
    )


def _array(facts: Mapping[str, Any]) -> BoardArray:
    return BoardArray(facts["name"], facts["dtype"], tuple(map(int, facts["shape"])), _place(facts))


def _place(facts: Mapping[str, Any]) -> Place:
    return Place(facts["file"], int(facts["offset"]), int(facts["bytes"]))
