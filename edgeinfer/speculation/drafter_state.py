"""A drafter in the speculation loop: what was learnt about it, and whether it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from edgeinfer.common.errors import BackendLost, Interrupted
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.drafters.base import BackgroundDrafter, Context, CostlyDrafter, Drafter, FeatureDrafter
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.speculation.throughput import chain_rate, overlapped_rate

_ASKED_EVERY = 8  # steps, of a free drafter that saves less time than it takes
_SAVED_DECAY = 0.97  # of the time that a drafter saved, each step
_MIN_CREDIT = 0.25  # of a pass of one token: what a free drafter that lost lately may cost in the next request


@dataclass(frozen=True, slots=True)
class DrafterPlacement:
    """Where a drafter with a model runs.

    device: for messages.  fallback: opens the drafter that replaces it if its device fails; None for none.
    reuses_memory: the fallback fits only into the memory that the drafter frees.
    """

    device: str
    fallback: Callable[[], Drafter] | None = field(default=None, repr=False)
    reuses_memory: bool = False


class DrafterState:
    """A drafter, its acceptance probabilities, and whether it is asked for drafts."""

    def __init__(self, drafter: Drafter, acceptance_rate: float | None = None) -> None:
        self.drafter = drafter
        self.table = AcceptanceTable(acceptance_rate)
        self.costly = drafter if isinstance(drafter, CostlyDrafter) else None
        self.feature_drafter = drafter if isinstance(drafter, FeatureDrafter) else None
        self.background = drafter if isinstance(drafter, BackgroundDrafter) else None
        self.is_dropped = False  # for this request
        self.lost = ""  # how its device failed
        self.is_asked = False  # in this step
        self.saved_ms = math.inf  # that a free drafter saved lately, less what it took
        self.n_steps = 0

    @property
    def is_active(self) -> bool:
        """Whether a free drafter is asked in this step. One that costs more than it saves is retried now and then."""
        return not self.is_dropped and (self.saved_ms >= 0.0 or self.n_steps % _ASKED_EVERY == 0)

    def start_request(self, plain_ms: float) -> None:
        """Decay what was learnt from earlier texts. plain_ms: of a pass of one token."""
        self.saved_ms = min(max(self.saved_ms, _MIN_CREDIT * plain_ms), plain_ms)

    def count(self, verify_ms: Sequence[float], n_nodes: int, n_own: int, n_accepted: int) -> None:
        """A step verified n_nodes; n_own of them were this drafter's, and n_accepted of these were accepted."""
        self.n_steps += 1
        self.saved_ms *= _SAVED_DECAY
        if n_own:
            node_ms = (verify_ms[n_nodes + 1] - verify_ms[1]) / n_nodes
            self.saved_ms += n_accepted * verify_ms[1] - n_own * node_ms

    @contextmanager
    def guarded(self, stats: StatsCounter) -> Iterator[None]:
        """Around a drafter's work: counts its time, and drops it for this request with the reason if it raises."""
        started = perf_counter()
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:  # whatever a drafter does, generation continues
            if is_from_handler(error):
                raise
            self.is_dropped = True
            if isinstance(error, (BackendLost, MemoryError)):
                self.lost = str(error) or "out of memory"
            stats.dropped[self.drafter.name] = f"{type(error).__name__}: {error}"
        seconds = perf_counter() - started
        self.saved_ms -= 1e3 * seconds
        if self.costly is not None:
            stats.waited_seconds += seconds

    def rate(self, context: Context, verify_ms: Sequence[float], max_nodes: int) -> tuple[float, float]:
        """Expected tokens per millisecond with a drafter that has a model, and milliseconds of its prefill."""
        if self.costly is None:
            return 0.0, 0.0
        token_ms, prefill_ms = self.costly.cost(context)
        rate_of = chain_rate if self.background is None else overlapped_rate
        return rate_of(self.table.acceptance_rate, token_ms, verify_ms, max_nodes), prefill_ms
