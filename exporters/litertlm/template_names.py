"""What templates of LiteRT-LM have under the names of Jinja, as tried with 0.18.1, and its words for the rest."""

from __future__ import annotations

from collections.abc import Callable

FILTERS = frozenset(
    (
        "abs bool capitalize d default dictsort escape e first float format groupby indent int items join last length "
        "count list lower map max min pprint reject rejectattr replace reverse round safe select selectattr slice "
        "batch sort string sum title tojson trim unique upper urlencode"
    ).split()
)
DEFAULTS = {"indent": "4"}  # arguments that Jinja does without
TESTS = frozenset(
    (
        "boolean defined divisibleby eq equalto even false filter float ge gt in integer iterable le lower lt mapping "
        "ne number odd sameas sequence string test true undefined upper"
    ).split()
)


def _method(name: str) -> Callable[..., str]:
    return lambda value, *args: f"{value}.{name}({', '.join(args)})"


def _filtered(filters: str) -> Callable[..., str]:
    return lambda value: f"({value} | {filters})"


def _get(value: str, key: str, default: str = "none") -> str:
    return f"({value}[{key}] if {key} in {value} else {default})"


# The source of a call of a method of Python's, from the sources of the value and the arguments.
METHODS: dict[str, Callable[..., str]] = {
    **{name: _method(name) for name in ("endswith", "lstrip", "replace", "rstrip", "startswith", "strip")},
    **{name: _filtered(name) for name in ("capitalize", "items", "lower", "title", "upper")},
    "get": _get,
    "join": lambda value, items: f"({items} | join({value}))",
    "keys": _filtered("list"),
    "split": lambda value, *args: f"({value}.split({', '.join(args)}) | list)",
    "splitlines": _filtered("lines | list"),
    "values": _filtered("items | map(attribute=1) | list"),
}
