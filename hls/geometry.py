"""The shape of a table-lookup engine, and what follows from it: the sizes of its stream of weights and of its sums.

An engine (TeLLMe, Qiao et al., arXiv:2510.15926) multiplies int8 activations with trits. It fills tables with the sums
of all ternary weights of G activations, and each group of G weights of a row is an index into its table. R rows are
looked up in T tables in each clock cycle, so a step takes T * G inputs, and a tile R rows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from edgeinfer.common.errors import InvalidArgument

LANE_BYTES = 16  # of a memory port of 128 bits


@dataclass(frozen=True)
class Encoding:
    """How the weights of one table are stored: as an index of n_bits into 3^G sums, lowest weight first.

    index = sum of (w[j] + 1) * 3^j, j = 0..G-1.
    """

    name: str
    n_trits: int
    n_bits: int

    @property
    def n_entries(self) -> int:
        """Sums that a table has."""
        count: int = 3**self.n_trits
        return count

    @property
    def zero(self) -> int:
        """The index of G weights that are 0, which pads rows."""
        return (self.n_entries - 1) // 2

    @property
    def entry_bits(self) -> int:
        """Of a signed sum of G activations, -128 included."""
        return signed_bits(self.n_trits * 128)


ENCODINGS = {each.name: each for each in (Encoding("base3", 5, 8), Encoding("g3x5", 3, 5), Encoding("2bit", 1, 2))}


@dataclass(frozen=True)
class Geometry:
    """An engine: rows R and tables T that it reads in a cycle.

    n_ports: memory ports that the stream of weights is spread over, LANE_BYTES of each in turn.
    """

    encoding: str
    rows: int
    tables: int
    n_ports: int = 4

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise InvalidArgument(f"encoding must be one of {', '.join(ENCODINGS)}: found {self.encoding!r}")
        if not 1 <= self.rows <= 64:
            raise InvalidArgument(f"rows must be 1 to 64: found {self.rows}")
        if not 1 <= self.tables <= 64 or self.tables & (self.tables - 1):
            raise InvalidArgument(f"tables must be a power of two from 1 to 64: found {self.tables}")
        if not 1 <= self.n_ports <= 16:
            raise InvalidArgument(f"ports must be 1 to 16: found {self.n_ports}")
        if self.beat_bits % 8:
            raise InvalidArgument(
                f"rows * tables * {self.code.n_bits} bits must be whole bytes: found {self.rows} rows and "
                f"{self.tables} tables in {self.encoding}; take more rows or tables"
            )

    @property
    def code(self) -> Encoding:
        """The encoding of the weights."""
        return ENCODINGS[self.encoding]

    @property
    def beat_bits(self) -> int:
        """Weights that the engine takes in a cycle, R * T indices."""
        return self.rows * self.tables * self.code.n_bits

    @property
    def beat_bytes(self) -> int:
        """See beat_bits."""
        return self.beat_bits // 8

    @property
    def step_inputs(self) -> int:
        """Inputs of a step, T * G."""
        return self.tables * self.code.n_trits

    @property
    def trits_per_cycle(self) -> int:
        """Multiply-adds in a cycle."""
        return self.rows * self.step_inputs

    def n_steps(self, n_in: int) -> int:
        """Steps over the inputs of a row; those past n_in have weight 0."""
        return -(-n_in // self.step_inputs)

    def n_tiles(self, n_out: int) -> int:
        """Tiles of rows; those past n_out have weight 0."""
        return -(-n_out // self.rows)

    def stream_bytes(self, n_out: int, n_in: int) -> int:
        """Of a matrix (n_out, n_in), padded to whole beats, and then to a lane of each port."""
        return round_up(self.n_steps(n_in) * self.n_tiles(n_out) * self.beat_bytes, self.n_ports * LANE_BYTES)

    def hash(self) -> str:
        """16 hex digits of what decides where a weight lies in the stream; a board refuses files of another one."""
        facts = asdict(self) | {"lane_bytes": LANE_BYTES, "layout": 1}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def default_geometry(encoding: str, rows: int | None = None, tables: int | None = None) -> Geometry:
    """The engine of an encoding that reads four ports of 128 bits in a cycle, or one of other rows and tables."""
    usual = {"base3": (4, 16), "g3x5": (16, 4), "2bit": (4, 64)}
    if encoding not in usual:
        raise InvalidArgument(f"encoding must be one of {', '.join(ENCODINGS)}: found {encoding!r}")
    return Geometry(encoding, rows or usual[encoding][0], tables or usual[encoding][1])


def signed_bits(magnitude: int) -> int:
    """Bits of a signed number that holds -magnitude to magnitude."""
    return magnitude.bit_length() + 1


def accumulator_bits(n_in: int) -> int:
    """Bits of the sum of n_in int8 activations, -128 included, with weights -1, 0, 1: 21 from 4,096 inputs on."""
    return signed_bits(n_in * 128)


def round_up(n: int, to: int) -> int:
    """The multiple of `to` from n on."""
    return -(-n // to) * to
