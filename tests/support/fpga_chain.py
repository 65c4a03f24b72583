"""The chain of implementations of a ternary product, each run on the files of an exported folder and no others.

Weights are read from the files of the ports, inputs and results from `golden/`, sizes from manifest.json: without
edgeinfer.hls.files.folder, whose checks would find a fault before the implementations do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from click.testing import CliRunner
from numpy.typing import NDArray

from edgeinfer import cli
from edgeinfer.backends.native import _core, available_isas
from edgeinfer.backends.native.weights import BASE_THREE
from edgeinfer.common.errors import EdgeInferError
from edgeinfer.hls.csim import CSimulation, Headers
from edgeinfer.hls.cycles import cycles
from edgeinfer.hls.files.golden import products
from edgeinfer.hls.geometry import LANE_BYTES, Geometry
from edgeinfer.hls.packing import unpack
from edgeinfer.hls.simulation.engine import Engine
from edgeinfer.hls.synth.netlist import Netlist
from edgeinfer.models.formats.i2_s import pack as pack_i2_s
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType

Inputs = NDArray[np.int8]
Sums = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class ChainError(EdgeInferError):
    """An implementation disagrees with the files, or cannot use them."""


@dataclass(frozen=True)
class Vectors:
    """A matrix (n_out, n_in) of a folder with its golden vectors. x: (n, n_in).  y: (n, n_out)."""

    name: str
    n_out: int
    n_in: int
    stream: Bytes
    x: Inputs
    y: Sums


class Implementation(Protocol):
    """What multiplies."""

    name: str
    geometry: Geometry

    def products(self, stream: Bytes, x: Inputs, n_out: int) -> Sums:
        """x W^T, (n, n_out). stream: of W, as `packing.pack` gives it."""
        ...


# ---- files -----------------------------------------------------------------------------------------------------------


def vectors_of(folder: Path) -> Iterator[Vectors]:
    """The matrices with golden vectors, as far as the files go."""
    facts = json.loads((folder / "manifest.json").read_text())
    n_ports = facts["geometry"]["ports"]
    tensors = {tensor["name"]: tensor for tensor in facts["tensors"]}
    for golden in facts["golden"]:
        tensor = tensors[golden["tensor"]]
        n_out, n_in = tensor["shape"]
        names = [f"{tensor['stream']}.{port}.bin" for port in range(n_ports)]
        stream = joined([_read(folder, name, tensor) for name in names])
        x, y = (_read(folder, golden[key]["file"], golden[key]) for key in "xy")
        x, y = x[: len(x) // n_in * n_in], y[: len(y) // (4 * n_out) * 4 * n_out]  # whole rows
        rows = x.view(np.int8).reshape(-1, n_in), y.view("<i4").reshape(-1, n_out)
        yield Vectors(tensor["name"], n_out, n_in, stream, *rows)


def geometry_hash(folder: Path) -> str:
    """Of the engine that the manifest names."""
    return str(json.loads((folder / "manifest.json").read_text())["geometry"]["hash"])


def joined(ports: Sequence[Bytes]) -> Bytes:
    """The stream that was dealt to the ports, as far as all have lanes."""
    n_lanes = min(port.size for port in ports) // LANE_BYTES
    lanes = np.stack([port[: n_lanes * LANE_BYTES].reshape(n_lanes, LANE_BYTES) for port in ports], axis=1)
    return np.ascontiguousarray(lanes).reshape(-1)


def _read(folder: Path, name: str, place: Mapping[str, Any]) -> Bytes:
    """The bytes of a place in a file, as far as it goes."""
    return np.fromfile(folder / name, dtype=np.uint8, count=place["bytes"], offset=place["offset"])


# ---- implementations -------------------------------------------------------------------------------------------------


class Numpy:
    """Integers of numpy, of the unpacked weights."""

    name = "numpy"

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def products(self, stream: Bytes, x: Inputs, n_out: int) -> Sums:
        """See Implementation."""
        return products(unpack(stream, n_out, x.shape[1], self.geometry), x)


class Cpu:
    """The kernel of the native engine for I2_S, in two bits a weight or in base three."""

    def __init__(self, geometry: Geometry, isa: str, base_three: bool) -> None:
        self.name = f"CPU {isa}, {'1.6' if base_three else '2'} bits"
        self.geometry = geometry
        self._isa, self._base_three = isa, base_three

    def products(self, stream: Bytes, x: Inputs, n_out: int) -> Sums:
        """See Implementation. Two products: -128, which activations of this engine never are, is -127 and -1."""
        n_in = x.shape[1]
        trits = unpack(stream, n_out, n_in, self.geometry)
        # Whole blocks of I2_S; the first input behind the matrix is 127, so that the scale of activations is 1.
        padded = (n_in // 128 + 1) * 128
        weights = np.zeros((n_out, padded), dtype=np.int8)
        weights[:, :n_in] = trits
        data = pack_i2_s("m", TernaryMatrix.of_one_scale(weights, 1.0))[:-I2_S_TAIL_BYTES]
        packed_as = BASE_THREE[GGMLType.I2_S] if self._base_three else None
        matrix = _core.PackedMatrix(int(GGMLType.I2_S), n_out, padded, data, 1.0, packed_as)
        first = np.maximum(x, -127).astype(np.int8)
        return self._sums(matrix, first, n_out, padded) + self._sums(matrix, x - first, n_out, padded)

    def _sums(self, matrix: _core.PackedMatrix, x: Inputs, n_out: int, padded: int) -> Sums:
        floats, y = np.zeros((len(x), padded), dtype=np.float32), np.empty((len(x), n_out), dtype=np.float32)
        floats[:, : x.shape[1]] = x
        floats[:, x.shape[1]] = 127
        matrix.multiply(self._isa, floats, y)
        return y.astype(np.int32)


class CSim:
    """The HLS C++, compiled with one of the sets of headers."""

    def __init__(
        self, geometry: Geometry, most_in: int, most_out: int, headers: Headers, flags: Sequence[str] = ()
    ) -> None:
        self.name = f"C simulation, {headers.value} headers"
        self.geometry = geometry
        self._simulation = CSimulation(geometry, most_in, most_out, headers, flags)

    def products(self, stream: Bytes, x: Inputs, n_out: int) -> Sums:
        """See Implementation."""
        return np.stack([self._simulation.product(stream, row, n_out) for row in x])


class Rtl:
    """The Verilog, compiled by Verilator."""

    name = "Verilog"

    def __init__(self, geometry: Geometry, most_in: int, most_out: int) -> None:
        self.geometry = geometry
        self._engine = Engine(geometry, most_in, most_out)

    def products(self, stream: Bytes, x: Inputs, n_out: int) -> Sums:
        """See Implementation."""
        return self._engine.product(x, stream, n_out)[0]


class Cells:
    """The netlist of yosys, in Icarus."""

    name = "netlist"

    def __init__(self, geometry: Geometry, most_in: int, most_out: int, folder: Path) -> None:
        self.geometry = geometry
        folder.mkdir(parents=True, exist_ok=True)
        self._netlist = Netlist(geometry, most_in, most_out, folder)

    def products(self, stream: Bytes, x: Inputs, n_out: int) -> Sums:
        """See Implementation."""
        return self._netlist.product(x, stream, n_out)[0]


def on_cpu(geometry: Geometry) -> list[Implementation]:
    """numpy, and the kernels of all instruction sets that are here."""
    kernels = [Cpu(geometry, isa, base_three) for isa in available_isas() for base_three in (False, True)]
    return [Numpy(geometry), *kernels]


# ---- comparing -------------------------------------------------------------------------------------------------------


def compared(
    folder: Path, implementation: Implementation, most_vectors: int | None = None, most_cycles: int | None = None
) -> tuple[int, int]:
    """(matrices, sums) of a folder that an implementation gave as the files have them.

    most_vectors: of each matrix, from the first one on.  most_cycles: matrices that take more are left out. Raises
    ChainError where a sum is another one, or where the files are of another engine or cut short.
    """
    name, geometry = implementation.name, implementation.geometry
    found = geometry_hash(folder)
    if found != geometry.hash():
        raise ChainError(f"{name}: this engine has the geometry {geometry.hash()}: the files are packed for {found}")
    n_matrices = n_sums = 0
    for vectors in vectors_of(folder):
        if most_cycles is not None and cycles(geometry, vectors.n_in, vectors.n_out) > most_cycles:
            continue
        x, y = vectors.x[:most_vectors], vectors.y[:most_vectors]
        if len(y) < len(x):
            raise ChainError(
                f"{name}: {vectors.name} must have {len(x)} golden results: found {len(y)}; it is cut short"
            )
        try:
            given = implementation.products(vectors.stream, x, vectors.n_out)
        except EdgeInferError as error:
            raise ChainError(f"{name}: {vectors.name}: {error}") from error
        _compare(name, vectors.name, given, y)
        n_matrices, n_sums = n_matrices + 1, n_sums + y.size
    return n_matrices, n_sums


def _compare(name: str, matrix: str, given: Sums, y: Sums) -> None:
    for vector, row in np.argwhere(given != y)[:1]:
        n_wrong = int((given != y).sum())
        raise ChainError(
            f"{name}: {matrix}: vector {vector}, row {row} gives {given[vector, row]}: the golden file has "
            f"{y[vector, row]}; {n_wrong} of {y.size} sums differ"
        )


def exported(model: Path, geometry: Geometry, out: Path, n_golden: int) -> Path:
    """The folder of `edgeinfer export --to fpga`. Raises EdgeInferError where it fails."""
    shape = ["--encoding", geometry.encoding, "--rows", str(geometry.rows), "--tables", str(geometry.tables)]
    command = ["export", str(model), "--to", "fpga", *shape, "--golden", str(n_golden), "--out", str(out)]
    done = CliRunner().invoke(cli.main, command)
    if done.exit_code:
        raise EdgeInferError(f"edgeinfer {' '.join(command)}: {done.output}") from done.exception
    return out
