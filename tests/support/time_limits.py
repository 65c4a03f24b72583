"""A plugin of pytest, so that no run of tests hangs: what pytest-timeout cannot end is ended here.

pytest-timeout interrupts Python code, in each test after `timeout` seconds and in the run after `session_timeout`
(pyproject.toml, or --timeout and --session-timeout; 0 is no limit). It cannot interrupt native code that does not come
back, modules that hang while they are imported, and processes of pytest-xdist that wait for each other. So some time
after each of its limits the process ends with the stacks of its threads on stderr, and xdist reports the test.
"""

import _thread
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import pytest_timeout
from _pytest.faulthandler import fault_handler_stderr_fd_key


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TimeLimits(config), "time_limits of this process")


class TimeLimits:
    """The hooks of one process: the one that was started, or one of pytest-xdist's."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds = pytest_timeout.get_env_settings(config).timeout or 0
        self._running: dict[str, float] = {}  # by test, when it began
        self._n_crashed = 0
        self._timers: list[threading.Timer] = []

    @contextmanager
    def _ends_after(self, seconds: float) -> Iterator[None]:
        """Native code cannot keep this from happening: the watch is a thread without Python."""
        if seconds <= 0 or pytest_timeout.is_debugging():
            yield
            return
        stderr = self._config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(seconds + grace(seconds), file=stderr, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A test with its fixtures."""
        marker = item.get_closest_marker("timeout")
        with self._ends_after(marker.args[0] if marker and marker.args else self._seconds):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """A failure takes away both limits, for a debugger: what is after it gets a new one."""
        with self._ends_after(self._seconds):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self) -> Iterator[None]:
        """The import of a module."""
        with self._ends_after(self._seconds):
            return (yield)

    def pytest_sessionstart(self) -> None:
        seconds = self._config.stash[pytest_timeout.SESSION_TIMEOUT_KEY]
        if seconds > 0 and not hasattr(self._config, "workerinput"):
            # The tests that run when the session's time is over may take theirs.
            last = seconds + self._seconds + 2 * grace(self._seconds)
            self._timers = [threading.Timer(last, self._interrupt), threading.Timer(last + grace(last), kill)]
            for timer in self._timers:
                timer.daemon = True
                timer.start()

    def _interrupt(self) -> None:
        """As Ctrl-C does, so that the failures until here are reported."""
        now = time.monotonic()
        running = [f"{name} (for {now - began:.0f} s)" for name, began in self._running.items()]
        self._say(f"The run takes too long (session_timeout) and is ended. Running: {', '.join(running) or 'no test'}")
        _thread.interrupt_main()

    def _say(self, line: str) -> None:
        """On what was stderr before pytest kept the output of tests."""
        os.write(self._config.stash[fault_handler_stderr_fd_key], f"\n{line}\n".encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        self._n_crashed += bool(error)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A process that crashed outside of any test, while modules were imported for instance, is a failure too."""
        for timer in self._timers:
            timer.cancel()
        if self._n_crashed and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            self._say(f"Test processes crashed outside of a test: {self._n_crashed}. See their stacks above.")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def grace(seconds: float) -> float:
    """How long after a limit of pytest-timeout, in which it may do its work, the process is ended."""
    return min(30.0, max(1.0, seconds / 4))


def kill() -> None:
    """End this process and those that it started."""
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(pytest.ExitCode.INTERRUPTED)
