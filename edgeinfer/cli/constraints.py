"""The options of what an answer may be: a schema, a grammar, a regular expression or choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import click

from edgeinfer.cli.options import Command, FileName
from edgeinfer.common.user_text import decoded

if TYPE_CHECKING:
    from edgeinfer.constraints.options import ConstraintOptions

_FILE = FileName(exists=True, dir_okay=False)
_FLAGS = {
    "json_schema": ("-j", "--json-schema"),
    "json_schema_file": ("-jf", "--json-schema-file"),
    "grammar": ("--grammar",),
    "grammar_file": ("--grammar-file",),
    "regex": ("--regex",),
    "choices": ("--choices",),
}
_OPTIONS = (
    click.option(*_FLAGS["json_schema"], "json_schema", metavar="SCHEMA", help="Answer in JSON by this JSON Schema."),
    click.option(*_FLAGS["json_schema_file"], "json_schema_file", type=_FILE, help="The same, from a file."),
    click.option(*_FLAGS["grammar"], metavar="GRAMMAR", help="Answer with a text of this grammar, GBNF or Lark."),
    click.option(*_FLAGS["grammar_file"], type=_FILE, help="The same, from a file."),
    click.option(*_FLAGS["regex"], metavar="REGEX", help="Answer with a text that this matches as a whole."),
    click.option(
        *_FLAGS["choices"], multiple=True, metavar="TEXT", help="Answer with this text; repeat it for others."
    ),
)


def constraint_options(command: Command) -> Command:
    """Adds --json-schema, --grammar and so on; see constraint_given."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def constraint_given(flags: Mapping[str, Any]) -> ConstraintOptions:
    """What an answer may be, by the flags of constraint_options; empty for anything.

    Raises click.UsageError for two of them, InvalidArgument, OSError for a file.
    """
    from edgeinfer.constraints.options import wanted_of

    given = {name: flags[name] for name in _FLAGS if flags.get(name) not in (None, ())}
    if len(given) > 1:
        names = " and ".join(_FLAGS[name][-1] for name in given)
        raise click.UsageError(f"{names} each say what an answer may be: give one of them")
    for name in given:
        value = decoded(given[name].read_bytes(), given[name]) if name.endswith("_file") else given[name]
        found = {"schema" if name.startswith("json_schema") else name.removesuffix("_file"): value}
        wanted_of(found)  # refuses what is wrong on the face of it, before a model is loaded
        return cast("ConstraintOptions", found)
    return {}
