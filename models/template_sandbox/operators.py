"""Operators whose results are refused before they are made if they would be too long, and formatting."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.provenance import is_trusted, joined, trusted
from edgeinfer.models.template_sandbox.budget import (
    MAX_INT_BITS,
    check_length,
    counted,
    measured,
    weight_of,
)


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        check_length(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            check_length(len(sequence) * max(times, 0))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INT_BITS:
        raise TemplateError(f"the chat template makes an integer of more than {MAX_INT_BITS} bits")


def _check_difference(left: Any, right: Any) -> None:
    for operand in (left, right):  # of sets of keys: their elements are hashed
        measured(operand)


def check_percent(left: Any, right: Any) -> None:
    """Refuse widths that come from elsewhere or have more than four digits; what is left can be estimated."""
    if isinstance(left, str):
        if re.search(r"%[-#0 +\d.]*\*|[%)][-#0 +]*\d{5}|\.\d{5}", left):
            raise TemplateError("the chat template formats with a width that is too large")
        check_length(len(left) + left.count("%") * (20_000 + weight_of(right)))


OPERATOR_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "-": _check_difference,
    "%": check_percent,
}


def concat(values: list[Any]) -> str:
    """The ~ operator."""
    texts = [str(measured(value)) for value in values]
    check_length(sum(map(len, texts)))
    return counted(joined(texts))


class _Formatter(SandboxedFormatter):
    """str.format: every field counts, and has a small width; whole texts and the pattern's own keep their trust."""

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self._fields: list[str] = []
        written = super().vformat(format_string, args, kwargs)
        if not is_trusted(format_string):
            return written
        fields = iter(self._fields)
        parts: list[str] = []
        for literal, name, spec, _ in self.parse(format_string):
            parts.append(trusted(literal))
            if name is not None:
                parts.append(next(islice(fields, self._n_fields(spec), None)))  # after those in the spec
        text = joined(parts)
        return text if text == written else written

    def _n_fields(self, spec: str | None) -> int:
        return sum(1 + self._n_fields(inner) for _, name, inner, _ in self.parse(spec or "") if name is not None)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5}", format_spec):
            raise TemplateError("the chat template formats with a width that is too large")
        self._fields.append(counted(super().format_field(measured(value), format_spec)))
        return self._fields[-1]

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return counted(super().convert_field(measured(value), conversion))


class BoundFormat:
    """A text's `format` or `format_map`, bound."""

    def __init__(self, environment: SandboxedEnvironment, text: str, takes_mapping: bool) -> None:
        self._format = _Formatter(environment).vformat
        self._text = text
        self._takes_mapping = takes_mapping

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """The formatted text."""
        if self._takes_mapping:
            (kwargs,), args = args, ()
        return counted(self._format(self._text, args, kwargs))
