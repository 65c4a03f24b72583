"""Models on the command line: a file, a name of `edgeinfer models`, or with -hf a model of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgeinfer.cli.options import warnings_as_notes
from edgeinfer.cli.streams import Command
from edgeinfer.cli.terminal import ReportLines, note
from edgeinfer.errors import ModelNotFound

_HF_REPO = "Model of Hugging Face, downloaded where its cache lacks it.  [default of QUANT: Q4_K_M, or the first file]"


class ModelCommand(Command):
    """A command whose models may be files, names of models of this machine, or with -hf and -hfd models of the hub.

    model: the parameter that names the model; where that is an option, -hf and -hff have variables as it has.  draft:
    the one of a draft model.  others: of more files of models.  may_be_folder: the model may be a folder of Hugging
    Face. What these parameters are in the end is a Path.
    """

    def __init__(
        self,
        *arguments: Any,
        model: str,
        draft: str | None = None,
        others: Sequence[str] = (),
        may_be_folder: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self._model, self._draft, self._others, self._may_be_folder = model, draft, others, may_be_folder
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
        repo, file = flags.pop("hf_repo"), flags.pop("hf_file")
        draft_repo = flags.pop("hf_repo_draft", None)
        if repo is not None:
            repo = self._shifted(ctx, repo)
        for argument in self._required:
            if flags[str(argument.name)] is None and not (repo is not None and argument.name == self._model):
                raise click.MissingParameter(ctx=ctx, param=argument)
        if repo is None and ctx.get_parameter_source("hf_file") == ParameterSource.COMMANDLINE:
            raise click.UsageError("-hff names a file of a repository: name that with -hf", ctx)
        with warnings_as_notes():
            self._find_all(flags, repo, file)
            if draft_repo is not None:
                self._check_draft(ctx)
                flags[str(self._draft)] = _fetched(draft_repo, "-hfd")
        return super().invoke(ctx)

    def _find_all(self, flags: dict[str, Any], repo: str | None, file: str | None) -> None:
        """Put files in the place of names."""
        if repo is not None:
            flags[self._model] = _fetched(repo, "-hf", file)
        elif flags[self._model] is not None:
            flags[self._model] = _found(flags[self._model], self._may_be_folder)
        for name in self._others:
            if flags[name] is not None:
                flags[name] = _found(flags[name])
        if self._draft is not None and flags[self._draft] is not None:
            try:
                flags[self._draft] = _found(flags[self._draft])
            except ModelNotFound:  # whoever drafts says so, and what happens then
                pass

    def _shifted(self, ctx: click.Context, repo: str) -> str | None:
        """The repository, with what stands at its place moved to the next argument; None where -m is meant instead."""
        given = ctx.params[self._model]
        if given is None:
            return repo
        if isinstance(self._parameter(self._model), click.Argument):
            rest = [str(argument.name) for argument in self._required if argument.name != self._model]
            if rest and ctx.params[rest[-1]] is None:
                names = [self._model, *rest]
                for name, before in zip(reversed(names), reversed(names[:-1]), strict=False):
                    ctx.params[name] = ctx.params[before]
                ctx.params[self._model] = None
                return repo
            raise click.UsageError("-hf names a model, and so does MODEL: leave one out", ctx)
        sources = [ctx.get_parameter_source(name) for name in (self._model, "hf_repo")]
        if sources == [ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE]:
            return repo
        if sources == [ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT]:
            return None
        raise click.UsageError("-m and -hf both name a model (EDGEINFER_MODEL, EDGEINFER_HF_REPO): leave one out", ctx)

    def _check_draft(self, ctx: click.Context) -> None:
        if ctx.params[str(self._draft)] is not None:
            raise click.UsageError("-md and -hfd both name a draft model: leave one out", ctx)

    def _parameter(self, name: str) -> click.Parameter:
        return next(each for each in self.params if each.name == name)


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
    """Progress of a download, and a note where it is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self._has_begun = False

    def __call__(self, what: str, share: float) -> None:
        self._has_begun = True
        super().__call__(what, share)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is KeyboardInterrupt and self._has_begun:
            note("what there is of the file is kept: the same command goes on with it")
