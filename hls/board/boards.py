"""Boards: what they have, as published, and what their processor takes for the work around the products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeinfer.common.errors import InvalidArgument

# Milliseconds a token of BitNet b1.58 2B-4T (30 layers of 2,560) on the four A53 of a KV260, as MerlijnW70/bitnet-kv260
# publishes its stages. At which context is not said.
_A53_STAGES = {
    "glue": 6.85,
    "attention": 4.78,
    "norms": 3.50,
    "activation quantisation": 2.50,
    "rope": 0.88,
    "others": 0.28,
}
_A53_RESCORING = 1.33  # of 256 rows of the output matrix: the published 5.43 ms of the head, less its stream


@dataclass(frozen=True)
class Host:
    """The processor beside the fabric: seconds of the stages of a token, of a model of n_layers and n_embd.

    rescoring: of the rows that a ternary first stage of the output matrix lets through, for n_embd inputs.
    """

    name: str
    source: str
    n_layers: int
    n_embd: int
    stages: Mapping[str, float]
    rescoring: float

    def scaled(self, n_layers: int, n_embd: int) -> dict[str, float]:
        """Seconds of each stage of another model: each is taken to grow with layers and width."""
        factor = n_layers * n_embd / (self.n_layers * self.n_embd)
        return {name: seconds * factor for name, seconds in self.stages.items()}


@dataclass(frozen=True)
class Board:
    """A board. brams: of 36 Kb.  ddr_bytes: of all memory.

    stream_rate: bytes a second at which all ports together read the weights of layers, as was measured on the board;
    head_rate: at which they read the output matrix, one long run.  clock_hz: of the fabric.
    """

    name: str
    device: str
    luts: int
    flip_flops: int
    brams: int
    urams: int
    dsps: int
    ddr_bytes: int
    clock_hz: float
    n_ports: int
    stream_rate: float
    head_rate: float
    host: Host

    @property
    def port_rate(self) -> float:
        """Bytes a second that the ports could read, 16 bytes a cycle each."""
        return 16 * self.n_ports * self.clock_hz


KV260 = Board(
    name="kv260",
    device="AMD Kria K26 (XCK26, Zynq UltraScale+)",
    luts=117_120,
    flip_flops=234_240,
    brams=144,
    urams=64,
    dsps=1_248,
    ddr_bytes=4 << 30,
    clock_hz=250e6,
    n_ports=4,
    stream_rate=12.73e9,
    head_rate=16e9,
    host=Host(
        name="4 x Cortex-A53",
        source="MerlijnW70/bitnet-kv260, published",
        n_layers=30,
        n_embd=2560,
        stages={name: milliseconds / 1e3 for name, milliseconds in _A53_STAGES.items()},
        rescoring=_A53_RESCORING / 1e3,
    ),
)
BOARDS = {board.name: board for board in (KV260,)}


def board_of(name: str) -> Board:
    """The board of that name. Raises InvalidArgument."""
    if name not in BOARDS:
        raise InvalidArgument(f"there is no board {name!r}; there are {', '.join(BOARDS)} (hls/README.md adds one)")
    return BOARDS[name]
