"""A model of the speed of a board; every number is modelled, none is measured.

A product takes as long as its engine needs cycles, or as its weights need to be read, whichever is longer; products
follow each other. The processor of the board does the rest of a token in published times, scaled by layers and width.
Attention in the fabric takes as long as its multiply-adds on `attention_lanes`, or as reading the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeinfer.common.arguments import check_integer
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.hls.board.boards import Board
from edgeinfer.hls.board.workload import Product, Workload
from edgeinfer.hls.cycles import cycles
from edgeinfer.hls.geometry import Geometry


@dataclass(frozen=True)
class Design:
    """What is built on a board.

    n_engines: each computes for a token of its own with the same weights, so that a pass takes n_engines tokens of a
    prompt, or of a draft to verify.  attention_lanes: multiply-adds a cycle of attention in the fabric, 0 where the
    processor does it.  ternary_head: a first stage of the output matrix of 1.6 bits a weight, whose best rows are
    computed again in int8.  embeddings: their type in the board's memory.
    """

    board: Board
    geometry: Geometry
    n_engines: int = 1
    attention_lanes: int = 0
    ternary_head: bool = True
    embeddings: Literal["int8", "bf16"] = "int8"

    def __post_init__(self) -> None:
        check_integer("the number of engines", self.n_engines, 1, 64)
        check_integer("attention lanes", self.attention_lanes, 0, 4096)
        if self.geometry.n_ports > self.board.n_ports:
            raise InvalidArgument(f"{self.board.name} has {self.board.n_ports} ports: found {self.geometry.n_ports}")


@dataclass(frozen=True)
class Token:
    """Seconds of a token at a context of n_ctx positions, by stage. All are modelled."""

    n_ctx: int
    stages: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of all stages, which follow each other."""
        return sum(self.stages.values())

    @property
    def tokens_per_second(self) -> float:
        """With one token after the other."""
        return 1 / self.seconds


def product_seconds(design: Design, product: Product) -> float:
    """Of one product with up to n_engines tokens: cycles of the engine, or the time to read its weights."""
    geometry, board = design.geometry, design.board
    n_cycles = cycles(geometry, product.n_in, product.n_out)
    n_bytes = geometry.stream_bytes(product.n_out, product.n_in)
    rate = board.stream_rate * geometry.n_ports / board.n_ports
    return max(n_cycles / board.clock_hz, n_bytes / rate)


def pass_seconds(design: Design, work: Workload) -> float:
    """Of all products of all layers, with up to n_engines tokens."""
    return sum(product_seconds(design, each) for each in work.products)


def head_seconds(design: Design, work: Workload) -> float:
    """Of the output matrix, read in one run."""
    if not design.ternary_head:
        return work.head_bytes / design.board.head_rate
    rescoring = design.board.host.rescoring * work.n_embd / design.board.host.n_embd
    return work.ternary_head_bytes / design.board.head_rate + rescoring


def attention_seconds(design: Design, work: Workload, n_positions: float) -> float:
    """Of a token that sees n_positions, in the fabric: multiply-adds, or reading keys and values in float16."""
    multiply_adds = 2 * work.n_layers * work.n_q * n_positions
    reading = 2 * 2 * work.n_kv * n_positions / design.board.stream_rate
    return max(multiply_adds / (design.attention_lanes * design.board.clock_hz), reading)


def host_stages(design: Design, work: Workload) -> dict[str, float]:
    """Seconds of each stage of the processor for a token. Attention is not among them where the fabric does it."""
    stages = design.board.host.scaled(work.n_layers, work.n_embd)
    return {name: seconds for name, seconds in stages.items() if name != "attention" or not design.attention_lanes}


def decode(design: Design, work: Workload, n_ctx: int) -> Token:
    """A token behind n_ctx others."""
    stages = {"weights": pass_seconds(design, work), "head": head_seconds(design, work)} | host_stages(design, work)
    if design.attention_lanes:
        stages["attention"] = attention_seconds(design, work, n_ctx + 1)
    return Token(n_ctx, stages)


def first_token_seconds(design: Design, work: Workload, n_prompt: int) -> float:
    """Until the first token behind a prompt of n_prompt tokens: passes of n_engines tokens, and the head once."""
    passes = -(-n_prompt // design.n_engines) * pass_seconds(design, work)
    host = n_prompt * sum(host_stages(design, work).values())
    attention = 0.0
    if design.attention_lanes:
        attention = n_prompt * attention_seconds(design, work, (n_prompt + 1) / 2)
    return passes + host + attention + head_seconds(design, work)


def floor_seconds(design: Design, work: Workload) -> float:
    """Of a token, if reading weights and head at the rate of the ports were all."""
    head = work.ternary_head_bytes if design.ternary_head else work.head_bytes
    return (work.weight_bytes(design.geometry) + head) / design.board.port_rate
