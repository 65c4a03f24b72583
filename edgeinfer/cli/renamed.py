"""Options that were renamed. An error for an old name tells the new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from edgeinfer.common.settings import variable_of

_ASKED = {
    "--verify": "is --check-pack now",
    "--fpga-folder": "is --folder of `edgeinfer fpga simulate` now",
}
_BOARD = "is an option of `edgeinfer fpga plan MODEL` now"
_PACKAGE = "is an option of `edgeinfer fpga export SOURCE` now"
_CONFIG = (
    *("answers", "greedy_share", "temperature", "chat_share", "n_held", "draft_vocab", "blocks", "taps", "rounds"),
    *("steps", "steps_from", "rounded_from", "batch_tokens", "optimizer", "warm_up", "feature_weight", "token_weight"),
    *("decay", "noise", "evaluate_every", "gate_type", "author"),
)
RENAMED: Mapping[str, Mapping[str, str]] = {  # by command and old name: the new one
    "chat": _ASKED,
    "generate": _ASKED,
    "pack": {"--verify": "is --compare now"},
    "bench": {"--prove": "is --check-logits now"},
    "profile": {
        "--draft": "is --drafter now; -md names a draft model or head",
        "--verify": "is --measure now",
        "--fit": "is --fit-into now",
        "--prompt": "is --prompt-tokens now",
        **dict.fromkeys(("--board", "--encoding", "--rows", "--tables", "--engines", "--attention-lanes"), _BOARD),
    },
    "export": {
        "--draft": "is -md FILE or --drafter ngram now",
        "--fit": "is --fit-into now",
        "--ctx": "is --ctx-size now",
        "--check": "is the default; --no-check switches it off, and `edgeinfer fpga check` looks at folders for boards",
        "--unpack": "is `edgeinfer fpga unpack FOLDER -o FILE` now",
        **dict.fromkeys(("--board", "--encoding", "--rows", "--tables", "--golden"), _PACKAGE),
        "--embeddings": "is --embedding-type of `edgeinfer fpga export SOURCE` now",
        "--rescored": "is --shortlist of `edgeinfer fpga export SOURCE` now",
    },
    "distill": {
        **{f"--{key.replace('_', '-')}": f"is {key} of --config FILE.toml now" for key in _CONFIG},
        "--lr": "is learning_rate of --config FILE.toml now",
    },
}
# The same for variables: the new option, for the commands that have it.
_VARIABLES = {"EDGEINFER_DRAFT": "--drafter", "EDGEINFER_VERIFY": "--check-pack"}


def explained(error: click.UsageError, arguments: Sequence[str]) -> click.UsageError:
    """The error for a command line that cannot be parsed. For a renamed option it tells the new name.

    An unknown option such as -ngl is not taken for -n with the value "gl".
    """
    command = error.ctx.command.name if error.ctx is not None else None
    if isinstance(error, click.NoSuchOption):
        became = RENAMED.get(command or "", {}).get(error.option_name)
        return (
            error
            if became is None
            else click.UsageError(f"No such option {error.option_name!r}: it {became}.", error.ctx)
        )
    if isinstance(error, click.BadParameter) and error.param is not None:
        for name in arguments:
            if name[:2] in error.param.opts and name[1:].isalpha() and name not in error.param.opts:
                return click.NoSuchOption(name, ctx=error.ctx)
    return error


def check_variables(command: click.Command, variables: Mapping[str, str]) -> None:
    """Raises click.UsageError if a variable is set that was renamed."""
    flags = {name for each in command.params if each.envvar for name in each.opts}
    for old, flag in _VARIABLES.items():
        if flag in flags and old in variables:
            raise click.UsageError(f"the variable {old} is {variable_of(flag)} now; unset {old}")
