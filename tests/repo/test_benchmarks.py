"""Benchmarks are run by hand: what they import of the package must be there all the same."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file imports of the package, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "edgeinfer":
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_a_benchmark_imports_what_the_package_has(path: Path) -> None:
    for module, name in imported_names(path):
        if module.startswith("edgeinfer.training") and importlib.util.find_spec("torch") is None:
            continue
        is_there = hasattr(importlib.import_module(module), name)
        assert is_there or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"


def test_names_that_are_not_there_are_found(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("from edgeinfer.models import read_spec, nothing\nfrom numpy import x\n")
    assert list(imported_names(tmp_path / "bench.py")) == [
        ("edgeinfer.models", "read_spec"),
        ("edgeinfer.models", "nothing"),
    ]
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        test_a_benchmark_imports_what_the_package_has(tmp_path / "bench.py")
