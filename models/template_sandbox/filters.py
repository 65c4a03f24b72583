"""The filters and tests that templates may use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from jinja2 import filters, pass_environment, pass_eval_context, tests
from jinja2.nodes import EvalContext

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.provenance import joined, recased, replaced, trusted
from edgeinfer.models.template_sandbox.budget import (
    BUDGET,
    check_length,
    counted,
    counted_slice,
    listed,
    measured,
    weight_of,
)
from edgeinfer.models.template_sandbox.functions import call_method, check_replace
from edgeinfer.models.template_sandbox.operators import check_percent, concat

if TYPE_CHECKING:
    from edgeinfer.models.template_sandbox.environment import Environment


def _step(function: Any, weighs: bool = False) -> Callable[..., Any]:
    """A filter or test as a step; weighs: it looks into its arguments, and not only at them."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if weighs:
            args = tuple(map(measured, args))
            kwargs = {name: measured(value) for name, value in kwargs.items()}
        result = function(*args, **kwargs)
        if not isinstance(result, Iterator):
            return counted(result)
        for text in (arg for arg in args if isinstance(arg, str)):
            check_length(16 * len(text))  # as listed has it: its characters are the elements
        # Generators would run later, unseen, and chains of them crash Python when they are freed.
        return iter(listed(result))

    return run


@pass_eval_context
def _join(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    elements = listed(value)
    if attribute is not None:
        elements = list(map(filters.make_attrgetter(context.environment, attribute), elements))
    check_length(weight_of(elements) + len(str(d)) * len(elements))
    return joined(map(str, elements), str(d))


@pass_eval_context
def _replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    check_replace(str(s), str(old), str(new))
    return replaced(str(s), str(old), str(new), -1 if count is None else count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = len(width) if isinstance(width, str) else width
    check_length(len(s) + (len(s.splitlines()) + 1) * (max(margin, 0) + 1))
    space = width if isinstance(width, str) else " " * width
    first_line, *lines = (s + "\n").splitlines()
    indented = [space + line if blank or line else line for line in lines]
    return (space if first else "") + joined([first_line, *indented], "\n")


@pass_environment
def _sort(environment: Environment, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return filters.do_sort(environment, listed(value), *args, **kwargs)


@pass_environment
def _sum(environment: Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    elements = listed(iterable)
    if attribute is not None:
        elements = list(map(filters.make_attrgetter(environment, attribute), elements))
    total = start
    for element in elements:
        total = environment.call_binop(None, "+", total, element)
    return total


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if not -20 <= precision <= 20:
        raise TemplateError(f"the chat template rounds to {precision} digits: -20 to 20 are allowed")
    return filters.do_round(value, precision, method)


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    return default if isinstance(value, str) and len(value) > 4000 else filters.do_int(value, default, base)


def _trim(value: Any, chars: str | None = None) -> str:
    return str(call_method(str(value).strip, [chars], {}))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    check_percent(str(value), kwargs or args)
    return filters.do_format(str(value), *args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: without jinja2's escapes for HTML."""
    widths = [len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ())]
    if max(widths) > 16:
        raise TemplateError("the chat template asks for JSON with indents or separators of more than 16 characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return "".join(map(counted, encoder.iterencode(value)))


def _title(value: Any) -> str:
    check_length(16 * len(str(value)))  # it splits the text into words
    return recased(str(value), filters.do_title)


def _safe(value: Any) -> str:
    """The text itself: nothing is escaped here."""
    return str(value)


_DEEP_FILTERS = "capitalize dictsort float lower max min string truncate unique upper".split()
_FLAT_FILTERS = "abs count d default first items last length map reject rejectattr reverse select selectattr".split()
_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": _safe,
    "sort": _sort,
    "sum": _sum,
    "title": _title,
    "tojson": _tojson,
    "trim": _trim,
}
FILTERS: dict[str, Any] = {
    **{name: _step(filters.FILTERS[name], weighs=True) for name in _DEEP_FILTERS},
    **{name: _step(filters.FILTERS[name]) for name in _FLAT_FILTERS},
    **{name: _step(function, weighs=True) for name, function in _OWN_FILTERS.items()},
    "list": _step(listed),
    # Written into the tree by Guards; no source can name them.
    "step!": lambda n_bytes: BUDGET.get().step(n_bytes),
    "own!": trusted,
    "sliced!": counted_slice,
    "weighed!": measured,
    "listed!": listed,
    "concat!": concat,
}
_DEEP_TESTS = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper".split()
_FLAT_TESTS = (
    "boolean defined divisibleby even false float integer iterable mapping none number odd sameas sequence string true "
    "undefined"
).split()
TESTS: dict[str, Any] = {
    **{name: _step(tests.TESTS[name], weighs=True) for name in _DEEP_TESTS},
    **{name: _step(tests.TESTS[name]) for name in _FLAT_TESTS},
}
