"""What is counted: the engines, and the baselines they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.hls.geometry import Geometry, accumulator_bits
from edgeinfer.hls.simulation.build import RTL, TOPS, Parameters

# Of the model with 2 billion weights, BitNet b1.58 2B4T: the most inputs and outputs of its matrices.
MOST_INPUTS, MOST_OUTPUTS = 6912, 13824


@dataclass(frozen=True)
class Design:
    """A module of hls/rtl with values of its parameters. trits_per_cycle: multiply-adds that it does in a cycle."""

    name: str
    top: str
    parameters: dict[str, int]
    trits_per_cycle: int


def engine(geometry: Geometry, most_inputs: int = MOST_INPUTS, most_outputs: int = MOST_OUTPUTS) -> Design:
    """The engine of a geometry, for matrices of up to so many inputs and outputs."""
    sizes = geometry.n_steps(most_inputs), geometry.n_tiles(most_outputs)
    parameters = Parameters(geometry, accumulator_bits(most_inputs), *sizes).verilog
    name = f"{geometry.encoding}-{geometry.rows}x{geometry.tables}"
    return Design(name, TOPS[geometry.encoding], parameters, geometry.trits_per_cycle)


def open_engine(n_vectors: int) -> Design:
    """The open base-3 engine with adders (bitnet-kv260), restated, without its control; n_vectors share a decoder."""
    return Design(f"open-base3-{n_vectors}", "ei_open_base3", {"VECTORS": n_vectors}, 80 * n_vectors)


def designs() -> dict[str, Design]:
    """All that resources.json has, by name."""
    geometries = (
        Geometry("base3", 4, 16),
        Geometry("base3", 8, 8),
        Geometry("base3", 16, 4),
        Geometry("g3x5", 14, 4),
        Geometry("g3x5", 14, 16),
        Geometry("2bit", 4, 64),
        Geometry("2bit", 8, 32),
    )
    found = (*map(engine, geometries), open_engine(1), open_engine(2))
    return {design.name: design for design in found}


def sources() -> list[Path]:
    """All Verilog of hls/rtl."""
    return sorted(RTL.glob("*.sv"))


def harness_macros(design: Design) -> dict[str, str]:
    """Macros of harness.sv and bench.sv for an engine."""
    geometry = geometry_of(design)
    values = design.parameters
    facts = {
        "TOP": design.top,
        "X_BITS": 8 * geometry.code.n_trits,
        "W_BITS": geometry.beat_bits,
        "STEP_BITS": values["MAX_STEPS"].bit_length(),
        "TILE_BITS": values["MAX_TILES"].bit_length(),
    }
    return {name: str(value) for name, value in (facts | values).items()}


def geometry_of(design: Design) -> Geometry:
    """Of an engine. Raises InvalidArgument for a design that is none."""
    encoding = next((name for name, top in TOPS.items() if top == design.top), None)
    if encoding is None:
        raise InvalidArgument(f"the design must be an engine, {', '.join(TOPS.values())}: found {design.top}")
    return Geometry(encoding, design.parameters["ROWS"], design.parameters["TABLES"])
