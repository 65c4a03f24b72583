"""The order in which the tables of an engine are filled, and the ROM of it in Verilog.

Two entries of a table that differ by one in one digit differ by one activation. A walk over all 3^G entries that only
takes such steps fills a table with one adder: each entry is the one before plus or minus one activation. The walk
begins one step beside the entry of zeros, whose sum is 0, so the adder begins at 0. (The entry of zeros itself is no
beginning: entries with an odd and an even sum of digits alternate, and it belongs to those that are fewer by one.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeinfer.common.errors import InvalidArgument

_Weights = tuple[int, ...]
RTL = Path(__file__).parent / "rtl"
COLUMNS = 6  # words in a line of the ROM


@dataclass(frozen=True)
class Move:
    """One step: the sum so far plus (or minus, where negative) activation `digit` is that of `entry`."""

    entry: int
    digit: int
    negative: bool


def walk(n_trits: int) -> list[Move]:
    """The moves that reach each of 3^n_trits entries once, beginning beside the entry of zeros. n_trits: 3 or 5.

    Goes to the entry that has the fewest ways on (Warnsdorff's rule), which never needs to go back for these sizes.
    """
    if n_trits not in (3, 5):
        raise InvalidArgument(f"a walk is known for tables of 3 or 5 trits: found {n_trits}")
    here = (0,) * n_trits
    there = (-1,) + here[1:]
    moves, seen = [], set()
    while True:
        digit = next(j for j in range(n_trits) if here[j] != there[j])
        entry = sum((weight + 1) * 3**j for j, weight in enumerate(there))
        moves.append(Move(entry, digit, there[digit] < here[digit]))
        seen.add(there)
        ways = [way for way in _neighbours(there) if way not in seen]
        if not ways:
            return moves
        here, there = there, min(ways, key=lambda way: (_n_ways(way, seen), [-abs(weight) for weight in way], way))


def rom_source(n_trits: int) -> str:
    """The Verilog module with the walk over tables of so many trits."""
    moves, address_bits = walk(n_trits), (3**n_trits).bit_length()
    select_bits = (n_trits - 2).bit_length()
    word_bits = address_bits + select_bits + 3
    words = [_word(move, n_trits, address_bits, select_bits, move is moves[-1]) for move in moves]
    digits = [f"{word_bits}'h{word:0{-(-word_bits // 4)}x}" for word in reversed(words)]
    lines = [", ".join(digits[first : first + COLUMNS]) for first in range(0, len(digits), COLUMNS)]
    style = '    (* rom_style = "block" *)\n' if n_trits == 5 else ""
    return _ROM.format(
        name=f"ei_walk_rom_g{n_trits}",
        n_trits=n_trits,
        n_entries=len(moves),
        high=address_bits - 1,
        address_bits=address_bits,
        last_word=(1 << address_bits) - 1,
        last_digit=n_trits - 1,
        word_high=word_bits - 1,
        select=f"[{address_bits + select_bits - 1}:{address_bits}]",
        positive=address_bits + select_bits,
        uses_last=address_bits + select_bits + 1,
        last=address_bits + select_bits + 2,
        words=",\n".join(f"        {line}" for line in lines),
        word_bits=word_bits,
        style=style,
    )


def write() -> None:
    """Write the ROMs into rtl/. Run: python -m edgeinfer.hls.walk"""
    for n_trits in (3, 5):
        (RTL / f"ei_walk_rom_g{n_trits}.sv").write_text(rom_source(n_trits), encoding="utf-8")


def _word(move: Move, n_trits: int, address_bits: int, select_bits: int, last: bool) -> int:
    """A word of the ROM; its layout stands in the header of the module."""
    uses_last = move.digit == n_trits - 1
    select = 0 if uses_last else move.digit
    flags = (not move.negative) | uses_last << 1 | last << 2
    return move.entry | select << address_bits | flags << (address_bits + select_bits)


def _neighbours(weights: _Weights) -> list[_Weights]:
    """Entries that differ by one in one digit."""
    ways = [(j, weights[j] + step) for j in range(len(weights)) for step in (1, -1)]
    return [weights[:j] + (weight,) + weights[j + 1 :] for j, weight in ways if -1 <= weight <= 1]


def _n_ways(weights: _Weights, seen: set[_Weights]) -> int:
    return sum(way not in seen for way in _neighbours(weights))


_ROM = """\
// The walk over the {n_entries} entries of a table of {n_trits} trits: word i takes the sum to the i-th entry.
// Written by hls/walk.py; do not edit. Latency: 2 cycles, both registers hold while `enable` is low.
//
//   bits [{high}:0]   the entry
//   bits {select}  the activation that is added, where it is not activation {last_digit}
//   bit  {positive}      it is added, not subtracted
//   bit  {uses_last}      it is activation {last_digit}
//   bit  {last}      the last word
module {name} (
    input  logic clk,
    input  logic enable,
    input  logic [{high}:0] index,
    output logic [{word_high}:0] word
);
    localparam logic [{n_entries}*{word_bits}-1:0] WORDS = {{
{words}
    }};

`ifdef EI_ECP5
    ei_ecp5_ram #(.WIDTH({word_bits}), .ADDRESS({address_bits}), .N_WORDS({n_entries}), .WORDS(WORDS)) rom (
        .clk(clk),
        .write(1'b0),
        .write_address({address_bits}'b0),
        .write_data({word_bits}'b0),
        .read_address(index),
        .enable(enable),
        .clear(1'b0),
        .read_data(word)
    );
`else
{style}    logic [{word_high}:0] words[0:{last_word}];
    logic [{word_high}:0] read;

    integer i;
    initial begin
        for (i = 0; i <= {last_word}; i = i + 1) words[i] = 0;
        for (i = 0; i < {n_entries}; i = i + 1) words[i] = WORDS[i*{word_bits}+:{word_bits}];
    end

    always_ff @(posedge clk)
        if (enable) begin
            read <= words[index];
            word <= read;
        end
`endif
endmodule
"""

if __name__ == "__main__":
    write()
