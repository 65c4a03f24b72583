"""`edgeinfer evaluate`: how often a draft head is right on text that its model writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    FileName,
    context_option,
    json_option,
    max_tokens_option,
    threads_option,
    warnings_as_notes,
)
from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ReportLines, show, visible
from edgeinfer.common.errors import BackendUnavailable, InvalidArgument

_FILE = FileName(exists=True, dir_okay=False)


@click.command(cls=ModelCommand, model="target", others=("head",))
@click.argument("target", type=FileName())
@click.argument("head", type=FileName())
@click.option(
    "--prompts",
    type=_FILE,
    help='JSON Lines with "prompt" or "turns" (a list of texts), and "category".',
)
@click.option(
    "--chats",
    type=FileName(exists=True, file_okay=False),
    help="Instead of prompts: folder of saved conversations, whose answers are compared as they are.",
)
@click.option(
    *("--temp", "--temperature", "temperature"),
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Temperature of the answers.",
)
@max_tokens_option
@context_option(2048)
@threads_option
@click.option("-s", "--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="Random seed.")
@json_option
def evaluate(target: Path, head: Path, prompts: Path | None, chats: Path | None, as_json: bool, **options: Any) -> None:
    """Measure the acceptance of a draft head.

    TARGET answers the prompts, or did so in saved conversations. At each token of the answers HEAD drafts, and its
    drafts are compared with what follows. Printed are the acceptance rate by depth, given that the tokens before were
    accepted, and the tokens per step with trees of 4, 8 and 16 nodes, in total and by category.
    """
    try:
        from edgeinfer.training.evaluation import Evaluated
        from edgeinfer.training.evaluation import evaluate as evaluated
    except ImportError as error:
        raise BackendUnavailable(f"evaluate needs torch: pip install 'edgeinfer[train]' ({error})") from error
    if (prompts is None) == (chats is None):
        given = "neither" if chats is None else "both"
        raise click.UsageError(f"--prompts or --chats must say which answers to compare with: found {given}")
    if prompts is not None and options["max_tokens"] >= options["context"]:
        raise InvalidArgument(
            f"--max-tokens {options['max_tokens']} must leave room for a prompt in --ctx-size {options['context']}"
        )
    check_stdout()
    with warnings_as_notes(), ReportLines() as report:
        found = evaluated(target, head, prompts, chats, Evaluated(**options), report)
    show(json.dumps(found) if as_json else visible(_table(found)))


def _table(found: dict[str, Any]) -> str:
    rows = [*found["by_category"].items()]
    rows += [("in all", found)] if len(rows) > 1 else []
    width = max(len(name) for name, _ in rows)
    sizes = list(found["tokens_per_step"])
    lines = [f"{'':{width}}  answers  match by depth" + " " * 23 + f"tokens a step with {', '.join(sizes)} nodes"]
    for name, of in rows:
        matches = " ".join(f"{share:.3f}" for share in of["match_by_depth"])
        rates = " ".join(f"{rate:.2f}" for rate in of["tokens_per_step"].values())
        lines.append(f"{name:{width}}  {of['held_out_texts']:>7}  {matches}  {rates}")
    return "\n".join(lines)
