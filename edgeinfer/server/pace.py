"""How far a text is while it runs, as llama.cpp's clients are told: progress of its prompt, and times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.completion import Timings, Usage


@dataclass
class Pace:
    """Of one text.  n_read: tokens of the prompt that are read, those of the cache included.  began: its start."""

    n_prompt: int
    n_cached: int = 0
    n_read: int = 0
    n_made: int = 0
    began: float = field(default_factory=time.monotonic)
    now: float = 0.0  # when the last of all this was so
    first: float | None = None  # when the first token came

    def read(self, share: float) -> None:
        """So much is read of what the cache lacked."""
        self.n_read = self.n_cached + round(share * (self.n_prompt - self.n_cached))
        self.now = time.monotonic()

    def made(self, n: int) -> None:
        """So many tokens came."""
        self.now = time.monotonic()
        self.first = self.now if self.first is None else self.first
        self.n_made += n

    def progress(self) -> dict[str, Any]:
        """How much of the prompt is read, with the milliseconds that it took."""
        return {
            "total": self.n_prompt,
            "cache": self.n_cached,
            "processed": self.n_read,
            "time_ms": 1e3 * self._prompt_seconds,
        }

    def timings(self) -> dict[str, Any]:
        """Times so far; see times_of."""
        made = 0.0 if self.first is None else self.now - self.first
        return times_of(self.n_cached, self.n_read - self.n_cached, self._prompt_seconds, self.n_made, made)

    @property
    def _prompt_seconds(self) -> float:
        if self.n_read == self.n_cached:
            return 0.0
        return (self.now if self.first is None else self.first) - self.began


def times_of(n_cached: int, n_prompt: int, prompt_seconds: float, n_made: int, made_seconds: float) -> dict[str, Any]:
    """Times in milliseconds, and tokens a second. The first token comes with the prompt, and is none of the rate."""
    prompt_ms, made_ms, n_steps = 1e3 * prompt_seconds, 1e3 * made_seconds, max(0, n_made - 1)
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, n_prompt),
        "prompt_per_second": n_prompt / prompt_seconds if prompt_seconds else 0.0,
        "predicted_n": n_made,
        "predicted_ms": made_ms,
        "predicted_per_token_ms": made_ms / max(1, n_steps),
        "predicted_per_second": n_steps / made_seconds if made_seconds else 0.0,
    }


def timings_of(usage: Usage, timings: Timings) -> dict[str, Any]:
    """Times of an answer that has ended, and what was drafted."""
    n_prompt = usage.prompt_tokens - usage.cached_tokens
    found = times_of(
        usage.cached_tokens, n_prompt, timings.prompt_seconds, usage.completion_tokens, timings.decode_seconds
    )
    found |= {
        "prompt_per_second": timings.prompt_tokens_per_second,
        "predicted_per_second": timings.decode_tokens_per_second,
    }
    if (figures := timings.speculation) is not None:
        found["draft_n"] = sum(of.drafted for of in figures.by_depth)
        found["draft_n_accepted"] = sum(of.accepted for of in figures.by_depth)
    return found
