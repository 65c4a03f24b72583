"""All that the model says of a ternary model on a board, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from edgeinfer.common.arguments import human_bytes
from edgeinfer.hls.board.model import Design, Token, decode, first_token_seconds, floor_seconds
from edgeinfer.hls.board.room import Room, memory_of, room
from edgeinfer.hls.board.workload import Workload

PROMPTS = (64, 128, 512)  # tokens


@dataclass(frozen=True)
class Report:
    """tokens: at the beginning and behind a full context.  first_token: seconds by the tokens of a prompt.

    floor: seconds of a token if reading were all.  memory: bytes by purpose.  room: against what the board has.
    """

    work: Workload
    design: Design
    n_ctx: int
    tokens: list[Token]
    first_token: dict[int, float]
    floor: float
    memory: dict[str, int]
    room: list[Room]

    @property
    def fits(self) -> bool:
        """Whether the board has room, as far as is known."""
        return all(each.fits for each in self.room)

    def as_dict(self) -> dict[str, Any]:
        """For JSON. All speeds are modelled, which their names say; counts of logic are estimates."""
        return {
            "model": self.work.name,
            "board": self.design.board.name,
            "geometry": asdict(self.design.geometry),
            "engines": self.design.n_engines,
            "attention_lanes": self.design.attention_lanes,
            "ternary_head": self.design.ternary_head,
            "embeddings": self.design.embeddings,
            "context": self.n_ctx,
            "weight_bytes": self.work.weight_bytes(self.design.geometry),
            "bits_a_trit": self.bits_a_trit,
            "modelled": {
                "tokens": [
                    {"context": each.n_ctx, "tokens_per_second": each.tokens_per_second, "stage_seconds": each.stages}
                    for each in self.tokens
                ],
                "first_token_seconds": {str(n): seconds for n, seconds in self.first_token.items()},
                "floor_seconds": self.floor,
            },
            "memory_bytes": self.memory,
            "room": [asdict(each) | {"fits": each.fits} for each in self.room],
            "inputs": {
                "clock_hz": self.design.board.clock_hz,
                "stream_bytes_per_second": self.design.board.stream_rate,
                "head_bytes_per_second": self.design.board.head_rate,
                "host": self.design.board.host.source,
            },
        }

    @property
    def bits_a_trit(self) -> float:
        """Bits of memory that a weight takes, padding included."""
        return 8 * self.work.weight_bytes(self.design.geometry) / self.work.n_weights


def report(design: Design, work: Workload, n_ctx: int, counts: dict[str, int] | None = None) -> Report:
    """What the model says. counts: logic estimates of one engine (room.py), None where they are not known."""
    tokens = [decode(design, work, n) for n in (0, n_ctx - 1)]
    prompts = sorted({n for n in PROMPTS if n < n_ctx} | {n_ctx})
    first = {n: first_token_seconds(design, work, n) for n in prompts}
    memory = memory_of(design, work, n_ctx)
    return Report(
        work, design, n_ctx, tokens, first, floor_seconds(design, work), memory, room(design, work, n_ctx, counts)
    )


def report_lines(found: Report) -> Iterator[str]:
    """The report as text. The word "model" stands at every number that is not counted from the files."""
    design, board, geometry = found.design, found.design.board, found.design.geometry
    yield f"{found.work.name} on {board.name}: {board.device}"
    engines = f"{design.n_engines} engine{'s' if design.n_engines > 1 else ''}"
    yield (
        f"{engines}, {geometry.encoding}, {geometry.rows} rows x {geometry.tables} tables = "
        f"{geometry.trits_per_cycle} multiply-adds a cycle each, {board.clock_hz / 1e6:.0f} MHz assumed"
    )
    n_bytes = human_bytes(found.work.weight_bytes(geometry))
    yield f"weights {n_bytes}, {found.bits_a_trit:.3f} bits a weight with padding"
    yield ""
    for token in found.tokens:
        yield f"{token.tokens_per_second:8.1f} tokens/s (model) behind {token.n_ctx} tokens: {_stages(token)}"
    yield f"{1 / found.floor:8.1f} tokens/s (model) if reading weights and head at the rate of the ports were all"
    for n, seconds in found.first_token.items():
        yield f"{seconds:8.2f} s (model) to the first token behind a prompt of {n}"
    if design.ternary_head:
        yield "The output matrix is taken to have a ternary first stage, as of `export --to fpga --rescored 256`."
    if not design.attention_lanes:
        yield "Attention on the processor is taken at its published time, at whatever context: see --attention-lanes."
    yield ""
    for each in found.room:
        yield _room_line(each)
    yield ""
    yield f"Inputs of the model: {board.stream_rate / 1e9:.2f} GB/s of weights and the stages of {board.host.name},"
    yield f"from {board.host.source}. Logic is an estimate by yosys of the engines alone, without the"
    yield "shell of the board. Nothing here was measured."


def _stages(token: Token) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in token.stages.items())


def _room_line(each: Room) -> str:
    if each.used is None:
        return f"{each.what:8} {'not counted for this geometry':>24} of {each.available} {each.unit}".rstrip()
    if each.unit == "bytes":
        text = f"{each.what:8} {human_bytes(each.used):>12} of {human_bytes(each.available)}"
    else:
        text = f"{each.what:8} {each.used:>12} of {each.available} {each.unit}".rstrip()
    return text + f" ({100 * each.used / each.available:.0f} %)" + ("" if each.fits else ": too few")
