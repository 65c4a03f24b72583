"""A model with expert caches of several sizes: speed, bytes read, hits beside the best possible, and equality."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import ExpertBackend, Model, Progress
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument
from edgeinfer.common.types import ExpertSizes, Logits
from edgeinfer.loading.backend_choice import PlannedModel
from edgeinfer.loading.options import LoadOptions
from edgeinfer.loading.plan import plan_load
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.control import ExpertCache, ExpertControl, ExpertModel
from edgeinfer.offload.file_experts import has_experts
from edgeinfer.offload.policies import Farthest, count_hits
from edgeinfer.offload.reads import ExpertReads
from edgeinfer.offload.routing import Routing

PROMPT = """\
The library opens at nine. On Mondays it is closed in the morning, because new books are sorted then. Members may borrow
ten books for four weeks, and keep them longer if nobody else has asked for them. Write a short letter to a member who
has kept a book about the history of bridges for a year, be polite, and explain what happens next.
"""
WARM_UP, TIMED = 16, 64  # tokens behind the prompt


@dataclass(frozen=True)
class CachePoint:
    """What was measured with an expert cache of some size, over the tokens behind the warm-up.

    cache_bytes: None for all experts in memory.  share: of all experts, 0..1.  belady: hit rate of the best policy on
    the routing of this run, None without a cache.  waited_seconds: for a token, the mean of the threads that compute.
    is_equal: whether all logits are those of the whole model in memory, None where that was not asked for.
    """

    cache_bytes: int | None
    share: float
    tokens_per_second: float
    bytes_a_token: float
    hit_rate: float
    belady: float | None
    waited_seconds: float
    is_equal: bool | None

    def as_dict(self) -> dict[str, object]:
        """All of it, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Run:
    """A text: its tokens, the logits of each pass where they were asked for, and the seconds of the timed tokens.

    reads: of the cache for these, None without one.  belady: hit rate of the best policy for these.
    """

    tokens: Sequence[int]
    logits: Sequence[Logits]
    seconds: float
    reads: ExpertReads | None
    belady: float | None


def measure_caches(
    file: ModelFile,
    sizes: Sequence[str],
    n_threads: int | None,
    prove: bool,
    progress: Progress | None = None,
    budget: str | None = None,
) -> Iterator[CachePoint]:
    """A point for each size, as in `load(expert_cache=)`, in that order, with one model in memory at a time.

    prove: runs the whole model in memory first, and compares the logits of all rows with ==.
    Raises InvalidArgument for a model without experts, BudgetExceeded where a size, or for prove the whole model, does
    not fit into memory.
    """
    if not has_experts(file):
        raise InvalidArgument(f"{file.path}: a model without experts has no cache to measure: leave out --expert-cache")
    prompt = Tokenizer.from_file(file).encode(PROMPT, add_special=True, parse_special=False)
    n_ctx = len(prompt) + WARM_UP + TIMED
    options = LoadOptions(n_ctx=n_ctx, n_threads=n_threads, backend="native", draft="none", budget=budget)
    planned = [_exactly(file, replace(options, expert_cache=size)) for size in sizes]
    whole = _run(_whole(file, options), prompt, None, prove, progress) if prove else None
    for of_size in planned:
        yield _point(of_size, _run(of_size, prompt, whole, prove, progress), whole)


def _exactly(file: ModelFile, options: LoadOptions) -> PlannedModel:
    """The model with all that the options ask for. Raises BudgetExceeded."""
    plan = plan_load(file, options)
    if plan.steps:
        raise BudgetExceeded(
            f"expert_cache {options.expert_cache} does not fit: {plan.limit}, which leaves {'; '.join(plan.steps)}"
        )
    return plan.model


def _whole(file: ModelFile, options: LoadOptions) -> PlannedModel:
    try:
        return _exactly(file, replace(options, expert_cache=None))
    except BudgetExceeded as error:
        raise BudgetExceeded(f"--prove needs the whole model in memory once, which does not fit: {error}") from error


def _run(
    planned: PlannedModel, prompt: Sequence[int], like: _Run | None, prove: bool, progress: Progress | None
) -> _Run:
    """Read the prompt, then a token at a time: those of another run, or the most probable ones."""
    model = planned.load(progress)
    try:
        return _text(model, planned, prompt, like, prove)
    finally:
        model.close()


def _text(model: Model, planned: PlannedModel, prompt: Sequence[int], like: _Run | None, prove: bool) -> _Run:
    cache, control = _watched(model, planned)
    session, tokens, logits = model.session(), list(prompt), []
    routing: list[NDArray[np.int32]] = []
    began, before = 0.0, None
    for number in range(1 + WARM_UP + TIMED):
        rows = tokens if number == 0 else tokens[-1:]
        if number == 1 + WARM_UP:
            began, before = time.perf_counter(), None if control is None else control.reads()
        out = session.forward(rows, logits="all" if prove else "last")
        session.commit(range(len(rows)))
        tokens.append(int(out.logits[-1].argmax()) if like is None else like.tokens[len(tokens)])
        logits += [out.logits] if prove else []
        if cache is not None:
            routing.append(cache.routing().transpose(1, 0, 2))
    seconds = time.perf_counter() - began
    if cache is None or control is None or before is None:
        return _Run(tokens, logits, seconds, None, None)
    n_experts = _sizes(planned).n_experts
    return _Run(tokens, logits, seconds, control.reads().since(before), _belady(routing, n_experts, cache))


def _watched(model: Model, planned: PlannedModel) -> tuple[ExpertCache | None, ExpertControl | None]:
    """The cache, and what decides about it as after a first load; None without one."""
    if not isinstance(model, ExpertModel) or (cache := model.expert_cache) is None:
        return None, None
    control = ExpertControl(cache, _sizes(planned), planned.device.n_threads)
    model.watcher = control.run
    return cache, control


def _sizes(planned: PlannedModel) -> ExpertSizes:
    assert isinstance(planned.backend, ExpertBackend)  # others have no models with caches
    return planned.backend.expert_sizes(planned.file, planned.spec)


def _belady(routing: Sequence[NDArray[np.int32]], n_experts: int, cache: ExpertCache) -> float:
    """The best hit rate over the timed tokens, from all passes of a text."""
    lengths = [len(rows) for rows in routing]
    whole = Routing(np.concatenate(routing), n_experts, sum(lengths[: 1 + WARM_UP]), lengths)
    return count_hits(whole, Farthest(cache.stats().n_slots, whole)).hit_rate


def _point(planned: PlannedModel, run: _Run, whole: _Run | None) -> CachePoint:
    n_bytes, reads = planned.plan.expert_cache, run.reads
    total = _sizes(planned).total
    return CachePoint(
        cache_bytes=n_bytes,
        share=1.0 if n_bytes is None else n_bytes / total,
        tokens_per_second=TIMED / run.seconds,
        bytes_a_token=0.0 if reads is None else reads.bytes_read / TIMED,
        hit_rate=1.0 if reads is None else reads.hit_rate,
        belady=run.belady,
        waited_seconds=0.0 if reads is None else reads.waited_seconds / TIMED,
        is_equal=None if whole is None else all(map(np.array_equal, run.logits, whole.logits)),
    )
