"""Texts by which losses are measured, as windows that go through the model in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CalibrationText:
    """A text in tokens. n_prompt: the first tokens, whose predictions do not count; at least 1."""

    tokens: Sequence[int]
    n_prompt: int = 1


@dataclass(frozen=True)
class Window:
    """Tokens of one pass, and the rows whose predictions count."""

    tokens: Sequence[int]
    rows: Sequence[int]


def windows_of(texts: Iterable[CalibrationText], n_tokens: int, n_windows: int, n_rows: int) -> list[Window]:
    """Windows of n_tokens with n_rows that count at most, evenly spread; fewer where the texts end before.

    Texts stand one behind the other, as llama.cpp's perplexity tool has them. The last one of a window is cut; what is
    left of it is not used.
    """
    windows: list[Window] = []
    tokens: list[int] = []
    rows: list[int] = []
    for text in texts:
        ids = list(text.tokens)[: n_tokens - len(tokens)]
        rows = rows + [len(tokens) + i for i in range(max(text.n_prompt, 1) - 1, len(ids) - 1)]
        tokens = tokens + ids
        if len(tokens) == n_tokens:
            windows += [Window(tokens, _thinned(rows, n_rows))] if rows else []
            tokens, rows = [], []
        if len(windows) == n_windows:
            return windows
    return [*windows, Window(tokens, _thinned(rows, n_rows))] if rows else windows


def _thinned(values: list[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread."""
    return values if len(values) <= most else [values[i * len(values) // most] for i in range(most)]
