"""A person at a terminal: what is typed into a chat, and what shows."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from screen import Screen

SECONDS = 100.0  # that a person waits for anything
MAIN = "from edgeinfer.cli import main; main(prog_name='edgeinfer')"
# A model that never ends by itself, takes 10 ms a token, says on stderr when it makes the twentieth, and waits with it
# for the file WAIT_FOR, if there is such a variable; and a terminal that controls the process.
SLOW_MAIN = f"""
import os, sys, time
if os.isatty(0):
    os.close(os.open(os.ttyname(0), os.O_RDWR))
import edgeinfer.engine, edgeinfer.models.tokenizer
from edgeinfer.backends.llama_cpp import LlamaCppSession
from edgeinfer.backends.reference import ReferenceSession
Session = LlamaCppSession if "llama.cpp" in sys.argv else ReferenceSession
forward = Session.forward
n_calls = 0
def slow(*args, **options):
    global n_calls
    n_calls += 1
    if n_calls == 20 and "SAY_TWENTY" in os.environ:
        print("TWENTY", file=sys.stderr, flush=True)
    while n_calls == 20 and "WAIT_FOR" in os.environ and not os.path.exists(os.environ["WAIT_FOR"]):
        time.sleep(0.001)
    time.sleep(0.01)
    return forward(*args, **options)
Session.forward = slow
from_file = edgeinfer.models.tokenizer.Tokenizer.from_file
def endless(file):
    tokenizer = from_file(file)
    tokenizer.stop_ids = frozenset()
    return tokenizer
edgeinfer.models.tokenizer.Tokenizer.from_file = endless
{MAIN}
"""
# The same one, which says what the variable SAYS has, and then counts: a byte a token.
SAYING_MAIN = f"""
import os
import edgeinfer.engine
SAYS = os.environ.get("SAYS", "")
request = edgeinfer.engine.Engine._request
def requesting(engine, prompt, *rest):
    says = (SAYS + " ".join(map(str, range(2000)))).encode()
    edgeinfer.engine.sample = lambda logits, params, position, *rest: says[position - len(prompt)]
    return request(engine, prompt, *rest)
edgeinfer.engine.Engine._request = requesting
{SLOW_MAIN}
"""


def environment(tmp_path: Path, **more: str | None) -> dict[str, str]:
    """Variables for a program whose output is easy to read; one that is None is not set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDGEINFER_")}
    quiet = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path)}
    return {name: value for name, value in (kept | quiet | more).items() if value is not None}


class Person:
    """Types into a pseudo-terminal and waits for what shows."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.master = master
        self.seen = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def see(self, text: str, seconds: float = SECONDS) -> str:
        """Wait until the text shows; gives what was shown before and with it."""
        deadline = time.monotonic() + seconds
        while text.encode() not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not show in {seconds} s, but {self.seen!r}"
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:  # the other side has closed
                pytest.fail(f"the program ended before {text!r} showed: {self.seen!r}")
        shown, _, self.seen = self.seen.partition(text.encode())
        return shown.decode(errors="replace") + text

    def watch(self, screen: Screen, is_right: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Show on a screen what is written, until it is right and nothing more comes at once."""
        deadline = time.monotonic() + seconds
        while True:
            screen.write(self._decoder.decode(self.seen))
            self.seen = b""
            ready, _, _ = select.select([self.master], [], [], 0.0 if is_right() else deadline - time.monotonic())
            if not ready:
                assert is_right(), f"not in {seconds} s, but {screen.line(screen.row)!r}"
                return
            self.seen = os.read(self.master, 65536)

    def type(self, text: str) -> None:
        """Type it, without Enter."""
        os.write(self.master, text.encode())

    def see_prompt(self) -> None:
        """Wait until a line can be typed: editing has begun and the cursor shows."""
        self.see("\x1b[?2004h")
        self.see("\x1b[?25h")

    def say(self, text: str) -> None:
        """Type a line at the prompt."""
        self.see_prompt()
        self.type(text + "\r")

    def resize(self, columns: int, rows: int = 24) -> None:
        """Give the terminal another size; the program is told."""
        _set_size(self.master, columns, rows)

    def leave(self) -> int:
        """Wait for the end of the program; gives its exit code."""
        with suppress(OSError):
            while os.read(self.master, 65536):
                pass
        return self.process.wait(timeout=SECONDS)


def _set_size(terminal: int, columns: int, rows: int = 24) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def sitting_at(
    model: str | Path,
    tmp_path: Path,
    *arguments: str,
    main: str = SLOW_MAIN,
    shell: str = 'exec "$@"',
    columns: int = 200,
    **variables: str | None,
) -> Iterator[Person]:
    """A person at a terminal on which the chat runs. shell: what starts the program."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", main, "chat", "-m", str(model), "--backend", "reference", *arguments]
    _set_size(slave, columns)
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        cwd=tmp_path,
        env=environment(tmp_path, **({"SAY_TWENTY": "1"} | variables)),
    )
    os.close(slave)
    try:
        yield Person(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
