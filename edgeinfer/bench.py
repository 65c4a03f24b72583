"""Speed of a model on this machine, beside memory bandwidth and int8 peak, measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.backends.base import Session
from edgeinfer.backends.native import MachineLimits, NativeSession
from edgeinfer.common import devices
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.models import ModelSizes, ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.file_experts import experts_of, is_of_experts
from edgeinfer.speculation.timeline import Timeline

if TYPE_CHECKING:
    from edgeinfer.engine import Engine
    from edgeinfer.speculation.stats import Speculation

CONTEXT = 64  # tokens before the ones that are timed
TIMELINE_PROMPT = 'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n'
TIMELINE_TOKENS = 64
CURVE = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Point:
    """Cost of a pass of n tokens, by engine. milliseconds: the median; spread: half the interquartile range."""

    n: int
    milliseconds: Mapping[str, float]
    spread: Mapping[str, float]

    def tokens_per_second(self, name: str) -> float:
        """Tokens per second of these passes."""
        return 1e3 * self.n / self.milliseconds[name]


@dataclass(frozen=True)
class Report:
    """Everything that `edgeinfer bench` measured. The first engine is ours.

    weight_bytes: read for one token.  multiply_adds: of the matrices, for one token; both None where the backend does
    not tell what it computes.  tuning: how ours reads its weights.
    """

    model: str
    cpu: str
    isa: str
    n_threads: int
    weight_bytes: int | None
    multiply_adds: int | None
    limits: MachineLimits
    curve: Sequence[Point]
    prefill: Point
    engines: Sequence[str] = field(default_factory=list)
    tuning: Mapping[str, object] | None = None

    @property
    def bandwidth_share(self) -> float | None:
        """Bytes of weights read per second when decoding, over the measured memory bandwidth."""
        if self.weight_bytes is None:
            return None
        seconds = self.curve[0].milliseconds[self.engines[0]] / 1e3
        return self.weight_bytes / seconds / self.limits.read_bytes_per_second

    @property
    def int8_share(self) -> float | None:
        """Multiply-adds per second in prefill, over the measured int8 peak."""
        if self.multiply_adds is None:
            return None
        seconds = self.prefill.milliseconds[self.engines[0]] / 1e3
        return self.multiply_adds * self.prefill.n / seconds / self.limits.int8_multiply_adds_per_second

    def cost(self, point: Point, name: str) -> float:
        """The verify cost c(n) of an engine: a pass of n tokens over a pass of one."""
        return point.milliseconds[name] / self.curve[0].milliseconds[name]

    def as_dict(self) -> dict[str, object]:
        """All of it, for JSON."""
        shares = {"bandwidth_share": self.bandwidth_share, "int8_share": self.int8_share}
        costs = {name: {point.n: self.cost(point, name) for point in self.curve} for name in self.engines}
        return asdict(self) | shares | {"cost": costs}


def record_rounds(engine: Engine) -> tuple[Timeline, Speculation]:
    """The timeline of verify passes and drafts of a short greedy answer, and its statistics. Raises InvalidArgument
    where nothing is drafted.
    """
    if engine.speculator is None:
        raise InvalidArgument(f"{engine.path}: nothing is drafted here, there is no timeline to show")
    engine.generate(TIMELINE_PROMPT, max_tokens=TIMELINE_TOKENS, temperature=0.0)  # warm-up
    engine.speculator.timeline = timeline = Timeline()
    completion = engine.generate(TIMELINE_PROMPT, max_tokens=TIMELINE_TOKENS, temperature=0.0)
    engine.speculator.timeline = None
    if completion.timings.speculation is None:
        raise InvalidArgument(f"{engine.path}: nothing was drafted, there is no timeline to show")
    return timeline, completion.timings.speculation


def work_of_a_token(file: ModelFile, spec: ModelSpec) -> tuple[int, int]:
    """(bytes of weights read, multiply-adds of the matrices) for one token; an embedding row is not counted.

    Of the experts only as many as a token uses count.
    """
    names = {name for name in spec.tensor_shapes() if spec.tied_embeddings or name != spec.token_embd}
    experts = experts_of(file)
    share = 1.0 if experts is None else experts.n_used / experts.n_experts
    n_bytes = multiply_adds = 0.0
    for info in map(file.tensors.__getitem__, names):
        part = share if is_of_experts(info.name) else 1.0
        n_bytes += part * info.n_bytes
        multiply_adds += part * info.n_elements if len(info.shape) > 1 else 0
    return round(n_bytes), round(multiply_adds)


def measure(
    sessions: Mapping[str, Session], sizes: Sequence[int], prefill: int, rounds: int
) -> tuple[list[Point], Point]:
    """The cost curve and the prefill of each session, alternating; the order is swapped every round.

    Logits are computed for all tokens of the curve, and for the last one of the prefill. Raises InvalidArgument if the
    contexts are too short.
    """
    for session in sessions.values():
        if session.n_ctx < CONTEXT + max(prefill, *sizes):
            raise InvalidArgument(f"a context of {CONTEXT + max(prefill, *sizes)} is needed: found {session.n_ctx}")
    n_vocab = min(session.spec.n_vocab for session in sessions.values())
    tokens = np.random.default_rng(1).integers(0, n_vocab, CONTEXT + max(prefill, *sizes)).astype(np.int32)
    for session in sessions.values():
        session.truncate(0)
        session.forward(tokens[:CONTEXT])
        session.commit(range(CONTEXT))
    curve = [_point(sessions, tokens, n, rounds, "all") for n in sizes]
    return curve, _point(sessions, tokens, prefill, max(3, rounds // 3), "last")


def _point(sessions: Mapping[str, Session], tokens: np.ndarray, n: int, rounds: int, logits: str) -> Point:
    times: dict[str, list[float]] = {name: [] for name in sessions}
    names = list(sessions)
    for turn in range(rounds + 1):
        for name in names:
            started = time.perf_counter()
            sessions[name].forward(tokens[CONTEXT : CONTEXT + n], logits="all" if logits == "all" else "last")
            elapsed = time.perf_counter() - started
            sessions[name].commit(())
            if turn:  # the first turn warms up
                times[name].append(1e3 * elapsed)
        names.reverse()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return Point(n, medians, {name: _half_quartiles(values) for name, values in times.items()})


def _half_quartiles(values: Sequence[float]) -> float:
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2


def report(
    file: ModelFile, spec: ModelSizes, sessions: Mapping[str, Session], isa: str, n_threads: int, rounds: int
) -> Report:
    """Measure the machine and the sessions, the first of which is ours."""
    limits = MachineLimits.measure(isa, n_threads)
    prefill = min(512, min(session.n_ctx for session in sessions.values()) - CONTEXT)
    curve, long = measure(sessions, CURVE, prefill, rounds)
    weight_bytes, multiply_adds = work_of_a_token(file, spec) if isinstance(spec, ModelSpec) else (None, None)
    ours = next(iter(sessions.values()))
    tuning = ours.model.tuning if isinstance(ours, NativeSession) else None
    return Report(
        model=file.path.name,
        cpu=devices.cpu_name(),
        isa=isa,
        n_threads=n_threads,
        weight_bytes=weight_bytes,
        multiply_adds=multiply_adds,
        limits=limits,
        curve=curve,
        prefill=long,
        engines=list(sessions),
        tuning=None if tuning is None else tuning.as_dict(),
    )
