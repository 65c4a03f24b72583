"""The plot of a profile: memory by purpose over the context, and expected speed over memory."""

from __future__ import annotations

from itertools import compress, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.cli.plotting import drawable, figure_into

if TYPE_CHECKING:
    from edgeinfer.profiler.report import Profile

_MIB, _GIB = 1 << 20, 1 << 30
# From the bottom up; purposes that do not change with the context come first.
_PURPOSES = {
    "process": "#b0b0b0",
    "vocabulary": "#8c8c8c",
    "threads": "#6e6e6e",
    "sampling": "#575757",
    "weights": "#4477aa",
    "mapped weights": "#77aadd",
    "experts": "#66ccee",
    "expert device": "#99ddff",
    "activations": "#ccbb44",
    "drafters": "#ee8866",
    "window": "#44bb99",
    "recurrent state": "#117733",
    "KV cache": "#228833",
}
_LABEL: dict[str, Any] = {"fontsize": 7, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}}
_BUDGET = "#cc3311"
_POINTS = 200
_LEAST_SHARE = 0.004  # of a purpose in the legend: about a line's width
_LINES = ("#4477aa", "#ee6677", "#228833", "#aa3377")


def draw_profile(found: Profile, target: Path) -> None:
    """Draw two panels to a file, which is written atomically."""
    with figure_into(target, 2, (11, 4.4)) as (memory, speed):
        _draw_memory(found, memory)
        _draw_speed(found, speed)
        memory.figure.suptitle(drawable(f"{found.path.name}: planned and expected"), fontsize=10)


def _draw_memory(found: Profile, axes: Any) -> None:
    """Purposes on top of each other, the budget, and the requested context."""
    import numpy as np

    n_ctx = [row.n_ctx for row in found.contexts]
    peaks = [row.ledger.peak for row in found.contexts]
    unit, name = _unit(max(peaks))
    x = np.geomspace(n_ctx[0], n_ctx[-1], _POINTS)  # bytes are nearly linear in n_ctx between the planned contexts

    def curve(sizes: list[int]) -> Any:
        return np.interp(x, n_ctx, sizes) / unit

    sizes: dict[str, list[int]] = {purpose: [] for purpose in _PURPOSES}
    for row in found.contexts:
        for purpose in _PURPOSES:
            sizes[purpose].append(sum(item.planned for item in row.ledger.items if item.purpose == purpose))
    sizes = {purpose: of for purpose, of in sizes.items() if any(of)}
    colors = [_PURPOSES[purpose] for purpose in sizes]
    axes.stackplot(x, *map(curve, sizes.values()), labels=list(sizes), colors=colors, linewidth=0)
    if any(row.ledger.loading for row in found.contexts):
        axes.plot(x, curve(peaks), color="black", linewidth=0.8, linestyle=":", label="peak while loading")
    for budget, title in ((found.fit_budget, "--fit-into"), (found.budget, "memory")):
        if budget is not None and budget <= 1.5 * max(peaks):
            axes.axhline(budget / unit, color=_BUDGET, linewidth=1.2, linestyle="--")
            label = f"{title}: {budget / unit:.3g} {name}"
            place = (0.985, budget / unit)
            axes.annotate(label, place, xycoords=("axes fraction", "data"), ha="right", va="center", **_LABEL)
    axes.axvline(found.settings.n_ctx, color="black", linewidth=0.6, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(n_ctx, [_tokens(n) for n in n_ctx])
    if n_ctx[0] < n_ctx[-1]:
        axes.set_xlim(n_ctx[0], n_ctx[-1])
    axes.set_ylim(0, 1.35 * max(peaks) / unit)  # room for the legend
    axes.set_xlabel(f"n_ctx, context in tokens (dotted: {found.settings.n_ctx})")
    axes.set_ylabel(f"planned memory, {name}")
    handles, labels = axes.get_legend_handles_labels()
    seen = [label not in sizes or max(sizes[label]) >= _LEAST_SHARE * max(peaks) for label in labels]
    handles, labels = (list(compress(of, seen))[::-1] for of in (handles, labels))
    axes.legend(handles, labels, loc="upper left", fontsize=7, ncols=3, framealpha=0.9)


def _draw_speed(found: Profile, axes: Any) -> None:
    """Steps: with so much memory, this speed in the middle of a context of that length."""
    rows = [list(of) for _, of in groupby(found.budgets, key=lambda row: row.settings.n_ctx)]
    least, most = min(row.peak for row in found.budgets), max(row.peak for row in found.budgets)
    unit, name = _unit(most)
    budget = found.fit_budget or found.budget
    end = max(1.15 * most, 1.05 * budget if budget < 1.5 * most else 0)
    for steps, color in zip(rows, _LINES, strict=False):
        sizes, speeds = [row.peak / unit for row in steps], [row.expected for row in steps]
        axes.plot([sizes[0], sizes[0]], [0, speeds[0]], color=color, linewidth=1)
        axes.step([*sizes, end / unit], [*speeds, speeds[-1]], where="post", color=color, linewidth=1.6)
        axes.plot(sizes, speeds, "o", color=color, markersize=3)
        label = f"n_ctx {_tokens(steps[0].settings.n_ctx)}"
        place = (end / unit, speeds[-1])
        axes.annotate(label, place, (-8, 0), textcoords="offset points", ha="right", va="center", color=color, **_LABEL)
    if least / 2 <= budget <= end:
        axes.axvline(budget / unit, color=_BUDGET, linewidth=1.2, linestyle="--")
        label = f"{budget / unit:.3g} {name}"
        place = (budget / unit, 0.03)
        axes.annotate(label, place, xycoords=("data", "axes fraction"), ha="center", color=_BUDGET, **_LABEL)
    axes.set_ylim(0, 1.1 * max(row.expected for row in found.budgets))
    axes.set_xlim(min(least, budget) / unit - 0.05 * (end - least) / unit, end / unit)
    axes.set_xlabel(f"memory, {name} (points: settings)")
    axes.set_ylabel("expected tokens/s, context half full")


def _unit(most: int) -> tuple[int, str]:
    return (_GIB, "GiB") if most >= 2 * _GIB else (_MIB, "MiB")


def _tokens(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
