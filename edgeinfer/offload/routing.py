"""Recorded routing: which experts each token of a text used in each layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import InvalidArgument

NONE = -1  # no expert, where a layer was not run for a token


@dataclass(frozen=True)
class Routing:
    """The experts that tokens used, and how the tokens were cut into passes.

    chosen: (n_tokens, n_layers, n_used) int32, NONE where a layer was not run for a token.  n_experts: of a layer.
    n_prompt: tokens of the prompt, the first ones.  pass_lengths: tokens of each pass, None where each is one of its
    own.
    """

    chosen: NDArray[np.int32]
    n_experts: int
    n_prompt: int = 0
    pass_lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.chosen.ndim != 3:
            raise InvalidArgument(f"routing must be (n_tokens, n_layers, n_used): found {self.chosen.shape}")
        if self.chosen.size and not NONE <= self.chosen.min() <= self.chosen.max() < self.n_experts:
            raise InvalidArgument(f"routing must be of experts 0..{self.n_experts - 1}, or {NONE} for none")
        if self.pass_lengths is not None and sum(self.pass_lengths) != self.n_tokens:
            raise InvalidArgument(f"passes must have all {self.n_tokens} tokens: found {sum(self.pass_lengths)}")

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.chosen)

    @property
    def n_layers(self) -> int:
        """Number of layers with experts."""
        return int(self.chosen.shape[1])

    def passes(self) -> Iterator[tuple[bool, list[list[int]]]]:
        """Of each pass: whether it is of the prompt, and by layer the experts that its rows want, ascending."""
        first = 0
        for length in [1] * self.n_tokens if self.pass_lengths is None else self.pass_lengths:
            rows = self.chosen[first : first + length]
            is_prompt = first < self.n_prompt
            if length == 1:
                yield is_prompt, [sorted({*used} - {NONE}) for used in rows[0].tolist()]
            else:
                yield is_prompt, [sorted({*rows[:, layer].reshape(-1).tolist()} - {NONE}) for layer in self.layers]
            first += length

    @property
    def layers(self) -> range:
        """Indices of the layers."""
        return range(self.n_layers)


def read_trace(path: Path) -> Routing:
    """The routing in a CSV file of BigMoeOnEdge's --route-trace; each token is a pass of its own.

    Lines are turn,phase,step,layer,slot,expert,... with phase 0 for the prompt and steps counted from the beginning of
    a turn; the header names n_layer, n_expert and n_expert_used. Raises InvalidArgument, which names the line.
    """
    sizes: dict[str, int] = {}
    tokens: dict[tuple[int, int, int], int] = {}
    cells: list[tuple[int, int, int, int]] = []
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.startswith("#"):
                sizes |= {name: int(value) for name, value in re.findall(r"\b(n_\w+)=(\d+)", line)}
            elif line[0].isdigit():
                turn, phase, step, layer, slot, expert = _fields(line, f"{path}:{number}")
                cells.append((tokens.setdefault((turn, phase, step), len(tokens)), layer, slot, expert))
    if missing := {"n_layer", "n_expert", "n_expert_used"} - sizes.keys():
        raise InvalidArgument(f"{path} is no routing trace: its header lacks {', '.join(sorted(missing))}")
    chosen = np.full((len(tokens), sizes["n_layer"], sizes["n_expert_used"]), NONE, np.int32)
    where = np.array(cells, np.int64).reshape(-1, 4).T
    try:
        chosen[where[0], where[1], where[2]] = where[3]
    except IndexError as error:
        raise InvalidArgument(f"{path} has layers or slots that its header does not: {error}") from None
    n_prompt = sum(phase == 0 for _, phase, _ in tokens)
    return Routing(chosen, sizes["n_expert"], n_prompt)


def _fields(line: str, place: str) -> list[int]:
    """The first six numbers of a line. Raises InvalidArgument."""
    found = line.split(",")[:6]
    if len(found) < 6 or not all(text.isdecimal() for text in found):
        raise InvalidArgument(f"{place} must be turn,phase,step,layer,slot,expert: found {line.strip():.80}")
    return [int(text) for text in found]
