"""What --help shows: options in groups, most used first, each with one short and one long name."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from commands import commands

from edgeinfer import cli
from edgeinfer.cli import help as grouping

COMMANDS = commands()


def shown(name: str) -> str:
    result = CliRunner().invoke(cli.main, [*name.split(), "--help"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_left_out_and_none_is_shown_twice(name: str) -> None:
    lines = [line.split() for line in shown(name).splitlines() if line.startswith("  -")]
    names = [line[0].rstrip(",") for line in lines]
    options = [each for each in COMMANDS[name].params if isinstance(each, click.Option) and not each.hidden]
    assert sorted(names) == sorted([*(next(grouping.main_names(each.opts)) for each in options), "-h"])


@pytest.mark.parametrize(
    "name", ["chat", "generate", "serve", "profile", "bench", "export", "distill", "fpga simulate"]
)
def test_every_option_of_a_large_command_is_in_a_group(name: str) -> None:
    options = [str(each.name) for each in COMMANDS[name].params if isinstance(each, click.Option)]
    groups = dict(grouping._grouped(COMMANDS[name].name or "", options))
    assert "Others" not in groups, groups["Others"]
    assert len(groups) > 2


def test_groups_name_options_that_there_are() -> None:
    there = {each.name for command in COMMANDS.values() for each in command.params}
    named = {name for groups in grouping.GROUPS.values() for names in groups.values() for name in names}
    assert named - there == set()


def test_help_is_plain_in_a_pipe_and_has_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shown("chat")
    assert "\x1b" not in plain and "env var" not in plain and "RANGE" not in plain and "x>=" not in plain
    monkeypatch.setattr(grouping, "has_colours", lambda stream: True)
    coloured = CliRunner().invoke(cli.main, ["chat", "--help"], color=True).stdout
    assert "\x1b[" in coloured and click.unstyle(coloured) == plain


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short(name: str) -> None:
    """A sentence or two for each option."""
    for each in COMMANDS[name].params:
        if isinstance(each, click.Option):
            assert each.help and len(each.help) <= 170 and "behind" not in each.help, (name, each.name, each.help)
