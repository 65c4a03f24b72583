"""Signals that end a long command after it has cleaned up."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from edgeinfer.common.errors import Interrupted

_ENDING = ("SIGTERM", "SIGHUP")  # the latter when a terminal is closed; Windows lacks it


@contextmanager
def ended_by_signals(left: Callable[[], str]) -> Iterator[None]:
    """Within, SIGTERM and SIGHUP act as Ctrl-C: half-written files are removed, and started processes are ended.

    left: called afterwards, says what stays for another try. Raises Interrupted with this sentence, and with the exit
    code that shells use for the signal.
    """
    ended: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not ended:  # a second one must not disturb the cleaning up
            ended.append(number)
            raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    # nohup has SIGHUP ignored
    before = {number: signal.signal(number, end) for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    except KeyboardInterrupt:
        number = ended[0] if ended else signal.SIGINT
        how = f"ended by {signal.Signals(number).name}" if ended else "interrupted"
        error = Interrupted(f"{how}; {left()}")
        error.exit_code = 128 + number
        raise error from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
