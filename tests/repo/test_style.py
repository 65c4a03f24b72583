"""Formatters and linters find nothing, and kernels for one set of instructions cannot leak into the others."""

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


def test_the_objects_of_one_set_of_instructions_have_no_weak_symbols() -> None:
    # The linker keeps one copy of a weak symbol for all: an inline function compiled for AVX-512 would run on any CPU.
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    kinds = ("native/CMakeFiles/ei_kernels_*.dir", "models/CMakeFiles/ei_quantizers_*.dir/formats")
    objects = [path for kind in kinds for path in sorted((ROOT / "build").glob(f"{version}-*/{kind}/*.o"))]
    if not objects or shutil.which("nm") is None:
        missing("native", "nm and the objects of a build in build/ are needed: make setup")
    found = subprocess.run(["nm", "-A", "-C", *objects], check=True, capture_output=True, text=True).stdout
    assert [line for line in found.splitlines() if " W " in line or " V " in line or " u " in line] == []
