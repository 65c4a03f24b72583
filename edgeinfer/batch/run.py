"""Running a batch: requests are read as there is room for them, and answers are written as they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from edgeinfer.batch.lines import Asked, Line, Name, name_of, parse_line, read_lines, read_request
from edgeinfer.batch.output import Keys, Output
from edgeinfer.batch.records import answered, as_line, failed
from edgeinfer.common.errors import (
    CacheFull,
    ConstraintError,
    ContextOverflow,
    EdgeInferError,
    InvalidArgument,
    NumericalError,
    TemplateError,
)
from edgeinfer.constraints.options import split_options
from edgeinfer.engine import Engine
from edgeinfer.many import as_they_end
from edgeinfer.stream import RequestOptions, Stream

# Errors of one line; all others end the run, which another one goes on with.
_OF_A_LINE = (InvalidArgument, ContextOverflow, TemplateError, NumericalError, CacheFull, ConstraintError)


@dataclass
class Progress:
    """What a run has done.  n_lines: of the input, None if that is not known."""

    n_lines: int | None = None
    n_before: int = 0  # answered by earlier runs
    n_answered: int = 0  # by this one, errors too
    n_errors: int = 0  # of this run and earlier ones
    n_tokens: int = 0  # generated
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Of the texts that have ended."""
        return self.n_tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """About, None while that is not known."""
        if self.n_lines is None or self.n_answered == 0:
            return None
        return self.seconds / self.n_answered * (self.n_lines - self.n_before - self.n_answered)


def survey(file: BinaryIO, keys: Keys, output: Output | None) -> int:
    """The number of requests of a file, which is read once. Raises InvalidArgument if `output` is of another input."""
    n_lines = n_known = 0
    for line in read_lines(file):
        n_lines += 1
        n_known += _holds(output, line, keys)
    if output is not None and n_known < len(output):
        raise output.other(f"it has {len(output)}, and {n_known} of them are to lines of the input")
    return n_lines


def _holds(output: Output | None, line: Line, keys: Keys) -> bool:
    """Whether an earlier run answered a line."""
    return output is not None and len(output) > 0 and output.holds(line, keys.digest(line))


class Run:
    """A run of a batch.

    options: of requests that do not give them.  write: what takes the lines of answers.  progress: what was done is
    counted there.  tell: called after each answer.
    """

    def __init__(
        self,
        engine: Engine,
        options: RequestOptions,
        write: Callable[[bytes], None],
        progress: Progress,
        tell: Callable[[], None],
    ) -> None:
        self._engine, self._options = engine, options
        self._write, self._progress, self._tell = write, progress, tell
        self._names: dict[int, Name] = {}  # of streams that run

    def answer(self, lines: Iterable[Line], keys: Keys, output: Output | None) -> None:
        """Answer the lines but those that `output` holds.

        Raises what ends the run: KeyboardInterrupt, BackendLost, OSError and so on, and Interrupted where the engine
        was; what was not written is not done.
        """
        scheduler = self._engine.scheduler
        with closing(as_they_end(scheduler, self._streams(lines, keys, output), 2 * scheduler.n_parallel)) as ended:
            for stream in ended:
                self._finish(self._names.pop(id(stream)), stream)

    def _streams(self, lines: Iterable[Line], keys: Keys, output: Output | None) -> Iterator[Stream]:
        """Streams of the lines; errors of those that have none are written."""
        for line in lines:
            if _holds(output, line, keys):
                self._progress.n_before += 1
                continue
            name = Name(keys.key(line), line.number, "own")
            try:
                content = parse_line(line)
                name = name_of(content, line.number, name.key)
                stream = self._asked(read_request(content, name.form))
            except _OF_A_LINE as error:
                self._failed(name, error)
            else:
                self._names[id(stream)] = name
                yield stream

    def _asked(self, asked: Asked) -> Stream:
        """The stream of a request."""
        constraint, others = split_options(self._options)
        if not split_options(asked.options)[0]:  # what an answer may be is one thing, of the line or of the run
            others |= constraint
        options = cast(RequestOptions, {**others, **asked.options})
        if asked.messages is None:
            assert asked.prompt is not None
            return self._engine.stream(asked.prompt, **options)
        chat = self._engine.chat()
        chat.messages = asked.messages
        return chat.stream(**options)

    def _finish(self, name: Name, stream: Stream) -> None:
        if stream.failed:
            error = stream.error or EdgeInferError("the text failed")
            if not isinstance(error, _OF_A_LINE):
                raise error
            self._failed(name, error)
            return
        completion = stream.completion
        if completion.finish_reason == "interrupted":
            raise KeyboardInterrupt  # somebody called Engine.interrupt
        self._write(as_line(answered(name, completion, self._engine.name)))
        self._progress.n_tokens += completion.usage.completion_tokens
        self._progress.n_answered += 1
        self._tell()

    def _failed(self, name: Name, error: BaseException) -> None:
        self._write(as_line(failed(name, error)))
        self._progress.n_answered += 1
        self._progress.n_errors += 1
        self._tell()
