"""`edgeinfer bench`: how fast a model runs here, and how far that is from what the machine can do."""

from __future__ import annotations

import csv
import io
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeinfer.cli.expert_table import check_together, show_caches
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import FileName, OutputName, budget_option, threads_option, warnings_as_notes
from edgeinfer.cli.plotting import check_plot, draw_timeline, drawable, figure_into
from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ProgressBar, note, show, visible
from edgeinfer.common.errors import InvalidArgument

if TYPE_CHECKING:
    from edgeinfer.bench import Report
    from edgeinfer.loading.backend_choice import PlannedModel
    from edgeinfer.loading.options import LoadOptions
    from edgeinfer.models.gguf import ModelFile

_ROUNDS = 8  # of a timeline


@click.command(cls=ModelCommand, model="model", draft="model_draft")
@click.argument("model", type=FileName(), required=False)
@threads_option
@budget_option
@click.option("--rounds", type=click.IntRange(2), default=9, show_default=True, help="Repetitions of each measurement.")
@click.option("--against", type=click.Choice(["llama.cpp"]), help="Measure llama-cpp-python too, alternating.")
@click.option("--expert-cache", metavar="SIZES", help="Measure expert caches of these sizes instead: 25%,50%,4GiB.")
@click.option(
    "--check-logits", is_flag=True, help="--expert-cache: compare all logits with those of the whole model in memory."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the cost curves as CSV instead of the table.")
@click.option("--plot", type=OutputName(), help="Plot the cost curves to a PNG file.")
@click.option("--timeline", type=OutputName(), help="Plot drafting and verifying over time to a PNG.")
@click.option(
    "-md", "--model-draft", "--spec-draft-model", type=FileName(), help="For --timeline: draft model or head."
)
@click.option("--draft-device", default="auto", help="For --timeline: device of the drafter.  [default: auto]")
def bench(
    model: Path | None,
    n_threads: int | None,
    budget: str | None,
    rounds: int,
    against: str | None,
    expert_cache: str | None,
    check_logits: bool,
    as_json: bool,
    as_csv: bool,
    plot: Path | None,
    timeline: Path | None,
    model_draft: Path | None,
    draft_device: str,
) -> None:
    """Measure the speed of a model here.

    Without MODEL it is the default model. The cost curve c(n) is the time of a forward pass of n tokens over the time
    of a pass of one: the cost of verifying a draft. The memory bandwidth and the int8 peak of this machine are
    measured in the same run. --timeline plots some passes of a short answer. --expert-cache shows for each size of
    the cache the speed, the bytes read and the hit rate, beside the best hit rate that any policy could have (Belady).
    """
    check_stdout()
    check_together(
        expert_cache, check_logits, {"--against": against, "--csv": as_csv, "--plot": plot, "--timeline": timeline}
    )
    check_plot(plot)
    check_plot(timeline)
    if timeline is not None:
        _draw_timeline(model, n_threads, budget, model_draft, draft_device, timeline)
    if expert_cache is not None:
        show_caches(_named(model), expert_cache, n_threads, budget, check_logits, as_json)
        return
    result = _run(model, n_threads, budget, rounds, against)
    if plot is not None:
        _draw(result, plot)
    if as_json:
        show(json.dumps(result.as_dict()))
    elif as_csv:
        _write_csv(result)
    else:
        show(visible(_table(result)))


def _named(model: Path | None) -> Path:
    """The file that is measured."""
    from edgeinfer.loading.open import default_model

    return default_model() if model is None else model


def _run(model: Path | None, threads: int | None, budget: str | None, rounds: int, against: str | None) -> Report:
    from edgeinfer import bench as benchmark
    from edgeinfer.backends.native import best_isa
    from edgeinfer.loading.options import LoadOptions
    from edgeinfer.models.gguf import ModelFile

    with ExitStack() as opened, ProgressBar("loading") as bar:
        file = opened.enter_context(ModelFile.open(_named(model)))
        options = LoadOptions(n_ctx=benchmark.CONTEXT + 512, n_threads=threads, budget=budget)
        engines = _engines(file, options, against)
        sessions = {}
        for name, planned in engines.items():
            loaded = planned.load(bar)
            opened.callback(loaded.close)
            sessions[name] = loaded.session()
        bar.close()
        first = next(iter(engines.values()))
        return benchmark.report(file, first.spec, sessions, best_isa(), first.device.n_threads, rounds)


def _engines(file: ModelFile, options: LoadOptions, against: str | None) -> dict[str, PlannedModel]:
    """The models to measure, by their names in the report, ours first. Raises InvalidArgument."""
    from edgeinfer.loading.plan import plan_beside, plan_without_drafters

    with warnings_as_notes():
        plan = plan_without_drafters(file, options)
    ours = plan.model
    if ours.backend.name == against:
        raise InvalidArgument(f"{file.path} runs on {against} itself: there is nothing to compare, leave out --against")
    name = "edgeinfer" if ours.backend.name == "native" else ours.backend.name
    if against is None:
        return {name: ours}
    return {name: ours, against: plan_beside(file, replace(options, backend="llama.cpp"), plan)}


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
    bandwidth = f"{limits.read_bytes_per_second / 1e9:.1f} GB/s read bandwidth"
    peak = f"{limits.int8_multiply_adds_per_second / 1e9:.0f} G int8 multiply-adds a second"
    decode, prefill = result.curve[0].tokens_per_second(ours), result.prefill.tokens_per_second(ours)
    lines += [
        "",
        f"decode  {decode:.1f} tok/s, {_share(result.bandwidth_share)} {bandwidth}",
        f"prefill {prefill:.1f} tok/s, {_share(result.int8_share)} {peak}",
    ]
    return "\n".join(lines)


def _share(share: float | None) -> str:
    return "the machine has" if share is None else f"{100 * share:.0f} % of"


def _write_csv(result: Report) -> None:
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
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
    show(rows.getvalue().removesuffix("\n"))


def _draw(result: Report, target: Path) -> None:
    with figure_into(target) as axes:
        for name in result.engines:
            axes.plot([p.n for p in result.curve], [result.cost(p, name) for p in result.curve], marker="o", label=name)
        axes.set_xlabel("tokens in one pass, n")
        axes.set_ylabel("c(n): time over that of one token")
        axes.set_title(drawable(f"{result.model}, {result.n_threads} thread(s)"), fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()


def _draw_timeline(
    model: Path | None,
    threads: int | None,
    budget: str | None,
    model_draft: Path | None,
    draft_device: str,
    target: Path,
) -> None:
    """Draw a few rounds in the middle of an answer: the target's passes above, drafting below."""
    from edgeinfer.bench import record_rounds
    from edgeinfer.loading.open import load
    from edgeinfer.loading.options import LoadOptions

    draft = "auto" if model_draft is None else [str(model_draft)]
    with warnings_as_notes(), ProgressBar("loading") as bar:
        options = LoadOptions(n_ctx=512, n_threads=threads, draft=draft, draft_device=draft_device, budget=budget)
        engine = load(model, options, progress=bar)
    with engine:
        timeline, speculation = record_rounds(engine)
        placed = {} if engine.speculator is None else engine.speculator.placements
        where = "".join(f", drafts by {name} on {of.device}" for name, of in placed.items())
        title = f"{engine.path.name}, {engine.device.n_threads} thread(s){where}"
    waited = speculation.waited_seconds / speculation.step_seconds if speculation.step_seconds else 0.0
    note(
        f"timeline: {speculation.tokens_per_step:.2f} tokens a step, {timeline.seconds('verify'):.2f} s checking, "
        f"{timeline.seconds('draft'):.2f} s drafting, {waited:.1%} of the time waiting for drafts"
    )
    draw_timeline(timeline.rounds(_ROUNDS), title, target)
