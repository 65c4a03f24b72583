"""All commands of the command line, those of groups by both names: "fpga export"."""

from __future__ import annotations

import click

from edgeinfer import cli


def commands() -> dict[str, click.Command]:
    """Each command that can be run, by name."""
    found: dict[str, click.Command] = {}
    for name in cli.COMMANDS:
        command = cli.main.get_command(click.Context(cli.main), name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= {f"{name} {each}": member for each, member in command.commands.items()}
        else:
            found[name] = command
    return found
