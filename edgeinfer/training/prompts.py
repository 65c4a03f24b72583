"""Prompts from a JSON Lines file, in an order that depends only on a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.user_text import without_mark


@dataclass(frozen=True)
class Prompt:
    """The messages of a person in a conversation."""

    turns: tuple[str, ...]
    category: str = field(default="", compare=False)  # for reports

    def number(self, purpose: str, seed: int) -> int:
        """A number in 0..2**64 - 1 that is the same for the same prompt, purpose and seed."""
        text = json.dumps([purpose, seed, *self.turns])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def share(self, purpose: str, seed: int) -> float:
        """The number as a share, 0 <= share < 1."""
        return (self.number(purpose, seed) >> 11) / 2**53


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, each once: lines with "turns", a list of texts, or "prompt", one text; and "category".

    Raises InvalidArgument, which names the line, and OSError.
    """
    lines = enumerate(without_mark(path.read_bytes(), path).splitlines(), start=1)
    prompts = [_read_prompt(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise InvalidArgument(f"{path} must have a prompt a line: found none")
    return list(dict.fromkeys(prompts))


def shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """The prompts in the order of a hash, whatever their order in the file."""
    return sorted(prompts, key=lambda prompt: prompt.number("order", seed))


def held_out(prompts: Sequence[Prompt], n: int) -> tuple[list[Prompt], list[Prompt]]:
    """(to train on, to hold out). Held out are the n prompts with the smallest hashes, whatever seed and order."""
    out = sorted(prompts, key=lambda prompt: prompt.number("held out", 0))[:n]
    held = set(out)
    return [prompt for prompt in prompts if prompt not in held], out


def _read_prompt(line: bytes, place: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{place} is no JSON: {error}") from None
    turns = value.get("turns", [value.get("prompt")]) if isinstance(value, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidArgument(f'{place} must have "turns", a list of texts, or "prompt", a text: found {value!r:.80}')
    return Prompt(tuple(turns), str(value.get("category", "")))
