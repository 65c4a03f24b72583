"""Whether an exception is the caller's own: raised by a signal handler, such as that of a timer, while our code ran."""

from __future__ import annotations

import signal
from types import CodeType, MethodType, TracebackType


def is_from_handler(error: BaseException) -> bool:
    """Whether a signal handler that is installed now has raised it. Such an exception is none of ours to translate."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace: TracebackType | None = error.__traceback__ if codes else None
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """What Python runs for a handler, None for one of the system or in another language."""
    while hasattr(handler, "func"):  # functools.partial
        handler = handler.func
    if isinstance(handler, MethodType):
        handler = handler.__func__
    if not hasattr(handler, "__code__"):  # an object with __call__
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    return getattr(handler, "__code__", None)
