"""Recorded routing in the files of BigMoeOnEdge (github.com/Helldez/BigMoeOnEdge)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.offload.routing import NONE, Routing


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
