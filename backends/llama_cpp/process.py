"""The host's side of a process of llama.cpp: starts it, asks it, stops it, and tells how it ended."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from numpy.typing import NDArray

from edgeinfer.backends.driver_probe import PATIENCE_SECONDS, interpreter
from edgeinfer.backends.llama_cpp.messages import receive, send
from edgeinfer.backends.llama_cpp.shared import SharedMemory, Words, above_stdio
from edgeinfer.backends.llama_cpp.worker import Worker
from edgeinfer.common import errors
from edgeinfer.common.errors import BackendCrashed, BackendUnavailable, EdgeInferError

_logger = logging.getLogger(__package__)
_logger.addHandler(logging.NullHandler())

_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from edgeinfer.backends.llama_cpp.server import main; main()"
)
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGBUS})
_EXIT_SECONDS = 10  # that a process may take to end behind its last word
_ERRORS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}


class Ended(Exception):
    """The process has ended; the text says how, with its last line. is_fault: by a crash of its own, not by a kill."""

    def __init__(self, text: str, is_fault: bool) -> None:
        super().__init__(text)
        self.is_fault = is_fault


class Process:
    """A process with llama.cpp in it. Requests are made by one thread, one after the other.

    Ends with this object, and with the host however that ends. Raises BackendUnavailable where llama-cpp-python is
    missing, broken or another version.

    build: which llama-cpp-python it has.  pid: its process id.
    """

    def __init__(self) -> None:
        if not _is_installed():
            raise BackendUnavailable("the llama.cpp backend needs llama-cpp-python: pip install 'edgeinfer[llama]'")
        with ExitStack() as opened:
            self.shared, self._words = SharedMemory(), Words()
            opened.callback(self.shared.close)
            opened.callback(self._words.close)
            ours, theirs = socket.socketpair()
            self._connection = opened.enter_context(_above_stdio(ours))
            with _above_stdio(theirs) as theirs:
                self._popen = _start(theirs, self.shared, self._words)
            opened.pop_all()
        self._worker = Worker(self.shared.flag, self._popen.kill)
        self.pid = self._popen.pid
        self._end: Ended | None = None
        self.close = weakref.finalize(
            self, _close, os.getpid(), self._popen, self._worker, self._connection, self.shared, self._words
        )
        try:
            self.build: str = self._worker.call(self._greet)["build"]
        except Ended as end:
            self.close()
            raise BackendCrashed(f"llama.cpp's process does not start: {end}; install llama-cpp-python anew") from end
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        what: str,
        *options: object,
        arrays: Sequence[NDArray[Any]] = (),
        then: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """The reply to a request, see Server. Raises the error in it, and Ended if the process has ended.

        then: called behind the reply, whatever it is, in the thread that Ctrl-C does not strike.  meanwhile: called in
        this thread every 50 ms. What is raised here meanwhile stops llama.cpp and awaits it.
        """
        request = {"do": what, "options": options, "log": _logger.isEnabledFor(logging.DEBUG)}

        def exchange() -> dict[str, Any]:
            reply = self._exchange(request, arrays)
            then()
            return _checked(reply)

        return self._worker.call(exchange, meanwhile=meanwhile)

    def stop(self) -> None:
        """Have llama.cpp stop what it does for the request that runs; from any thread and signal handler."""
        self._worker.stop()

    # ---- in the worker's thread ------------------------------------------------------------------------------------

    def _greet(self) -> dict[str, Any]:
        self._connection.settimeout(PATIENCE_SECONDS)
        try:
            return _checked(receive(self._connection)[0])
        except TimeoutError:
            self._popen.kill()
            raise Ended(f"it gave no sign of life within {PATIENCE_SECONDS} s", is_fault=False) from None
        except (EOFError, OSError, ValueError) as error:
            raise self._ended() from error
        finally:
            self._connection.settimeout(None)

    def _exchange(self, request: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> dict[str, Any]:
        if self._end is not None:
            raise self._end
        try:
            send(self._connection, request, arrays)
            return receive(self._connection)[0]
        except (EOFError, OSError, ValueError) as error:
            self._end = self._ended()
            raise self._end from error

    def _ended(self) -> Ended:
        """How the process ended, or has to: without a connection it is of no use."""
        try:
            code = self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        said = self._words.last_line()
        last = f"its last line: {said}" if said else "without a word"
        if code >= 0:
            return Ended(f"it ended with exit code {code}, {last}", is_fault=False)
        name = signal.Signals(-code).name
        hint = " (the system's, if memory was short)" if -code == signal.SIGKILL else ""
        return Ended(f"{name}{hint}, {last}", is_fault=-code in _FAULTS)


def _is_installed() -> bool:
    """Whether the process will find llama-cpp-python, as far as can be told without importing it."""
    try:
        return importlib.util.find_spec("llama_cpp") is not None
    except ValueError:  # a module without a spec: somebody's own
        return True


def _start(connection: socket.socket, shared: SharedMemory, words: Words) -> subprocess.Popen[bytes]:
    """The process, out of reach of the terminal's Ctrl-C, with the modules that this one finds."""
    path = json.dumps([os.path.abspath(folder) for folder in sys.path])
    fds = connection.fileno(), shared.fd
    command = [interpreter(), "-P", "-c", _SERVE, path, *map(str, fds), str(os.getpid())]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words.fd,
            stderr=words.fd,
            pass_fds=fds,
            process_group=0,
            env={"GGML_NO_BACKTRACE": "1", **os.environ},  # it would start a debugger before it ends
        )
    except OSError as error:
        raise BackendUnavailable(f"llama.cpp's process cannot be started: {error}") from error


def _above_stdio(end: socket.socket) -> socket.socket:
    return socket.socket(fileno=above_stdio(end.detach()))


def _close(
    owner: int,
    popen: subprocess.Popen[bytes],
    worker: Worker,
    connection: socket.socket,
    shared: SharedMemory,
    words: Words,
) -> None:
    """End the process and give back what there is of it here. In a fork of the host, that is not there."""
    if os.getpid() != owner:
        return
    with suppress(OSError):
        popen.kill()  # it has nothing to tidy up
    popen.wait()
    worker.close()
    connection.close()
    shared.close()
    worker.flag = shared.flag
    words.close()


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply. Raises the error that it stands for; what llama.cpp logged goes to the log."""
    for line in reply.pop("log", ()):
        _logger.debug("%s", line)
    if "error" not in reply:
        return reply
    kind = _ERRORS.get(reply["error"], EdgeInferError)
    raise kind(reply["text"])
