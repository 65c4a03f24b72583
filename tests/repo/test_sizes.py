"""A function fits a screen."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 50  # of a function, with its signature and docstring
FOLDERS = ("edgeinfer", "backends", "exporters", "hls", "models", "tests/support")


def long_functions(source: str) -> Iterator[str]:
    """Functions of a source that are too long, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines > MOST_LINES:
                yield f"{node.name}, {n_lines} lines"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_is_longer_than_a_screen(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}: {name}" for path in paths for name in long_functions(path.read_text())]
    assert paths and found == []


def test_a_long_function_is_found_wherever_it_is() -> None:
    body = "        x = 1\n" * MOST_LINES
    source = f"class A:\n    def f(self):\n{body}\n    async def g(self):\n{body}"
    assert list(long_functions(source)) == [f"f, {MOST_LINES + 1} lines", f"g, {MOST_LINES + 1} lines"]
    assert list(long_functions(source.replace("        x = 1\n", "", 2))) == [f"g, {MOST_LINES + 1} lines"]
