"""Which tools a model may call in an answer, as a caller says it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypedDict

from edgeinfer.common.arguments import check_flag, check_text, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.tools.functions import declaration_of

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")  # no mark or bracket that a format has

Choice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Tool:
    """A tool with its declaration."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON Schema of an object
    function: Callable[..., Any] | None = field(default=None, compare=False)  # None for one that is only declared

    @property
    def declaration(self) -> dict[str, Any]:
        """As OpenAI and templates have it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @cached_property
    def text(self) -> str:
        """The declaration as JSON."""
        return json.dumps(self.declaration, ensure_ascii=False)


Given: TypeAlias = Callable[..., Any] | Mapping[str, Any] | Tool
"""A tool as a caller gives it: a function, OpenAI's {"type": "function", "function": {...}}, or a Tool."""


class CallOptions(TypedDict, total=False):
    """How tools are called, as keyword arguments.

    tool_choice: "auto" (the default) leaves it to the model whether it calls, "none" lets it only answer, "required"
    only call; a name, or OpenAI's {"type": "function", "function": {"name"}}, lets it call that one, once.
    parallel_tool_calls: whether several calls may come in one answer, which is the default.  tool_selection: how many
    of many tools are given to the model, those that fit the message: True (the default) for 12, False for all, a
    number, a function that makes vectors of texts, or an edgeinfer.tools.selection.ToolSelection.
    """

    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    tool_selection: Any


class ToolOptions(CallOptions, total=False):
    """Tools of an answer, as keyword arguments.

    tools: Python functions, whose signature, type hints and docstring are read, or OpenAI's
    {"type": "function", "function": {"name", "description", "parameters"}}.
    """

    tools: Sequence[Given] | None


@dataclass(frozen=True)
class ToolUse:
    """The tools of an answer, and what is to be done with them."""

    tools: tuple[Tool, ...] = ()  # at least one, unless `choice` is "none"
    choice: Choice = "auto"
    is_parallel: bool = True
    named: str | None = None  # the only tool that may be called; then `choice` is "required"

    @property
    def may_call(self) -> bool:
        """Whether a call may come."""
        return bool(self.tools) and self.choice != "none"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.named in (None, tool.name)) if self.may_call else ()


NO_TOOLS = ToolUse(choice="none")


def tool_of(given: Given) -> Tool:
    """A tool as it is declared. Raises InvalidArgument."""
    if isinstance(given, Tool):
        return given
    if not isinstance(given, Mapping):
        if not callable(given) or inspect.isclass(given):
            raise InvalidArgument(f"a tool must be a function or a mapping: found {shown(given)}")
        declared = declaration_of(given)
        return _tool(declared, given)
    function = given.get("function") if "function" in given else given
    if given.get("type", "function") != "function" or not isinstance(function, Mapping) or "name" not in function:
        raise InvalidArgument(
            'a tool must be a function or {"type": "function", "function": {"name": ..., "description": ..., '
            f'"parameters": ...}}}}: found {shown(given)}'
        )
    return _tool(function, None)


def _tool(declared: Mapping[str, Any], function: Callable[..., Any] | None) -> Tool:
    name = check_text("the name of a tool", declared["name"])
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"the name of a tool must be letters, digits, _, - and points, and begin with a letter: found {shown(name)}"
        )
    description = check_text(f"the description of {name}", declared.get("description") or "")
    parameters = declared.get("parameters")
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidArgument(f"the parameters of {name} must be a JSON Schema of an object: found {shown(parameters)}")
    try:
        copy = json.loads(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the parameters of {name} cannot be written as JSON: {error}") from None
    return Tool(name, description, {"type": "object", "properties": {}, **copy}, function)


def tool_use_of(options: Mapping[str, Any]) -> ToolUse:
    """What ToolOptions ask for. Raises InvalidArgument."""
    is_parallel = options.get("parallel_tool_calls")
    is_parallel = True if is_parallel is None else is_parallel
    check_flag("parallel_tool_calls", is_parallel)
    tools = _tools(options.get("tools"))
    choice, named = _choice(options.get("tool_choice"))
    if named is not None and named not in {tool.name for tool in tools}:
        names = ", ".join(tool.name for tool in tools[:12]) or "none"
        raise InvalidArgument(
            f"tool_choice must be auto, none, required or the name of a tool ({names}): found {named}"
        )
    if not tools:
        if choice == "required":
            raise InvalidArgument("tool_choice is required, and there are no tools")
        return NO_TOOLS
    return ToolUse(tools, choice, is_parallel, named)


def _tools(given: object) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise InvalidArgument(f"tools must be a list of functions or mappings: found {shown(given)}")
    if len(given) > MAX_TOOLS:
        raise InvalidArgument(f"at most {MAX_TOOLS} tools are taken: found {len(given)}")
    tools = tuple(map(tool_of, given))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise InvalidArgument(f"two tools are called {twice}: names must differ")
    return tools


def _choice(given: object) -> tuple[Choice, str | None]:
    if isinstance(given, Mapping):
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else given.get("name")
        return "required", check_text("the name in tool_choice", name)
    if given is None or given == "auto":
        return "auto", None
    choice = check_text("tool_choice", given)
    if choice == "none":
        return "none", None
    return "required", None if choice == "required" else choice


def split_tool_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(those of ToolOptions, the others)."""
    names = ToolOptions.__annotations__
    own = {name: value for name, value in options.items() if name in names}
    return own, {name: value for name, value in options.items() if name not in own}
