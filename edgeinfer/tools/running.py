"""Running the calls of an answer: functions of the caller, whose failures become results that the model reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.models.tool_calls import ToolCall
from edgeinfer.tools.options import Tool

_MOST_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call gave.  error: the exception of the tool, or why it was not called; None where it worked."""

    call: ToolCall
    value: object
    error: Exception | None = None

    @property
    def result(self) -> object:
        """What the model gets: the value, or the error in words."""
        if self.error is None:
            return self.value
        return f"Error: {_in_words(self.error)}"


@dataclass(frozen=True, slots=True)
class Round:
    """An answer that called tools, and what they gave."""

    calls: tuple[ToolCall, ...]
    results: tuple[CallResult, ...]


def check_runnable(tools: Sequence[Tool]) -> None:
    """Raises InvalidArgument if a tool is only declared, so that nothing can run it."""
    declared = [tool.name for tool in tools if tool.function is None]
    if declared:
        raise InvalidArgument(f"these tools have no function that could run: {', '.join(declared[:5])}")


def run_calls(calls: Sequence[ToolCall], tools: Sequence[Tool], at_once: bool = True) -> tuple[CallResult, ...]:
    """The results of calls, in their order.

    at_once: several run side by side, each in a thread. An exception of a tool becomes a result, and so do a call to a
    tool that there is not, and arguments that do not fit; KeyboardInterrupt and its kin are raised.
    """
    functions = {tool.name: tool for tool in tools}
    if len(calls) < 2 or not at_once:
        return tuple(_run(call, functions) for call in calls)
    with ThreadPoolExecutor(min(len(calls), _MOST_AT_ONCE), "edgeinfer-tool") as threads:
        return tuple(threads.map(lambda call: _run(call, functions), calls))


def _run(call: ToolCall, tools: Mapping[str, Tool]) -> CallResult:
    try:
        function, arguments = _bound(call, tools)
    except InvalidArgument as error:
        return CallResult(call, None, error)
    try:
        return CallResult(call, function(**arguments))
    except Exception as error:
        return CallResult(call, None, error)


def _bound(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(the function of a call, its arguments). Raises InvalidArgument."""
    tool = tools.get(call.name or "")
    if tool is None or tool.function is None:
        names = ", ".join(tools) or "none"
        raise InvalidArgument(f"there is no tool {call.name!r:.80}; there are {names}")
    if call.arguments is None:
        raise InvalidArgument(f"the arguments of {tool.name} must be a JSON object")
    try:
        inspect.signature(tool.function).bind(**call.arguments)
    except TypeError as error:
        raise InvalidArgument(f"the arguments do not fit {tool.name}: {error}") from None
    return tool.function, dict(call.arguments)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, InvalidArgument) else f"{type(error).__name__}: {error}"
