"""`edgeinfer distill`: a draft head for a model, trained on text that the model writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    FileName,
    OutputName,
    context_option,
    json_option,
    long_name,
    max_tokens_option,
    out_option,
    threads_option,
    warnings_as_notes,
)
from edgeinfer.cli.plotting import check_plot, figure_into
from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ReportLines, show, visible
from edgeinfer.common.errors import BackendUnavailable, InvalidArgument
from edgeinfer.common.files import check_writable

if TYPE_CHECKING:
    from edgeinfer.training.distill import Settings

_FILE = FileName(exists=True, dir_okay=False)


@click.command(cls=ModelCommand, model="target")
@click.argument("target", type=FileName())
@click.option("--prompts", type=_FILE, help='JSON Lines with "prompt" or "turns" (a list of texts).')
@click.option(
    "--chats",
    type=FileName(exists=True, file_okay=False),
    help="Folder of saved conversations, whose answers are trained on as they are.",
)
@click.option(
    "--own-prompts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Further prompts that the model writes itself.",
)
@click.option(
    "--tasks",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Further prompts made of the answers: summaries, questions about passages, translations, second turns.",
)
@click.option("--held-out", type=_FILE, help="Prompts for evaluation only.  [default: 3 % of the prompts]")
@click.option(
    "--texts-of",
    type=FileName(exists=True, file_okay=False),
    multiple=True,
    help="The --work folder of another run: train on its answers too; may be repeated.",
)
@click.option(
    "--tokens", type=click.IntRange(1), default=1_000_000, show_default=True, help="Answer tokens to train on."
)
@context_option(1024)
@max_tokens_option
@out_option(OutputName(".json"), required=True, help="GGUF file of the head; the report is OUT.json.")
@click.option(
    "--type",
    type=click.Choice(["f16", "q8_0", "q4_0"]),
    default="q8_0",
    show_default=True,
    help="Type of its matrices.",
)
@click.option("-epochs", "--epochs", type=click.IntRange(1), default=4, show_default=True, help="Epochs of training.")
@click.option(
    "--init", type=FileName(), help="A head of the same target to continue from; another --seed gives other answers."
)
@click.option("--config", type=_FILE, help="TOML file with more settings: docs/draft-heads.md lists them.")
@click.option(
    *("-dev", "--device"),
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What trains, and with cuda what generates the answers.",
)
@threads_option
@click.option("-s", "--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="Random seed.")
@click.option("--work", type=OutputName(), help="Folder for intermediate files.  [default: OUT.work]")
@click.option(
    "--disk",
    "disk_gib",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    metavar="GIB",
    help="Most disk space for features.",
)
@click.option("--plot", type=OutputName(), help="Plot loss and acceptance over training tokens to a PNG.")
@json_option
def distill(
    target: Path,
    prompts: Path | None,
    out: Path,
    held_out: Path | None,
    config: Path | None,
    work: Path | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a draft head for a model.

    TARGET, quantised as it is, answers the prompts; a small head learns to predict its text. `edgeinfer chat -m TARGET
    -md OUT` drafts with it. Answers, features and checkpoints are kept in a folder: after Ctrl-C the same command
    continues, and ends with the same weights. For several GPUs: torchrun --nproc-per-node N --no-python edgeinfer
    distill ...
    """
    from edgeinfer.training.recipe import read_recipe

    recipe = read_recipe(config, _flags(click.get_current_context().command))
    try:
        import edgeinfer.training.distill as training
    except ImportError as error:
        raise BackendUnavailable(f"distill needs torch: pip install 'edgeinfer[train]' ({error})") from error
    if prompts is None and options["chats"] is None:
        raise click.UsageError("--prompts or --chats must say what to train on: found neither")
    settings = _settings(training.Settings, options | vars(recipe))
    check_stdout()
    check_plot(plot)
    if not out.parent.is_dir():
        raise InvalidArgument(f"--out {out}: there is no folder {out.parent}")
    check_writable(out)
    with warnings_as_notes(), ReportLines() as report:
        summary = training.distill(
            target, prompts, out, work or out.with_name(f"{out.name}.work"), held_out, settings, report
        )
    if summary is None:  # another process has it
        return
    if plot is not None:
        _draw(summary["curve"], plot)
    show(json.dumps(summary) if as_json else visible(_table(summary)))


def _flags(command: click.Command) -> dict[str, str]:
    """The options by the names that they would have as keys."""
    return {long_name(each)[2:].replace("-", "_"): long_name(each) for each in command.params if each.opts[0][0] == "-"}


def _settings(kind: type[Settings], options: dict[str, Any]) -> Settings:
    """The options as settings. Raises InvalidArgument for a conflict."""
    disk_gib = options.pop("disk_gib")
    if options["max_tokens"] >= options["context"]:
        raise InvalidArgument(
            f"--max-tokens {options['max_tokens']} must leave room for a prompt in --ctx-size {options['context']}"
        )
    return kind(disk_bytes=int(disk_gib * 2**30), **options)


def _table(summary: dict[str, Any]) -> str:
    lines = [
        f"trained on {summary['answer_tokens']:,} tokens of {summary['texts']:,} answers, "
        f"{summary['tokens_trained']:,} positions in all",
        f"held out: {summary['held_out_texts']} answers, {summary['vocabulary_coverage']:.1%} of them in the draft "
        "vocabulary",
        "match by depth    " + "  ".join(f"{share:.3f}" for share in summary["match_by_depth"]),
    ]
    lines += [f"{size:>2} nodes: {rate:.2f} tokens a step" for size, rate in summary["tokens_per_step"].items()]
    if "before" in summary:
        before = "  ".join(f"{share:.3f}" for share in summary["before"]["match_by_depth"])
        lines.insert(2, f"before training    {before}")
    return "\n".join(lines)


def _draw(curve: list[dict[str, Any]], target: Path) -> None:
    tokens = [point["tokens"] for point in curve]
    with figure_into(target, n_panels=2) as (losses, matches):
        losses.plot(tokens, [point["token_loss"] for point in curve], label="cross-entropy")
        losses.plot(tokens, [point["feature_loss"] for point in curve], label="features, SmoothL1")
        losses.set_ylabel("loss of the first step")
        for depth in range(len(curve[0]["match"])):
            matches.plot(tokens, [point["match"][depth] for point in curve], label=f"depth {depth + 1}")
        matches.set_ylabel("match on texts held out")
        for axes in (losses, matches):
            axes.set_xlabel("tokens trained on")
            axes.set_xscale("log")
            axes.grid(alpha=0.3)
            axes.legend()
