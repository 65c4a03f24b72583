"""Counters and times of a server, as Prometheus reads them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from edgeinfer.completion import Completion

_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_KEPT = 2048  # values that quantiles are of


@dataclass
class Summary:
    """Quantiles of the last values, their sum and number."""

    total: float = 0.0
    n: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, value: float) -> None:
        """Count a value."""
        self.total += value
        self.n += 1
        self.last.append(value)

    def quantile(self, share: float) -> float:
        """The value that this share of the last ones is not above; 0 without any."""
        if not self.last:
            return 0.0
        ordered = sorted(self.last)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Metrics:
    """What happened since the start; of the event loop."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    tokens: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)  # texts by the reason of their end
    steps: Counter[str] = field(default_factory=Counter)  # of speculation
    first_token: Summary = field(default_factory=Summary)
    between_tokens: Summary = field(default_factory=Summary)
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    longest: int = 0  # tokens of prompt and answer together

    def count(self, completion: Completion) -> None:
        """Count a text that has ended."""
        usage, figures = completion.usage, completion.timings.speculation
        self.tokens["prompt"] += usage.prompt_tokens
        self.tokens["cached"] += usage.cached_tokens
        self.tokens["completion"] += usage.completion_tokens
        self.finished[completion.finish_reason] += 1
        self.prompt_seconds += completion.timings.prompt_seconds
        self.decode_seconds += completion.timings.decode_seconds
        self.longest = max(self.longest, usage.prompt_tokens + usage.completion_tokens)
        if figures is not None:
            self.steps["drafted"] += sum(of.drafted for of in figures.by_depth)
            self.steps["accepted"] += sum(of.accepted for of in figures.by_depth)
            self.steps["drafts"] += figures.drafts

    def lines(self, gauges: Iterable[tuple[str, str, float]]) -> Iterator[str]:
        """The text of /metrics. gauges: (name with labels, help, value) of what is so now."""
        yield from _counter(
            "requests_total",
            "Requests by path and status.",
            ((f'path="{path}",status="{status}"', n) for (path, status), n in sorted(self.requests.items())),
        )
        for name in ("prompt", "cached", "completion"):
            yield from _counter(f"{name}_tokens_total", f"Tokens: {name}.", [("", self.tokens[name])])
        for name in ("drafted", "accepted"):
            yield from _counter(f"{name}_tokens_total", f"Draft tokens {name}.", [("", self.steps[name])])
        yield from _counter(
            "texts_total", "Texts by their end.", ((f'end="{end}"', n) for end, n in sorted(self.finished.items()))
        )
        yield from _summary("time_to_first_token_seconds", "From the request to its first token.", self.first_token)
        yield from _summary("time_between_tokens_seconds", "Between two pieces of a text.", self.between_tokens)
        by_name: dict[str, tuple[str, list[str]]] = {}
        for name, about, value in gauges:
            lines = by_name.setdefault(name.partition("{")[0], (about, []))[1]
            lines.append(f"edgeinfer_{name} {value:.6f}" if value != int(value) else f"edgeinfer_{name} {int(value)}")
        for name, (about, lines) in by_name.items():
            yield f"# HELP edgeinfer_{name} {about}"
            yield f"# TYPE edgeinfer_{name} gauge"
            yield from lines


def _counter(name: str, about: str, values: Iterable[tuple[str, int]]) -> Iterator[str]:
    yield f"# HELP edgeinfer_{name} {about}"
    yield f"# TYPE edgeinfer_{name} counter"
    for labels, value in values:
        yield f"edgeinfer_{name}{{{labels}}} {value}" if labels else f"edgeinfer_{name} {value}"


def _summary(name: str, about: str, summary: Summary) -> Iterator[str]:
    yield f"# HELP edgeinfer_{name} {about}"
    yield f"# TYPE edgeinfer_{name} summary"
    for share in _QUANTILES:
        yield f'edgeinfer_{name}{{quantile="{share}"}} {summary.quantile(share):.6f}'
    yield f"edgeinfer_{name}_sum {summary.total:.6f}"
    yield f"edgeinfer_{name}_count {summary.n}"
