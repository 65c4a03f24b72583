"""The output of `edgeinfer bench --expert-cache`: a line for each size of the expert cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeinfer.cli.options import warnings_as_notes
from edgeinfer.cli.terminal import ProgressBar, note, show, visible
from edgeinfer.common.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.expert_bench import CachePoint

_HEAD = f"{'cache':>10}{'share':>7}{'tok/s':>9}{'read a token':>14}{'hits':>8}{'Belady':>8}{'wait a token':>14}"


def check_together(expert_cache: str | None, check_logits: bool, others: dict[str, object]) -> None:
    """Raises click.UsageError for flags in conflict. others: flags of the other measurement, as given."""
    if expert_cache is None:
        if check_logits:
            raise click.UsageError("--check-logits compares expert caches: name their sizes with --expert-cache")
        return
    for flag, value in others.items():
        if value:
            raise click.UsageError(f"--expert-cache and {flag} measure different things: leave one out")


def show_caches(
    model: Path, sizes: str, n_threads: int | None, budget: str | None, check_logits: bool, as_json: bool
) -> None:
    """Measure and print. Raises EdgeInferError at the end if --check-logits found logits that differ."""
    from edgeinfer.expert_bench import measure_caches
    from edgeinfer.models.gguf import ModelFile

    given = [size.strip() for size in sizes.split(",")]
    points: list[CachePoint] = []
    with ModelFile.open(model) as file, ProgressBar("measuring") as bar, warnings_as_notes():
        if check_logits:
            note("first the whole model in memory, then each size of the cache; one model in memory at a time")
        for point in measure_caches(file, given, n_threads, check_logits, bar, budget):
            if not as_json:
                bar.close()
                show(
                    visible(_line(point) if points else f"{_HEAD}{'  logits' if check_logits else ''}\n{_line(point)}")
                )
            points.append(point)
    if as_json:
        show(json.dumps({"model": model.name, "expert_caches": [point.as_dict() for point in points]}))
    if wrong := [size for size, point in zip(given, points, strict=True) if point.is_equal is False]:
        raise EdgeInferError(f"logits with an expert cache of {', '.join(wrong)} differ from those of the whole model")


def _line(point: CachePoint) -> str:
    from edgeinfer.common.arguments import human_bytes

    cache = "all" if point.cache_bytes is None else human_bytes(point.cache_bytes)
    belady = "-" if point.belady is None else f"{point.belady:.1%}"
    equal = {None: "", True: "  ==", False: "  differ"}[point.is_equal]
    return (
        f"{cache:>10}{point.share:>7.0%}{point.tokens_per_second:>9.2f}{human_bytes(round(point.bytes_a_token)):>14}"
        f"{point.hit_rate:>8.1%}{belady:>8}{1e3 * point.waited_seconds:>11.1f} ms{equal}"
    )
