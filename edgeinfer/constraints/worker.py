"""The process that reads grammars first: one that crashes, or takes too much time or memory, ends only that process.

A line of JSON on standard input asks, {"form": ..., "source": ...}; one on standard output answers, {"grammar": ...} or
{"error": ...}. The first line of all says that the process is ready.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from edgeinfer.common.errors import InvalidConstraint
from edgeinfer.constraints.library import STACK_BYTES, grammar_of, one_line, open_library, problem_of

_MEMORY_BYTES = 1 << 30
_IDLE_SECONDS = 20.0
_STACK_BYTES = STACK_BYTES // 2  # less than the threads of the program have that read the same grammar later


def main() -> None:
    """Answer until standard input ends, or nobody asks for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the program that asks
    _limit_memory()
    open_library()
    threading.stack_size(_STACK_BYTES)
    _say({"ready": True})
    while line := _next_line():
        _say(_answer_in_thread(line))


def _next_line() -> str:
    """A line of standard input, "" at its end. Ends the process where none comes for a while."""
    idle = threading.Timer(_IDLE_SECONDS, os._exit, (0,))
    idle.daemon = True
    idle.start()
    line = sys.stdin.readline()
    idle.cancel()
    return line


def _answer_in_thread(line: str) -> dict[str, str]:
    """The answer, computed on a stack as small as any thread has that reads a grammar."""
    answers: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: answers.append(_answer(line)))
    thread.start()
    thread.join()
    return answers[0]


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    except (ImportError, OSError, ValueError):  # the operating system has no such limit
        pass


def _say(answer: dict[str, str] | dict[str, bool]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _answer(line: str) -> dict[str, str]:
    try:
        asked = json.loads(line)
        grammar = grammar_of(asked["form"], asked["source"])
        problem = problem_of(grammar)
    except InvalidConstraint as error:
        return {"error": str(error)}
    except BaseException as error:  # a panic in the library is no Exception
        return {"error": f"it cannot be read ({one_line(error)})"}
    return {"error": problem} if problem else {"grammar": grammar}
