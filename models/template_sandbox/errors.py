"""Which exceptions a template has caused, and which come from outside: a signal handler, a debugger."""

from __future__ import annotations

import sys

from edgeinfer.common.signal_handlers import is_from_handler

_OWN = sys.stdlib_module_names | {"edgeinfer", "jinja2", "markupsafe", "<template>", "<unknown>"}


def is_of_template(error: Exception) -> bool:
    """Whether what compiles or renders a template has raised it, in its own code and of a kind that it can raise."""
    kind = type(error).__module__.partition(".")[0]
    if kind not in _OWN or isinstance(error, OSError) or is_from_handler(error):
        return False
    trace = error.__traceback__
    while trace is not None:
        # A compiled template has no module name, or its file's.
        if str(trace.tb_frame.f_globals.get("__name__", "<template>")).partition(".")[0] not in _OWN:
            return False
        trace = trace.tb_next
    return True
