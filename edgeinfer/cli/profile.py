"""`edgeinfer profile`: memory and speed of a model, before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    FileName,
    OutputName,
    draft_option,
    json_option,
    load_keywords,
    load_option,
    model_draft_option,
    plan_options,
    threads_option,
    warnings_as_notes,
)
from edgeinfer.cli.plotting import check_plot
from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import show, visible
from edgeinfer.common.errors import BudgetExceeded

if TYPE_CHECKING:
    from edgeinfer.profiler.report import Profile


@click.command(cls=ModelCommand, model="model", draft="model_draft")
@click.argument("model", type=FileName(), required=False)
@plan_options
@load_option(
    "expert_cache", default=None, show_default=False, metavar="SIZE|SHARE%", help="Memory for experts.  [default: all]"
)
@draft_option
@model_draft_option
@threads_option
@load_option("backend", type=click.Choice(["auto", "native", "llama.cpp"]), help="What the plan is for.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    metavar="N",
    help="Length of the prompt, for the time to first token.",
)
@click.option("--memory", metavar="SIZE", help="Memory of the machine: 4GiB.  [default: what is free here]")
@click.option("--bandwidth", metavar="RATE", help="Memory bandwidth of another machine: 50GB/s.")
@click.option("--compute", metavar="RATE", help="8-bit multiply-adds a second of another machine: 300G.")
@click.option("--disk", metavar="RATE", help="Bytes a second of another disk: 1GB/s.")
@click.option("--fit-into", "fit", metavar="SIZE", help="List the settings that fit into this much memory, best first.")
@click.option("--plot", type=OutputName(), help="Plot memory over context and speed over memory to a PNG file.")
@click.option(
    "--measure",
    "check",
    is_flag=True,
    help="Load it in a process of its own, fill the context, and compare with the plan.",
)
@json_option
def profile(model: Path | None, plot: Path | None, as_json: bool, **flags: Any) -> None:
    """Plan the memory and the speed of a model.

    Reads the header of the file alone, so a model need not fit here. Without MODEL it is the default model. What the
    machine can do is measured once and kept. All figures are planned or expected, but those of --measure.
    """
    from edgeinfer.cli.profile_text import profile_lines

    check_stdout()
    check_plot(plot)
    found = _run(model, flags)
    if plot is not None:
        from edgeinfer.cli.profile_plot import draw_profile

        draw_profile(found, plot)
    show(json.dumps(found.as_dict()) if as_json else visible("\n".join(profile_lines(found))))
    _check_budget(found, flags["memory"])


def _run(model: Path | None, flags: dict[str, Any]) -> Profile:
    from edgeinfer.profiler.report import profile as run

    with warnings_as_notes():
        return run(
            model,
            memory=flags["memory"],
            bandwidth=flags["bandwidth"],
            compute=flags["compute"],
            disk=flags["disk"],
            fit=flags["fit"],
            prompt_tokens=flags["prompt_tokens"],
            check=flags["check"],
            **load_keywords(flags),
        )


def _check_budget(found: Profile, memory: str | None) -> None:
    """Raises BudgetExceeded if the given memory is too little. Free memory of this machine does not limit a plan."""
    from edgeinfer.common.arguments import human_bytes
    from edgeinfer.profiler.fit import LEAST_CONTEXT

    if found.fit is not None and not found.fit:
        least = min(found.budgets, key=lambda row: row.peak)
        raise BudgetExceeded(
            f"{found.path}: no settings fit into {human_bytes(found.fit_budget or 0)}, not even a context of "
            f"{LEAST_CONTEXT} tokens; n_ctx {least.settings.n_ctx} needs {human_bytes(least.peak)}: use a smaller "
            "quantisation or model"
        )
    if memory is not None and not found.fits and found.fit is None:
        peak, budget = human_bytes(found.ledger.peak), human_bytes(found.budget)
        raise BudgetExceeded(
            f"{found.path} needs {peak} at n_ctx {found.settings.n_ctx}, the machine has {budget}: "
            f"--fit-into {memory} lists what fits"
        )
