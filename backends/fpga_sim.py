"""The native engine with its ternary products on the simulated Verilog engine of `hls/`: the same text, slowly.

Each I2_S matrix of a layer is a stream in the memory of an engine, packed at load or taken from an exported folder.
Verilator's engine multiplies with it, clock cycle by clock cycle. All else is the native engine's: norms, attention,
the rounding of activations, scales, and matrices of other formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from edgeinfer.backends.base import MeasurableBackend, Progress
from edgeinfer.backends.native import NativeBackend, _core
from edgeinfer.backends.native.model import NativeModel, with_device
from edgeinfer.backends.native.weights import Part, parts_of
from edgeinfer.common.errors import BadBoardFolder, ModelFileError, UnsupportedModel, warn
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, MemoryPlan, MemoryUse
from edgeinfer.hls.cycles import TIMINGS
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.integrity import changed_files
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import Bytes, pack
from edgeinfer.hls.simulation.build import check_tools
from edgeinfer.hls.simulation.engine import Engine
from edgeinfer.hls.simulation.matrices import Matrices, kept_bytes
from edgeinfer.models import ModelSpec
from edgeinfer.models.formats import codes_of
from edgeinfer.models.gguf import GGMLType, ModelFile

SMALL = Geometry("base3", rows=4, tables=4)  # compiled in seconds
_CYCLES_A_SECOND = 10**6  # of this simulation, on a laptop
_ENGINE_BYTES = 1 << 20  # of code, and of what Verilator has beside the memories of an engine


class FpgaSimBackend(MeasurableBackend):
    """See the module.

    folder: of `edgeinfer export --to fpga`, made of the model that is loaded; its engine is simulated, with its
    weights. None for the model's weights and a small engine.
    Raises BackendUnavailable without Verilator, BadBoardFolder for a folder that cannot be used.
    """

    name = "fpga-sim"
    source_bytes = NativeBackend.source_bytes

    def __init__(self, folder: str | Path | None = None) -> None:
        check_tools()
        self._streams: Streams = PackedStreams(SMALL) if folder is None else FolderStreams(BoardFolder.open(folder))
        self._native = NativeBackend(ternary_bits="2", packed=False, tuned=False, placement=self._place)

    @override
    def read_spec(self, model: ModelFile) -> ModelSpec:
        """See Backend.read_spec. Raises UnsupportedModel for a model without I2_S matrices in its layers too."""
        spec = self._native.read_spec(model)
        if not _on_engine(parts_of(model, spec.weights())):
            raise UnsupportedModel(
                f"{model.path}: fpga-sim needs I2_S matrices: found none; `edgeinfer export {model.path} --to ternary "
                "--format i2_s --out FILE` makes them of other ternary matrices"
            )
        return spec

    @override
    def plan(self, model: ModelFile, spec: ModelSpec, settings: LoadSettings) -> MemoryPlan:
        """The native engine's plan, with streams among the weights and the engine among the activations.

        Raises as NativeBackend.plan, and ModelFileError for a folder of another model.
        """
        plan = self._native.plan(model, spec, settings)
        return replace(plan, use=with_device(plan.use, self._use(model, _on_engine(parts_of(model, spec.weights())))))

    @override
    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> NativeModel:
        """Compile the engine where that was not done before, and load. Raises as `plan` and NativeBackend.load."""
        parts = _on_engine(parts_of(model, spec.weights()))
        cycles = sum(_cycles(self._streams.geometry, *part.shape) for part in parts)
        warn(
            f"fpga-sim computes every clock cycle of an engine, some {cycles:,} for a token of this model, which takes "
            f"about {cycles / _CYCLES_A_SECOND:.1g} s: it is for tests; the native backend gives the same text"
        )
        return self._native.load(model, spec, plan, device, progress)

    @override
    def warm_up(self, model: ModelFile, device: Device) -> None:
        self._native.warm_up(model, device)

    def _place(self, weights: _core.Weights, model: ModelFile, parts: Sequence[Part]) -> MemoryUse:
        """Bring the ternary matrices into an engine. See Placement."""
        parts = _on_engine(parts)
        rows = [self._streams.rows(model, part) for part in parts]
        engine = Engine(self._streams.geometry, max(each.n_in for each in rows), max(each.n_rows for each in rows))
        matrices = Matrices(engine)
        device = _core.ProductDevice(matrices.product_function, matrices.state, matrices)
        for part, each in zip(parts, rows, strict=True):
            number = matrices.add(self._streams.stream(model, part), each.n_rows, each.n_in, each.first, each.last)
            weights.set_device(part.block, part.role, device, number)
        return self._use(model, parts)

    def _use(self, model: ModelFile, parts: Sequence[Part]) -> MemoryUse:
        """Memory of the streams, and of the engine."""
        geometry, rows = self._streams.geometry, [self._streams.rows(model, part) for part in parts]
        weights = sum(kept_bytes(geometry, each.n_in, each.first, each.last) for each in rows)
        n_in, n_out = max(each.n_in for each in rows), max(each.n_rows for each in rows)
        return MemoryUse(weights, 0, _engine_bytes(geometry, n_in, n_out) + _core.ProductDevice.n_bytes(n_out))


# ---- where streams come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamRows:
    """Rows first..last-1 of the matrix (n_rows, n_in) that a stream has."""

    n_rows: int
    n_in: int
    first: int
    last: int


class Streams(Protocol):
    """Where an engine finds the matrices of a model.  geometry: of the engine."""

    geometry: Geometry

    def rows(self, model: ModelFile, part: Part) -> StreamRows:
        """Which rows of which stream a matrix is. Raises ModelFileError."""
        ...

    def stream(self, model: ModelFile, part: Part) -> Bytes:
        """That stream."""
        ...


class PackedStreams(Streams):
    """The matrices of the model file, packed one by one."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @override
    def rows(self, model: ModelFile, part: Part) -> StreamRows:
        n_out, n_in = part.shape
        return StreamRows(n_out, n_in, 0, n_out)

    @override
    def stream(self, model: ModelFile, part: Part) -> Bytes:
        trits = np.asarray(codes_of(part.type, model.data(part.name)).values, dtype=np.int8).reshape(part.shape)
        model.release(part.name, 0, part.n_bytes)
        return pack(trits, self.geometry)


class FolderStreams(Streams):
    """The streams of an exported folder, as a board reads them; several matrices may lie in one.

    Raises BadBoardFolder for a file that was changed.
    """

    def __init__(self, folder: BoardFolder) -> None:
        for fault in changed_files(folder):
            raise BadBoardFolder(fault)
        self.geometry = folder.geometry
        self._folder = folder
        self._places = {part.name: (tensor, part) for tensor in folder.manifest.tensors for part in tensor.parts}

    @override
    def rows(self, model: ModelFile, part: Part) -> StreamRows:
        """See Streams. Raises ModelFileError for a folder of another model, as its shapes and scales show."""
        if part.name not in self._places:
            raise ModelFileError(
                f"{self._folder.path}: has no {part.name}; the folder must be exported from {model.path}"
            )
        tensor, place = self._places[part.name]
        found = (place.last - place.first, tensor.n_in)
        scales = self._folder.scales(tensor.name)[place.first : place.last]
        if found != part.shape or not (scales == np.float32(part.scale)).all():
            raise ModelFileError(
                f"{self._folder.path}: {part.name} must be {part.shape} with the scale {part.scale}: found {found} "
                f"with {scales.min()} to {scales.max()}; the folder must be exported from {model.path}"
            )
        return StreamRows(tensor.n_out, tensor.n_in, place.first, place.last)

    @override
    def stream(self, model: ModelFile, part: Part) -> Bytes:
        return self._folder.stream(self._places[part.name][0].name)


def _on_engine(parts: Iterable[Part]) -> list[Part]:
    """The ternary matrices of layers."""
    return [part for part in parts if part.type == GGMLType.I2_S and part.block.startswith("layers.")]


def _cycles(geometry: Geometry, n_out: int, n_in: int) -> int:
    """Of a product, without its beginning and its end."""
    return geometry.n_steps(n_in) * max(TIMINGS[geometry.encoding].step, geometry.n_tiles(n_out))


def _engine_bytes(geometry: Geometry, max_in: int, max_out: int) -> int:
    """More than an engine for such matrices takes: tables of 16-bit sums, accumulators, activations, code."""
    tables = 2 * geometry.rows * geometry.tables * 2 * geometry.code.n_entries
    sums, inputs = 16 * geometry.rows * geometry.n_tiles(max_out), 4 * geometry.n_steps(max_in) * geometry.step_inputs
    return _ENGINE_BYTES + 2 * tables + sums + inputs
