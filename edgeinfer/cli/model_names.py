"""Models on the command line: a file, a name of `edgeinfer models`, or with -hf a model of the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgeinfer.cli.options import warnings_as_notes
from edgeinfer.cli.streams import Command
from edgeinfer.cli.terminal import ReportLines, note
from edgeinfer.common.errors import ModelNotFound

_HF_REPO = "Model of Hugging Face, downloaded where its cache lacks it.  [default of QUANT: Q4_K_M, or the first file]"


class ModelCommand(Command):
    """A command whose models may be files, names of models of this machine, or with -hf and -hfd models of the hub.

    model: the parameter that names the model; where that is an option, -hf and -hff have variables as it has.  draft:
    the one of a draft model.  others: of more files of models.  may_be_folder: they may be folders of Hugging Face.
    finds: before the command runs, whose parameters are files then; else it calls find_models when it has looked
    at its other flags.
    """

    def __init__(
        self,
        *arguments: Any,
        model: str,
        draft: str | None = None,
        others: Sequence[str] = (),
        may_be_folder: bool = False,
        finds: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self._model, self._draft, self._others = model, draft, others
        self._may_be_folder, self._finds = may_be_folder, finds
        found = self._parameter(model)
        self._required = [each for each in self.params if isinstance(each, click.Argument) and each.required]
        for argument in self._required:  # -hf stands for the first
            argument.required, argument.metavar = False, str(argument.name).upper()
        has_variable = isinstance(found, click.Option)
        place = self.params.index(found) + 1
        self.params[place:place] = [
            _option("-hf", "-hfr", "--hf-repo", metavar="USER/REPO[:QUANT]", help=_HF_REPO, variable=has_variable),
            _option(
                "-hff", "--hf-file", metavar="FILE", help="-hf: this file of the repository.", variable=has_variable
            ),
        ]
        if draft is not None:
            what = "Draft model of Hugging Face, as for -hf."
            place = self.params.index(self._parameter(draft)) + 1
            repo = _option(
                *("-hfd", "-hfrd", "--hf-repo-draft"), metavar="USER/REPO[:QUANT]", help=what, variable=has_variable
            )
            self.params.insert(place, repo)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with a file for each model. Raises click.UsageError, and what `find_model` raises."""
        flags = ctx.params
        self._choose_model(ctx)
        for argument in self._required:
            if flags[str(argument.name)] is None and (argument.name != self._model or flags["hf_repo"] is None):
                raise click.MissingParameter(ctx=ctx, param=argument)
        if flags["hf_repo"] is None and ctx.get_parameter_source("hf_file") == ParameterSource.COMMANDLINE:
            raise click.UsageError("-hff names a file of a repository: name that with -hf", ctx)
        if self._draft is not None:
            _leave_one(ctx, self._draft, "hf_repo_draft", "-md and -hfd both name a draft model: leave one out")
        if self._finds:
            ctx.params = find_models(flags, self._model, self._draft, self._others, self._may_be_folder)
            for name in ("hf_repo", "hf_file", "hf_repo_draft"):
                ctx.params.pop(name, None)
        return super().invoke(ctx)

    def _choose_model(self, ctx: click.Context) -> None:
        """Of a repository and a model, leave what is meant. Raises click.UsageError where both are."""
        if isinstance(self._parameter(self._model), click.Option):
            both = "-m and -hf both name a model (EDGEINFER_MODEL, EDGEINFER_HF_REPO): leave one out"
            _leave_one(ctx, self._model, "hf_repo", both)
        elif ctx.params["hf_repo"] is not None and ctx.params[self._model] is not None:
            names = [str(argument.name) for argument in self._required] or [self._model]
            if names == [self._model] or ctx.params[names[-1]] is not None:
                raise click.UsageError("-hf names a model, and so does MODEL: leave one out", ctx)
            given = [ctx.params[name] for name in names]  # each of which is meant as the next argument
            ctx.params.update(zip(names, [None, *given], strict=False))

    def _parameter(self, name: str) -> click.Parameter:
        return next(each for each in self.params if each.name == name)


def _leave_one(ctx: click.Context, name: str, repo: str, both: str) -> None:
    """Of two options the one of the command line, where the other one is a variable's. Raises click.UsageError."""
    if ctx.params[name] is None or ctx.params[repo] is None:
        return
    sources = [ctx.get_parameter_source(each) for each in (name, repo)]
    if sources == [ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE]:
        ctx.params[name] = None
    elif sources == [ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT]:
        ctx.params[repo] = None
    else:
        raise click.UsageError(both, ctx)


def find_models(
    flags: Mapping[str, Any],
    model: str = "model",
    draft: str | None = "model_draft",
    others: Sequence[str] = (),
    may_be_folder: bool = False,
) -> dict[str, Any]:
    """The flags of a ModelCommand with a file in the place of each name. Downloads what -hf and -hfd ask for.

    The name of a draft model that nothing has stays as it is. Raises what `find_model` and `fetch` raise.
    """
    found = dict(flags)
    with warnings_as_notes():
        if flags["hf_repo"] is not None:
            found[model] = _fetched(flags["hf_repo"], "-hf", flags["hf_file"])
        elif flags[model] is not None:
            found[model] = _found(flags[model], may_be_folder)
        for name in others:
            if flags[name] is not None:
                found[name] = _found(flags[name], may_be_folder)
        if flags.get("hf_repo_draft") is not None:
            found[str(draft)] = _fetched(flags["hf_repo_draft"], "-hfd")
        elif draft is not None and flags[draft] is not None:
            with suppress(ModelNotFound):  # who drafts says so
                found[draft] = _found(flags[draft])
    return found


def _option(*names: str, variable: bool, **settings: Any) -> click.Option:
    flag = names[-1]
    if variable:
        settings |= {"envvar": f"EDGEINFER{flag[1:].replace('-', '_').upper()}", "show_envvar": True}
    return click.Option(names, **settings)


def _found(name: Path, may_be_folder: bool = False) -> Path:
    """The file of a name that is no flag of the hub's."""
    from edgeinfer.library.names import find_model

    with _DownloadLines() as lines:
        return find_model(name, "the model", lines, may_be_folder=may_be_folder)


def _fetched(repo: str, flag: str, file: str | None = None) -> Path:
    """The file of a model of the hub."""
    from edgeinfer.library.hub import fetch
    from edgeinfer.library.references import parse_reference

    with _DownloadLines() as lines:
        return fetch(parse_reference(repo, flag, file), lines)


class _DownloadLines(ReportLines):
    """Progress of a download, and a note where it is interrupted. On a terminal the name is above the bar."""

    def __init__(self) -> None:
        super().__init__()
        self._named = ""

    def __call__(self, what: str, share: float) -> None:
        named, _, size = what.partition(": ")
        verb = named.partition(" ")[0]
        if sys.stderr.isatty():
            if named != self._named and verb == "downloading":
                note(named)
            what = f"{verb}: {size}"
        self._named = named
        super().__call__(what, share)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is KeyboardInterrupt and self._named:
            note("what there is of the file is kept: the same command goes on with it")
