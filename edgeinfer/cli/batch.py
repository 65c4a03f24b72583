"""`edgeinfer batch`: answer the requests of a file, several at once."""

from __future__ import annotations

import os
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

import click

from edgeinfer.cli.constraints import constraint_given, constraint_options
from edgeinfer.cli.endings import ended_by_signals
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    FileName,
    OutputName,
    backend_option,
    max_tokens,
    model_options,
    open_engine,
    out_option,
    overwrite_option,
    quiet_option,
    sampling_given,
    sampling_options,
    stop_option,
    template_options,
)
from edgeinfer.cli.streams import writing_result
from edgeinfer.cli.terminal import ReportLines, note
from edgeinfer.common.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.batch.output import Output
    from edgeinfer.batch.run import Progress
    from edgeinfer.engine import Engine
    from edgeinfer.stream import RequestOptions

_STANDARD = Path("-")  # standard input or output
_LINE_SECONDS = 10.0  # between lines about a run whose length is not known


@click.command(cls=ModelCommand, model="model", draft="model_draft", finds=False)
@click.argument("source", metavar="IN.jsonl", type=FileName(), required=False)
@out_option(OutputName(dir_okay=False), required=True, help="The file of the answers, or - for standard output.")
@overwrite_option
@model_options
@template_options
@backend_option
@stop_option
@constraint_options
@sampling_options
@quiet_option
def batch(source: Path | None, out: Path, overwrite: bool, quiet: bool, **flags: Any) -> None:
    """Answer the requests of a file.

    Several run at once. IN.jsonl, or - for standard input, has a JSON object a line: a request of OpenAI's batch files,
    or {"prompt": ...} or {"messages": [...]} with options and an "id". Answers are appended to the output in the order
    in which they end. After Ctrl-C or a crash the same command goes on. A bad line has an error for an answer, and the
    exit code is 1.
    """
    given = {**sampling_given(flags), **constraint_given(flags), "max_tokens": max_tokens(flags), "stop": flags["stop"]}
    if source is None:
        raise click.UsageError("Missing argument 'IN.jsonl'.")
    if source.suffix == ".gguf":
        raise click.UsageError(f"{source} looks like a model: name it with -m")
    from edgeinfer.batch.output import Output
    from edgeinfer.batch.run import Progress

    with ExitStack() as opened:
        file = sys.stdin.buffer if source == _STANDARD else opened.enter_context(open(source, "rb"))
        output = None if out == _STANDARD else opened.enter_context(Output(out, overwrite))
        progress = Progress()
        with ended_by_signals(lambda: _left(progress, output)):
            engine = opened.enter_context(open_engine(flags))
            _answer(engine, file, output, progress, cast("RequestOptions", given), quiet)
    if progress.n_errors:
        click.get_current_context().exit(EdgeInferError.exit_code)


def _answer(
    engine: Engine, file: BinaryIO, output: Output | None, progress: Progress, options: RequestOptions, quiet: bool
) -> None:
    """Answer the lines of a file and say how it went."""
    from edgeinfer.batch.lines import read_lines
    from edgeinfer.batch.output import Keys
    from edgeinfer.batch.run import Run, survey

    keys = Keys({"model": engine.path.name, **_told_to_templates(engine), **options})
    if output is not None:
        progress.n_errors = output.n_errors
    if _is_regular(file):
        progress.n_lines = survey(file, keys, output)
        file.seek(0)
    if output is not None:
        output.cut()
    progress.started = time.monotonic()
    with _notes_once(), _Told(progress) as tell:
        Run(engine, options, _written if output is None else output.write, progress, tell).answer(
            read_lines(file), keys, output
        )
    if not quiet:
        note(_summary(progress))


def _told_to_templates(engine: Engine) -> dict[str, str]:
    """What prompts of chats depend on beside the model: nothing, unless the command says so."""
    found = {} if engine.reasoning == "auto" else {"reasoning": engine.reasoning}
    return found | ({"chat_template": engine.template.source} if engine.has_given_template else {})


def _is_regular(file: BinaryIO) -> bool:
    """Whether a file can be read twice."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.seekable()
    except (OSError, ValueError):  # no file at all, as in a test
        return False


def _written(line: bytes) -> None:
    """Write a line to standard output."""
    with writing_result():
        sys.stdout.write(line.decode())
        sys.stdout.flush()


class _Told:
    """Shows progress on stderr: a bar on a terminal, elsewhere a line from time to time. A context manager."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._report = ReportLines()
        self._last = time.monotonic()

    def __call__(self) -> None:
        """Show what is done."""
        progress = self._progress
        n_done = progress.n_before + progress.n_answered
        speed = f"{progress.tokens_per_second:.1f} tokens/s"
        if progress.n_lines is not None:
            left = progress.seconds_left
            end = "" if left is None else f", {_duration(left)} left"
            self._report(f"answering: {n_done} of {progress.n_lines}, {speed}{end}", n_done / progress.n_lines)
        elif time.monotonic() - self._last > _LINE_SECONDS:
            note(f"answering: {n_done}, {speed}")
            self._last = time.monotonic()

    def __enter__(self) -> Callable[[], None]:
        self._report.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._report.__exit__(*error)


@contextmanager
def _notes_once() -> Iterator[None]:
    """Warnings within become notes when they come, each once."""
    told: set[str] = set()

    def tell(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in told and len(told) < 100:
            told.add(str(message))
            note(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = tell
        yield


def _left(progress: Progress, output: Output | None) -> str:
    """What there is after an interruption."""
    if output is None:
        return f"{progress.n_answered} lines were answered"
    n_lines = output.n_lines()
    if n_lines is None:
        n_lines = progress.n_answered
    return f"{n_lines} lines are answered in {output.path}: the same command goes on with it"


def _summary(progress: Progress) -> str:
    before = f", {progress.n_before} before" if progress.n_before else ""
    errors = f", {progress.n_errors} errors" if progress.n_errors else ""
    return (
        f"[{progress.n_answered} answered{before}{errors} | {progress.n_tokens} tokens in "
        f"{_duration(progress.seconds)}, {progress.tokens_per_second:.1f} tok/s]"
    )


def _duration(seconds: float) -> str:
    """In two units at most: "48 s", "12 min", "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
