"""From the source of a grammar to one that is known to be harmless, within limits of time and memory."""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from edgeinfer.backends.driver_probe import interpreter
from edgeinfer.common.errors import BackendUnavailable, EdgeInferError, InvalidConstraint
from edgeinfer.constraints.library import STACK_BYTES, Form, one_line

MAX_SECONDS = 2.0  # to read a grammar, apart from this process and then for a vocabulary
MAX_LENGTH = 1 << 20  # characters of a source
_START_SECONDS = 60.0  # for a process of Python to begin, on a slow machine

_TOO_LONG = f"it takes more than {MAX_SECONDS:g} s to read: make it smaller"

_Found = TypeVar("_Found")


class CompileWorker:
    """A process that reads grammars (edgeinfer.constraints.worker); started when it is needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # process id: a fork has pipes of its parent, which it must not use

    def start(self) -> None:
        """Start the process, unless it runs. Raises BackendUnavailable if there can be none."""
        with self._lock:
            self._started()

    def grammar(self, form: Form, source: str, deadline: float) -> str:
        """The grammar as llguidance reads it.

        deadline: of time.monotonic. Raises InvalidConstraint for a grammar that is wrong, crashes the process or takes
        more time or memory; BackendUnavailable if there can be no such process.
        """
        if len(source) > MAX_LENGTH:
            raise InvalidConstraint(f"it has {len(source)} characters: at most {MAX_LENGTH} are read")
        with self._lock:
            line = self._line(form, source, deadline)
        if not line:
            raise InvalidConstraint("it takes more memory to read than 1 GiB, or crashes llguidance")
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise InvalidConstraint(answer["error"])
        return answer["grammar"]

    def _line(self, form: Form, source: str, deadline: float) -> str:
        """What the process answers, "" where it ended instead. Raises InvalidConstraint if it takes too long."""
        for _ in range(2):
            process = self._started()
            try:
                line = _within(deadline, partial(_asked, process, form, source))
            except TimeoutError:
                self._end()
                raise InvalidConstraint(_TOO_LONG) from None
            if line or process.wait() != 0:
                return line
            # It had ended by itself, because nobody asked for a while.
        return ""

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._end()
        command = [interpreter(), "-P", "-c", "from edgeinfer.constraints.worker import main; main()"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="ascii"
        )
        self._process, self._owner = process, os.getpid()
        try:
            is_ready = bool(_within(time.monotonic() + _START_SECONDS, lambda: _line_of(process)))
        except TimeoutError:
            is_ready = False
        if not is_ready:
            self._end()
            raise BackendUnavailable("the process that reads schemas and grammars does not start; is memory short?")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # what was not written yet has no reader
                pass


def _asked(process: subprocess.Popen[str], form: Form, source: str) -> str:
    """The line that answers, "" where the process has ended."""
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"form": form, "source": source}) + "\n")
        process.stdin.flush()
    except OSError:
        return ""
    return _line_of(process)


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _within(deadline: float, work: Callable[[], _Found]) -> _Found:
    """What the work gives; it is left to end by itself where that takes longer. Raises TimeoutError."""
    results: queue.SimpleQueue[tuple[_Found | None, EdgeInferError | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except EdgeInferError as error:
            results.put((None, error))
        except BaseException as error:  # a panic in the library is no Exception
            results.put((None, InvalidConstraint(f"it cannot be read ({one_line(error)})")))

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=run, daemon=True).start()
    finally:
        threading.stack_size(before)
    try:
        found, error = results.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return found  # type: ignore[return-value]


def in_time(deadline: float, work: Callable[[], _Found]) -> _Found:
    """What the work gives. Raises InvalidConstraint at the deadline, after which the work ends by itself."""
    try:
        return _within(deadline, work)
    except TimeoutError:
        raise InvalidConstraint(_TOO_LONG) from None


WORKER = CompileWorker()
atexit.register(WORKER.close)
