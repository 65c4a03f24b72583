"""Expected speed: tokens a second with and without drafts, the time to the first token, and experts read from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edgeinfer.common.settings import DEFAULT_DRAFT_MAX, LoadSettings
from edgeinfer.profiler.hits import HitRate, union_of
from edgeinfer.profiler.machine import Machine
from edgeinfer.profiler.passes import Passes, Work
from edgeinfer.profiler.planner import Planned

_RATE_OF_A_MODEL = 0.7  # share of a draft model's tokens that are accepted, where nothing says otherwise


@dataclass(frozen=True)
class Drafted:
    """Expected speed with drafts of a model or a head.

    acceptance_rate: share of draft tokens that are right, of a head as its file says it ("head"), otherwise assumed
    ("assumed"); it depends on the text.  n_draft: tokens drafted in a step, which pays most at that rate; 0 where
    drafting does not pay.  tokens_per_step: that a step then gives.
    """

    tokens_per_second: float
    acceptance_rate: float
    origin: Literal["head", "assumed"]
    n_draft: int
    tokens_per_step: float


@dataclass(frozen=True)
class Speed:
    """Expected speed behind n_past tokens.

    tokens_per_second: without drafts.  first_token_seconds: for a prompt of prompt_tokens.  hit_rate: of the expert
    cache, None where all is in memory.  read_seconds: a token waits for the disk.  drafted: None without a draft model
    or a head; drafters without a model make repeated text faster by what no header tells.
    """

    n_past: int
    tokens_per_second: float
    prompt_tokens: int
    first_token_seconds: float
    hit_rate: HitRate | None = None
    read_seconds: float = 0.0
    drafted: Drafted | None = None


@dataclass(frozen=True)
class SpeedModel:
    """Expected speed of a model on a machine, for any settings."""

    passes: Passes
    work: Work
    machine: Machine
    hit_rate: Callable[[int], HitRate] | None = None

    def speed(self, settings: LoadSettings, planned: Planned, n_past: int, prompt_tokens: int) -> Speed:
        """The speed with a plan. n_past: tokens before those that are generated."""
        hits = None
        if settings.expert_cache is not None and self.hit_rate is not None:
            hits = self.hit_rate(settings.expert_cache)
        read = self._read_seconds(hits)
        one = self.passes.seconds(1, n_past) + read
        first = self.passes.prompt_seconds(prompt_tokens, settings.n_batch)
        if settings.expert_cache is not None:
            first = max(first, self._prompt_read_seconds(prompt_tokens, settings.expert_cache))
        drafted = self._drafted(planned, n_past, read)
        return Speed(n_past, 1.0 / one, prompt_tokens, first, hits, read, drafted)

    def _read_seconds(self, hits: HitRate | None) -> float:
        """That a token waits for experts, as if nothing was computed meanwhile."""
        disk = self.machine.disk_bytes_per_second
        if hits is None or not disk:
            return 0.0
        return (1.0 - hits.share) * self.work.expert_bytes / disk

    def _prompt_read_seconds(self, n_tokens: int, cache_bytes: int) -> float:
        """Until the disk has given all experts that a prompt wants and the cache lacks; computing overlaps with it."""
        disk, work = self.machine.disk_bytes_per_second, self.work
        if not disk:
            return 0.0
        wanted = work.expert_bytes * union_of(n_tokens, work.n_experts, work.n_used)
        in_all = work.expert_bytes * work.n_experts / max(1, work.n_used)
        return max(0.0, 1.0 - cache_bytes / max(1.0, in_all)) * wanted / disk

    def _drafted(self, planned: Planned, n_past: int, read: float) -> Drafted | None:
        """The speed with a draft model or a head, with the number of draft tokens that gives the most."""
        drafters = planned.drafters
        if not drafters.weight_bytes:
            return None
        origin: Literal["head", "assumed"] = "assumed" if drafters.acceptance_rate is None else "head"
        rate = _RATE_OF_A_MODEL if drafters.acceptance_rate is None else drafters.acceptance_rate
        each = self.passes.whole[1] * drafters.weight_bytes / max(1, self.work.n_bytes)
        if drafters.is_head:  # which reads the target's output matrix
            each += self.passes.output
        best, best_n, best_tokens = 1.0 / (self.passes.seconds(1, n_past) + read), 0, 1.0
        for n in range(1, DEFAULT_DRAFT_MAX + 1):
            tokens = sum(rate**i for i in range(n + 1))
            found = tokens / (self.passes.seconds(n + 1, n_past) + read + n * each)
            if found > best:
                best, best_n, best_tokens = found, n, tokens
        return Drafted(best, rate, origin, best_n, best_tokens)
