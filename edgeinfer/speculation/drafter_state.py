"""A drafter in the speculation loop: what was learnt about it, and whether it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from edgeinfer.common.errors import BackendLost, Interrupted
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.drafters.base import (
    BackgroundDrafter,
    Context,
    Drafter,
    FeatureDrafter,
    JointDrafter,
    ModelBasedDrafter,
    TargetDrafter,
)
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.speculation.throughput import chain_rate, overlapped_rate

_ASKED_EVERY = 8  # steps, of a model-free drafter that saves less time than it takes
_SAVED_DECAY = 0.97  # of the time that a drafter saved, each step
_MIN_CREDIT = 0.25  # of a pass of one token: what a model-free drafter that lost lately may cost in the next request


@dataclass(frozen=True, slots=True)
class DrafterPlacement:
    """Where a model-based drafter runs."""

    device: str  # for messages
    # opens the drafter that replaces it if its device fails; None for none
    fallback: Callable[[], Drafter] | None = field(default=None, repr=False)
    reuses_memory: bool = False  # the fallback fits only into the memory that the drafter frees


class _Guard:
    """See DrafterState.guarded. No generator: it is around every call of a drafter."""

    __slots__ = ("_started", "_state", "_stats")

    def __init__(self, state: DrafterState, stats: StatsCounter) -> None:
        self._state, self._stats = state, stats

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        state = self._state
        if error is not None:  # whatever a drafter does, generation continues
            if not isinstance(error, Exception) or isinstance(error, Interrupted) or is_from_handler(error):
                return False
            state.drop(error, self._stats)
        seconds = perf_counter() - self._started
        state.saved_ms -= 1e3 * seconds
        if state.model_based is not None:
            self._stats.waited_seconds += seconds
        return True


class DrafterState:
    """A drafter, its acceptance probabilities, and whether it is asked for drafts."""

    def __init__(self, drafter: Drafter, table: AcceptanceTable) -> None:
        self.drafter = drafter
        self.table = table
        self.model_based = drafter if isinstance(drafter, ModelBasedDrafter) else None
        self.feature_drafter = drafter if isinstance(drafter, FeatureDrafter) else None
        self.target_drafter = drafter if isinstance(drafter, TargetDrafter) else None
        self.joint = drafter if isinstance(drafter, JointDrafter) and drafter.can_join else None
        self.background = drafter if isinstance(drafter, BackgroundDrafter) else None
        self.is_dropped = False  # for this request
        self.lost = ""  # how its device failed
        self.is_asked = False  # in this step
        self.saved_ms = math.inf  # that a model-free drafter saved lately, less what it took
        self.n_steps = 0

    @property
    def is_active(self) -> bool:
        """Whether a model-free drafter is asked in this step; one that costs more than it saves is retried at times."""
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

    def guarded(self, stats: StatsCounter) -> _Guard:
        """Around a drafter's work: counts its time, and drops it for this request with the reason if it raises."""
        return _Guard(self, stats)

    def drop(self, error: Exception, stats: StatsCounter) -> None:
        """Use the drafter no more in this request."""
        self.is_dropped = True
        if isinstance(error, (BackendLost, MemoryError)):
            self.lost = str(error) or "out of memory"
        stats.dropped[self.drafter.name] = f"{type(error).__name__}: {error}"

    def cost(self, context: Context, n_texts: int = 1) -> tuple[float, float]:
        """See ModelBasedDrafter.cost and JointDrafter.joint_cost."""
        if n_texts > 1:
            return (math.inf, 0.0) if self.joint is None else self.joint.joint_cost(context, n_texts)
        return (math.inf, 0.0) if self.model_based is None else self.model_based.cost(context)

    def rate(
        self, context: Context, verify_ms: Sequence[float], max_nodes: int, n_texts: int = 1
    ) -> tuple[float, float]:
        """Expected tokens per millisecond with a drafter that has a model, and milliseconds of its prefill.

        n_texts: that are drafted for in the same passes; verify_ms is then that of so many texts, shared by them.
        """
        if self.model_based is None:
            return 0.0, 0.0
        token_ms, prefill_ms = self.cost(context, n_texts)
        rate_of = chain_rate if self.background is None else overlapped_rate
        return rate_of(self.table.acceptance_rate, token_ms, verify_ms, max_nodes), prefill_ms
