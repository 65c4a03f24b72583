"""Formatters and linters find nothing, and kernels for one set of instructions cannot leak into the others."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parts import missing

ROOT = Path(__file__).parents[2]
FOLDERS, ENDINGS = ("backends", "edgeinfer", "hls", "models"), ("cpp", "h", "hpp", "cl")
NATIVE = sorted(path for folder in FOLDERS for end in ENDINGS for path in (ROOT / folder).rglob(f"*.{end}"))


def tool(name: str) -> str:
    """The tool of this interpreter's environment, else of the system."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or missing("dev", f"{name} is not installed: pip install --group dev")


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["clang-format", "--dry-run", "-Werror", *map(str, NATIVE)],
    ],
    ids=["ruff check", "ruff format", "clang-format"],
)
def test_the_sources_are_clean(command: list[str]) -> None:
    run = subprocess.run([tool(command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


def repeated_docstrings(source: str) -> list[str]:
    """Methods whose docstring does nothing but name a base of their class: `override` says that, and types check it."""
    found = []
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.ClassDef):
            bases = "|".join(ast.unparse(base).split("[")[0] for base in each.bases) or "-"
            for method in each.body:
                said = (ast.get_docstring(method) or "") if isinstance(method, ast.FunctionDef) else ""
                found += [f"{each.name}.{method.name}"] if re.fullmatch(rf"See ({bases})(\.\w+)?\.?", said) else []
    return found


@pytest.mark.parametrize("said, is_found", [("See Base.", 1), ("See Base.f.", 1), ("See Base.f. Raises OSError.", 0)])
def test_a_docstring_that_names_a_base_alone_is_found(said: str, is_found: int) -> None:
    source = f'class A(Other, Base[int]):\n    def f(self):\n        """{said}"""'
    assert repeated_docstrings(source) == ["A.f"] * is_found
    assert repeated_docstrings(source.replace("Base[int]", "Basis")) == []


def test_an_overriding_method_is_marked_and_not_described_again() -> None:
    sources = [path for folder in (*FOLDERS, "exporters") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): repeated_docstrings(path.read_text(encoding="utf-8")) for path in sources}
    assert len(sources) > 100 and not {path: names for path, names in found.items() if names}


def test_the_objects_of_one_set_of_instructions_have_no_weak_symbols() -> None:
    # The linker keeps one copy of a weak symbol for all: an inline function compiled for AVX-512 would run on any CPU.
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    kinds = ("native/CMakeFiles/ei_kernels_*.dir", "models/CMakeFiles/ei_quantizers_*.dir/formats")
    objects = [path for kind in kinds for path in sorted((ROOT / "build").glob(f"{version}-*/{kind}/*.o"))]
    if not objects or shutil.which("nm") is None:
        missing("native", "nm and the objects of a build in build/ are needed: make setup")
    found = subprocess.run(["nm", "-A", "-C", *objects], check=True, capture_output=True, text=True).stdout
    assert [line for line in found.splitlines() if " W " in line or " V " in line or " u " in line] == []
