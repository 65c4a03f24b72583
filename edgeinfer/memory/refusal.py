"""What to say where a model does not fit: how much is missing, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument, UnsupportedModel
from edgeinfer.common.settings import CacheType
from edgeinfer.memory.budget import Ledger, Purpose
from edgeinfer.memory.fit import Fitting, S, largest_n_ctx
from edgeinfer.memory.limit import Limit

# Of a weight, in the smallest format that a whole model is quantised to and that the native engine runs (Q2_K).
_LEAST_BITS = 2.625
_NOISE = 1 << 20  # bytes by which the same process differs from one start to the next
_ESTIMATE = 0.95  # of the file that would just fit: which matrices have which format differs from file to file


@dataclass(frozen=True)
class FileSizes:
    """A model file."""

    path: Path
    n_bytes: int  # of all of it
    # weight_bytes, n_weights: of its matrices
    weight_bytes: int
    n_weights: int


def refusal(file: FileSizes, settings: S, fitting: Fitting[S], limit: Limit) -> BudgetExceeded:
    """The error for a model that does not fit. settings: with the least of everything."""
    try:
        ledger = fitting.ledger_of(settings)
    except BudgetExceeded as error:
        return BudgetExceeded(f"{error}: {_joined(_proposals(file, settings, fitting, None))}")
    short = ledger.peak - limit.n_bytes
    fitting = Fitting(fitting.ledger_of, fitting.limit - _NOISE)  # what is proposed is tried in another process
    needs = f"{file.path} needs at least {human_bytes(ledger.peak)} ({_table(ledger, settings.n_ctx)})"
    proposals = list(_proposals(file, settings, fitting, ledger))
    return BudgetExceeded(f"{needs}, {limit}, {human_bytes(short)} too few: {_joined(proposals)}")


def _table(ledger: Ledger, n_ctx: int) -> str:
    """Bytes by purpose."""
    lines = []
    for purpose in get_args(Purpose):
        if n_bytes := ledger.of(purpose):
            at = f" at n_ctx {n_ctx}" if purpose == "KV cache" else ""
            lines.append(f"{purpose} {human_bytes(n_bytes)}{at}")
    if ledger.loading:
        lines.append(f"while loading {human_bytes(ledger.loading)}")
    return ", ".join(lines)


def _proposals(file: FileSizes, settings: S, fitting: Fitting[S], ledger: Ledger | None) -> Iterator[str]:
    """What would fit, one change at a time."""
    if n_ctx := largest_n_ctx(settings, fitting):
        yield f"n_ctx {n_ctx} fits (-c {n_ctx})"
    if (cache_type := _fitting_cache_type(settings, fitting)) is not None:
        yield f"--cache-type {cache_type} fits, which changes the text"
    if ledger is not None and (n_bytes := largest_file(file, ledger, fitting.limit)):
        yield f"a smaller quantisation fits, in a file of at most {human_bytes(n_bytes)}"


def _joined(proposals: Sequence[str] | Iterator[str]) -> str:
    found = list(proposals)
    if not found:
        return "no n_ctx fits, and no cache type or quantisation: use a smaller model or free memory"
    no_n_ctx = "" if found[0].startswith("n_ctx") else "no n_ctx fits; "
    return no_n_ctx + "; ".join(found)


def _fitting_cache_type(settings: S, fitting: Fitting[S]) -> CacheType | None:
    """The largest cache type with which the settings fit, None if there is none."""
    found: list[tuple[int, CacheType]] = []
    for cache_type in get_args(CacheType):
        other = replace(settings, cache_type=cache_type)
        try:
            if cache_type != settings.cache_type and fitting.fits(other):
                found.append((fitting.ledger_of(other).planned, cache_type))
        except (InvalidArgument, UnsupportedModel):  # not with this model or backend
            continue
    return max(found)[1] if found else None


def largest_file(file: FileSizes, ledger: Ledger, limit: int) -> int:
    """Bytes of a file of the same model whose weights would fit, 0 where no quantisation is as small. An estimate."""
    purposes: tuple[Purpose, ...] = ("weights", "mapped weights", "experts")
    held = sum(ledger.of(purpose) for purpose in purposes)
    share = (held - (ledger.peak - limit)) / max(held, 1)
    weight_bytes = int(_ESTIMATE * share * file.weight_bytes)
    if not file.n_weights or 8 * weight_bytes < _LEAST_BITS * file.n_weights:
        return 0
    return file.n_bytes - file.weight_bytes + weight_bytes
