"""Keeps a command from writing a file that it reads. The types of its options tell inputs from outputs.

`OutputName` is written; every other `FileName`, and each file within the text of a `MayNameFile`, is read. `Command`
compares all of them, as files and not as names, before a command begins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from edgeinfer.cli.options import FileName, MayNameFile, OutputName, long_name
from edgeinfer.common.errors import InvalidArgument, ModelNotFound
from edgeinfer.common.files import check_kept, files_read_in

_PACKED = ".packed"  # beside a model, see backends.native.packed
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)


def check_outputs(context: click.Context) -> None:
    """Raises InvalidArgument if a command would write an input, one file twice, or a file to keep.

    Changes nothing.
    """
    written: dict[str, Path] = {}
    replaces = context.params.get("overwrite", True) or context.params.get("dry_run", False)
    for option in context.command.params:
        out = context.params.get(option.name or "")
        if not isinstance(option.type, OutputName) or not isinstance(out, Path):
            continue
        flag = long_name(option)
        for other, place in written.items():
            if place.resolve() == out.resolve():
                raise InvalidArgument(f"{other} and {flag} both name {out}: one would overwrite the other")
        written[flag] = out
        with_it = [out, *(out.with_name(out.name + ending) for ending in option.type.beside if out.name)]
        check_kept(out, with_it, _read(context), flag)
    for option in context.command.params:
        out = context.params.get(option.name or "")
        if isinstance(option.type, OutputName) and option.type.keeps and isinstance(out, Path) and not replaces:
            check_new(out, [out] if out.is_file() else [], long_name(option))


def check_new(out: Path, replaced: Collection[Path], flag: str) -> None:
    """Raises InvalidArgument if writing would replace something.  flag: the option that names out."""
    if replaced:
        raise InvalidArgument(
            f"{out} is there already: name another output with {flag}, or replace it with --overwrite"
        )


def _read(context: click.Context) -> Iterator[Path]:
    """The inputs that the command line names, and the files that are read with them."""
    for option in context.command.params:
        for path in _named(option, context.params.get(option.name or "")):
            yield path
            yield from files_read_in(path)
            yield from _parts_of(path)


def _named(option: click.Parameter, value: Any) -> Iterator[Path]:
    """The inputs that the value of an option names."""
    if isinstance(option.type, OutputName):
        return
    if value is None and isinstance(option, click.Argument):  # then the default model is read
        from edgeinfer.loading.open import default_model

        with suppress(ModelNotFound):
            yield default_model()
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(option.type, FileName) and isinstance(each, Path):
            yield each
        elif isinstance(option.type, MayNameFile) and isinstance(each, str):
            name = option.type.name_in(each)
            if name:
                yield FileName().convert(name, option, None)


def _parts_of(path: Path) -> Iterator[Path]:
    """The other files of a split model, and the packed weights beside its first one."""
    split = _SPLIT.fullmatch(path.name)
    parts = [path]
    if split is not None:
        parts += [path.with_name(f"{split[1]}-{n + 1:05d}-of-{split[2]}.gguf") for n in range(int(split[2]))]
    for part in parts:
        yield part
        if part.name:
            yield part.with_name(part.name + _PACKED)
