"""What a design and a model take of a board, and what the board has."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.hls.board.model import Design
from edgeinfer.hls.board.workload import Workload


@dataclass(frozen=True)
class Room:
    """One resource."""

    what: str
    used: int | None  # None where it is not known
    available: int
    unit: str

    @property
    def fits(self) -> bool:
        """Whether there is enough, as far as is known."""
        return self.used is None or self.used <= self.available


def memory_of(design: Design, work: Workload, n_ctx: int) -> dict[str, int]:
    """Bytes of the board's memory by purpose. The int8 embeddings serve as the output matrix where they are tied."""
    is_shared = work.tied and design.embeddings == "int8"
    parts = {
        "ternary weights": work.weight_bytes(design.geometry),
        "scales": 4 * sum(each.n_out for each in work.products),
        "embeddings": work.embedding_bytes(design.embeddings),
        "output matrix": 0 if is_shared else work.head_bytes,
        "KV cache": work.cache_bytes(n_ctx),
    }
    return parts | ({"output matrix, first stage": work.ternary_head_bytes} if design.ternary_head else {})


def room(design: Design, work: Workload, n_ctx: int, counts: dict[str, int] | None) -> list[Room]:
    """Each resource of the board. counts: logic estimates of one engine: lut, ff, bram18, uram, dsp."""
    board = design.board

    def of(name: str) -> int | None:
        return None if counts is None else counts[name] * design.n_engines

    brams = of("bram18")
    return [
        Room("LUT", of("lut"), board.luts, ""),
        Room("FF", of("ff"), board.flip_flops, ""),
        Room("BRAM", None if brams is None else -(-brams // 2), board.brams, "of 36 Kb"),
        Room("URAM", of("uram"), board.urams, ""),
        Room("DSP", of("dsp"), board.dsps, ""),
        Room("DDR", sum(memory_of(design, work, n_ctx).values()), board.ddr_bytes, "bytes"),
    ]
