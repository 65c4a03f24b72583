"""Models on the command line: a file, a name of `edgeinfer models`, or with -hf a model of the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgeinfer.cli.options import warnings_as_notes
from edgeinfer.cli.streams import Command
from edgeinfer.cli.terminal import ReportLines, note
from edgeinfer.common.errors import InvalidArgument, ModelNotFound
from edgeinfer.common.settings import variable_of

if TYPE_CHECKING:
    from edgeinfer.engine import Engine

_WORD = re.compile(r"[a-z0-9.]+")  # of a model's name
_HF_REPO = "Model of Hugging Face, downloaded once.  [default of QUANT: Q4_K_M, or the first file]"


class ModelCommand(Command):
    """A command whose models may be files, names of models of this machine, or with -hf and -hfd models of the hub.

    model: the parameter of the model; if it is an option, -hf and -hff have environment variables as it has.  draft:
    the parameter of a draft model.  others: those of further model files.  may_be_folder: they may be folders of
    Hugging Face.  finds: names are replaced by files before the command runs; otherwise the command calls find_models
    after checking its other flags.
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
                *("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"),
                metavar="USER/REPO[:QUANT]",
                help=what,
                variable=has_variable,
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
        """Keep one of repository and model. Raises click.UsageError if both are given."""
        if isinstance(self._parameter(self._model), click.Option):
            both = "-m and -hf both name a model (EDGEINFER_MODEL, EDGEINFER_HF_REPO): leave one out"
            _leave_one(ctx, self._model, "hf_repo", both)
        elif ctx.params["hf_repo"] is not None and ctx.params[self._model] is not None:
            names = [str(argument.name) for argument in self._required] or [self._model]
            if names == [self._model] or ctx.params[names[-1]] is not None:
                raise click.UsageError("-hf names a model, and so does MODEL: leave one out", ctx)
            given = [ctx.params[name] for name in names]  # each is meant as the next argument
            ctx.params.update(zip(names, [None, *given], strict=False))

    def _parameter(self, name: str) -> click.Parameter:
        return next(each for each in self.params if each.name == name)


def _leave_one(ctx: click.Context, name: str, repo: str, both: str) -> None:
    """Of two options keep the one on the command line, if the other is a variable's. Else raises click.UsageError."""
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
    """The flags of a ModelCommand with names replaced by files. Downloads the models of -hf and -hfd.

    Raises what `find_model` and `fetch` raise, and ModelNotFound where there is no file of a draft model.
    """
    found = dict(flags)
    with warnings_as_notes():
        if flags["hf_repo"] is not None:
            found[model] = _fetched(flags["hf_repo"], "-hf", flags["hf_file"])
        elif flags[model] is not None:
            found[model] = _found(flags, model, may_be_folder)
        for name in others:
            if flags[name] is not None:
                found[name] = _found(flags, name, may_be_folder)
        if flags.get("hf_repo_draft") is not None:
            found[str(draft)] = _fetched(flags["hf_repo_draft"], "-hfd")
        elif draft is not None and flags[draft] is not None:
            found[draft] = _found(flags, draft, may_be_folder and flags[draft].is_dir(), must_be_there=True)
    return found


def shown_name(flags: Mapping[str, Any], engine: Engine) -> str:
    """The name of a chat's model: as the user named it, with the file's own name if that differs."""
    if flags["hf_repo"] is not None:
        name = str(flags["hf_repo"])
    else:
        name = engine.path.stem if flags["model"] is None else flags["model"].name or str(flags["model"])
    words, itself = (_WORD.findall(each.lower().removesuffix(".gguf")) for each in (name, engine.name))
    return name if not itself or itself[0] in words else f"{name} ({engine.name})"


def _option(*names: str, variable: bool, **settings: Any) -> click.Option:
    flag = next(name for name in names if name.startswith("--"))
    if variable:
        settings |= {"envvar": variable_of(flag), "show_envvar": True}
    return click.Option([*names, flag[2:].replace("-", "_")], **settings)


def _found(flags: Mapping[str, Any], name: str, may_be_folder: bool = False, must_be_there: bool = False) -> Path:
    """The file that an option names. Errors name the environment variable, if the value is from one."""
    from edgeinfer.library.names import find_model

    variable = _variable_of(flags, name)
    try:
        with _DownloadLines() as lines:
            path = find_model(flags[name], "the model", lines, may_be_folder=may_be_folder)
        if (must_be_there or variable is not None) and not (may_be_folder and path.is_dir()):
            _check_there(path)
    except (ModelNotFound, InvalidArgument) as error:
        if variable is None:
            raise
        raise type(error)(f"{variable}: {error}") from None
    return path


def _check_there(path: Path) -> None:
    """Raises ModelNotFound, with the reason, if there is no file of that name."""
    if not path.is_file():
        from edgeinfer.models.gguf import ModelFile

        ModelFile.open(path).close()


def _variable_of(flags: Mapping[str, Any], name: str) -> str | None:
    """The environment variable that an option's value is from, None if it is from elsewhere."""
    context = click.get_current_context(silent=True)
    if context is None or context.params.get(name) is not flags[name]:  # as after /model
        return None
    if context.get_parameter_source(name) != ParameterSource.ENVIRONMENT:
        return None
    return next(str(each.envvar) for each in context.command.params if each.name == name)


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
