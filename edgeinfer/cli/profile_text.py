"""The profile of a model as text."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence

from edgeinfer.common.settings import DEFAULT_PARALLEL
from edgeinfer.memory.budget import Ledger
from edgeinfer.profiler.fit import BEST, Fitted
from edgeinfer.profiler.machine import Machine
from edgeinfer.profiler.report import AtCache, AtContext, Profile
from edgeinfer.profiler.speed import Speed
from edgeinfer.speculation.draft_names import MODEL_FREE

_ORIGINS = {
    "calibrated": "passes of this model, timed here when it last drafted",
    "made-up weights": "layers of these shapes with made-up weights, timed here once",
    "limits": "bytes over bandwidth and multiply-adds over their rate: the most that could be",
}
_HIT_ORIGINS = {
    "all": "",
    "measured": "measured in earlier runs here",
    "usage": "from how often experts were used here",
    "traces": "from recorded routing of other models",
}
_MOST_FITTING = 16  # rows
_DRAFTER_NAMES = ("auto", "none", *MODEL_FREE)


def profile_lines(found: Profile) -> Iterator[str]:
    """The lines of a profile."""
    yield from _heading(found)
    yield ""
    yield from _ledger_lines(found)
    yield ""
    yield from _speed_lines(found)
    yield ""
    yield from _table(
        ["n_ctx", "memory", "KV cache", "tokens/s, full", "whole prompt"], map(_context_row, found.contexts)
    )
    yield "Memory is planned; speeds are expected: decoding after a full context, and a prompt as long as the context."
    if found.caches:
        yield ""
        yield from _cache_lines(found.caches)
    if found.fit is not None:
        yield ""
        yield from _fit_lines(found)
    if found.verification is not None:
        yield ""
        yield from verification_lines(found)


def _heading(found: Profile) -> Iterator[str]:
    settings = found.settings
    texts = "" if settings.n_texts in (1, DEFAULT_PARALLEL) else f", {settings.n_texts} texts at once"
    yield f"{found.path.name}: n_ctx {settings.n_ctx}{texts}, cache {settings.cache_type}, {found.backend} backend"
    yield f"machine: {', '.join(_machine_facts(found.machine))}"


def _machine_facts(machine: Machine) -> Iterator[str]:
    def of(name: str, text: str) -> str:
        return f"{text} {'given' if name in machine.given else 'measured here'}"

    if machine.is_here:
        yield f"{machine.name}, {machine.n_threads} threads"
    free = "given" if "memory" in machine.given else "free here"
    yield f"memory {_size(machine.memory_bytes)} {free}"
    if machine.read_bytes_per_second:
        yield of("bandwidth", f"bandwidth {machine.read_bytes_per_second / 1e9:.1f} GB/s")
    if machine.multiply_adds_per_second:
        yield of("compute", f"{machine.multiply_adds_per_second / 1e9:.0f} G multiply-adds/s")
    if machine.disk_bytes_per_second:
        yield of("disk", f"disk {machine.disk_bytes_per_second / 1e9:.2f} GB/s")


def _ledger_lines(found: Profile) -> Iterator[str]:
    """The table by purpose, and whether it fits."""
    ledger = found.ledger
    rows = [[item.name, _size(item.planned), "mapped" if item.is_mapped else ""] for item in ledger.items]
    rows.append(["all", _size(ledger.planned), ""])
    if ledger.loading:
        rows.append(["more while loading", _size(ledger.loading), ""])
    yield from _table(["purpose", "planned", ""], rows)
    rest = found.budget - ledger.peak
    what = "has" if "memory" in found.machine.given else "has free"
    fits = f"{_size(rest)} are left" if rest >= 0 else f"{_size(-rest)} too few"
    yield f"The peak is {_size(ledger.peak)}, the machine {what} {_size(found.budget)}: {fits}."
    yield f"The first schema, grammar or tool takes up to {_size(found.first_constraint)} more."
    for name, reason in found.planned.drafters.dropped.items():
        yield f"Left out is {name}: {reason}"


def _speed_lines(found: Profile) -> Iterator[str]:
    speed, passes = found.speed, found.passes
    yield f"Expected, from {_ORIGINS[passes.origin]}:"
    if not found.machine.is_here and passes.origin != "limits":
        yield "  (scaled to that machine; what was not given is taken to be as here)"
    if passes.is_disturbed or found.machine.is_disturbed:
        yield "  (other processes had the cores meanwhile: it is faster than this; it was not kept)"
    yield f"  decoding                 {speed.tokens_per_second:.3g} tokens/s without drafts"
    yield from _drafted_line(found, speed)
    first = _seconds(speed.first_token_seconds)
    yield f"  time to first token      {first}, {speed.prompt_tokens}-token prompt"
    rate = found.speeds.work.n_bytes / passes.seconds(1, 0) / 1e9
    yield f"  weights are read at      {rate:.1f} GB/s, {_size(found.speeds.work.n_bytes)} for a token"
    costs = ", ".join(f"{n}: {cost:.2f}" for n, cost in found.costs.items())
    yield f"  cost of n tokens, c(n)   {costs}"


def _drafted_line(found: Profile, speed: Speed) -> Iterator[str]:
    drafted, names = speed.drafted, ", ".join(found.planned.drafters.names)
    if drafted is not None:
        rate = f"{100 * drafted.acceptance_rate:.0f} %"
        origin = "as the head's file says" if drafted.origin == "head" else "an assumption"
        if drafted.n_draft:
            speed_with = f"{drafted.tokens_per_second:.3g} tokens/s with drafts, {drafted.tokens_per_step:.1f} per step"
            yield f"                           {speed_with}"
            yield f"                           (acceptance rate {rate}, {origin})"
        else:
            yield f"                           no faster with drafts (acceptance rate {rate}, {origin})"
    elif names:
        yield f"                           more with drafts ({names}), in text that repeats itself"


def _context_row(row: AtContext) -> list[str]:
    kv_cache = sum(row.ledger.of(purpose) for purpose in ("KV cache", "window", "recurrent state"))
    tokens, seconds = f"{row.speed.tokens_per_second:.3g}", _seconds(row.speed.first_token_seconds)
    return [str(row.n_ctx), _size(row.ledger.peak), _size(kv_cache), tokens, seconds]


def _cache_lines(caches: Sequence[AtCache]) -> Iterator[str]:
    def row(at: AtCache) -> list[str]:
        hits = at.speed.hit_rate
        share = "" if hits is None else f"{100 * hits.share:.0f} %"
        size = f"{_size(at.expert_cache)}, {100 * at.share:.0f} %"
        origin = "" if hits is None else _HIT_ORIGINS[hits.origin]
        return [size, _size(at.peak), share, f"{at.speed.tokens_per_second:.3g}", origin]

    yield from _table(["expert cache", "memory", "hits", "tokens/s", ""], map(row, caches))
    yield "Hits and speed are expected: computing and reading from disk one after the other, the least that is likely."


def _fit_lines(found: Profile) -> Iterator[str]:
    fit, budget = found.fit or (), _size(found.fit_budget or 0)
    if not fit:
        yield f"Nothing fits into {budget}."
        return
    if len(fit) == 1:
        yield f"Only this fits into {budget}: {_as_flags(fit[0])}"
        yield f"It takes {_size(fit[0].peak)}; {fit[0].expected:.3g} tokens/s are expected."
        return
    yield f"What fits into {budget}, best first: {BEST}."
    is_of_experts = any(row.settings.expert_cache is not None for row in fit)
    names = [
        "-c",
        "cache type",
        "drafts",
        "-ub",
        *(["expert cache"] if is_of_experts else []),
        "memory",
        "tokens/s",
        "",
    ]
    yield from _table(names, (_fit_row(row, is_of_experts) for row in fit[:_MOST_FITTING]))
    if len(fit) > _MOST_FITTING:
        yield f"{len(fit) - _MOST_FITTING} more are in --json."


def _as_flags(row: Fitted) -> str:
    """Settings as `edgeinfer chat` takes them."""
    settings = row.settings
    named = [settings.draft] if isinstance(settings.draft, str) else settings.draft
    flags = [f"-c {settings.n_ctx}", f"--cache-type {settings.cache_type}", f"-ub {settings.n_batch}"]
    flags += [f"--drafter {name}" if name in _DRAFTER_NAMES else f"-md {shlex.quote(name)}" for name in named]
    if settings.expert_cache is not None:
        flags.append(f"--expert-cache {settings.expert_cache}")
    if settings.n_texts not in (1, DEFAULT_PARALLEL):
        flags.append(f"-np {settings.n_texts}")
    if settings.cache_ram_bytes:
        flags.append(f"--cache-ram {settings.cache_ram_bytes}B")
    return " ".join(flags) + ("; it changes the text" if row.changes_text else "")


def _fit_row(row: Fitted, is_of_experts: bool) -> list[str]:
    settings = row.settings
    named = [settings.draft] if isinstance(settings.draft, str) else settings.draft
    draft = ", ".join(os.path.basename(name) for name in named)
    cache = "all" if settings.expert_cache is None else _size(settings.expert_cache)
    label = "changes the text" if row.changes_text else ""
    start = [str(settings.n_ctx), settings.cache_type, draft, str(settings.n_batch)]
    return [*start, *([cache] if is_of_experts else []), _size(row.peak), f"{row.expected:.3g}", label]


def verification_lines(found: Profile) -> Iterator[str]:
    """Planned against measured memory, by purpose, and expected against measured speed."""
    checked = found.verification
    if checked is None:
        return
    ledger: Ledger = checked.ledger
    rows = [
        [
            item.name,
            _size(item.planned),
            "-" if item.taken is None else _size(item.taken),
            "" if not item.taken else _percent(item.planned, item.taken),
        ]
        for item in ledger.items
    ]
    for name, planned, taken in (
        ("all", ledger.planned, ledger.taken),
        ("peak", ledger.peak, ledger.peak_taken),
    ):
        rows.append([name, _size(planned), _size(taken or 0), _percent(planned, taken) if taken else ""])
    yield f"Loaded in a process of its own, {checked.n_tokens} tokens of context filled:"
    yield from _table(["purpose", "planned", "taken", "error"], rows)
    yield ""
    if checked.was_disturbed:
        yield "Other processes had the cores meanwhile: it is faster than this."
    rows = [
        [of.name, of.unit, f"{of.expected:.3g}", f"{of.measured:.3g}", f"{100 * of.error:+.1f} %"]
        for of in checked.speeds
    ]
    yield from _table(["speed", "unit", "expected", "measured", "error"], rows)


def _size(n_bytes: int) -> str:
    """Bytes with enough digits to tell plans of one model apart: "1272 MiB", "18.3 GiB"."""
    if n_bytes >= 10 << 30:
        return f"{n_bytes / (1 << 30):.1f} GiB"
    return f"{n_bytes / (1 << 20):.{0 if n_bytes >= 100 << 20 else 1}f} MiB"


def _percent(expected: float, measured: float) -> str:
    return f"{100 * (expected / measured - 1):+.1f} %"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows with aligned columns: the first one to the left, as is a last one without a name; others to the right."""
    cells = [list(names), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    last = len(names) - 1
    for row in cells:
        aligned = [
            cell.ljust(width) if i == 0 or (i == last and not names[last]) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(aligned).rstrip()
