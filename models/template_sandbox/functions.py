"""The methods and functions that templates may call."""

from __future__ import annotations

import datetime
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.provenance import joined, replaced
from edgeinfer.models.template_sandbox.budget import (
    check_length,
    measured,
    weight_of,
)

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
            "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
            "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
        ).split()
    ),
    dict: frozenset("copy get items keys values".split()),
    list: frozenset("copy count index".split()),
    tuple: frozenset("count index".split()),
    LoopContext: frozenset("changed cycle".split()),
    Cycler: frozenset("next reset".split()),
}


def check_replace(text: str, old: str, new: str) -> None:
    """Refuse a replacement whose result would be too long."""
    if len(new) > len(old):
        check_length(len(text) + text.count(old) * (len(new) - len(old)))


def call_method(method: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Raises SecurityError if it is none of those listed."""
    owner, name = method.__self__, method.__name__
    if name not in _METHODS.get(str if isinstance(owner, str) else type(owner), ()):
        raise SecurityError(f"calls {type(owner).__name__}.{name}")
    if name in ("count", "index") and not isinstance(owner, str):
        measured(owner)
    elif name in ("strip", "lstrip", "rstrip") and args and len(args[0] or "") > 1000:
        raise TemplateError(f"the chat template strips more than 1000 different characters: {len(args[0])}")
    elif name == "join":
        check_length(weight_of(args[0]) + len(owner) * len(args[0]))
        return joined(*args, **{**kwargs, "separator": owner})
    elif name == "replace":
        check_replace(owner, *args[:2])
        return replaced(owner, *args, **kwargs)
    return method(*args, **kwargs)


def _raise_exception(message: object = "") -> NoReturn:
    raise TemplateError(f"the chat template refuses the messages: {message}"[:1000])


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise TemplateError("the chat template asks for a date in a format of more than 200 characters")
    return datetime.datetime.now().strftime(format)


FUNCTIONS: dict[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "range": safe_range,
    "dict": dict,
    "namespace": Namespace,
    "cycler": Cycler,
    "joiner": Joiner,
}
