"""What a wheel must hold: it is built here without compiling, from a copy of the tree."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import files
from pathlib import Path

import pytest
from parts import missing

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
BUILD = "from scikit_build_core.build import build_wheel; build_wheel('out', {'wheel.cmake': 'false'})"
FOR_THE_COMPILER = {".cpp", ".h", ".txt", ".cmake"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Of the files in the wheel."""
    if importlib.util.find_spec("scikit_build_core") is None:
        missing("dev", "scikit-build-core is not installed")
    tree = tmp_path_factory.mktemp("tree")
    for folder in {*PACKAGES.values()}:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, capture_output=True)
    (wheel,) = (tree / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def in_the_tree() -> set[str]:
    """Names, as in a wheel, of the files of the packages that were not compiled. Those of hls are what is used."""
    found = set()
    for package, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            if path.is_file() and "__pycache__" not in inside.parts and path.suffix != ".so":
                found.add(f"{package}/{inside.as_posix()}")
    return {name for name in found if Path(name).suffix not in FOR_THE_COMPILER or name.startswith("edgeinfer/hls/")}


def test_a_wheel_has_the_files_of_the_packages_and_nothing_else(names: set[str]) -> None:
    assert names == in_the_tree()


def test_a_wheel_has_every_kernel_that_the_code_names(names: set[str]) -> None:
    folder = ROOT / PACKAGES["edgeinfer/backends"] / "opencl"
    constants = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    named = {node.value for node in constants if isinstance(node, ast.Constant) and str(node.value).endswith(".cl")}
    assert len(named) >= 4 and {f"edgeinfer/backends/opencl/{name}" for name in named} <= names


def test_types_are_announced(names: set[str]) -> None:
    assert "edgeinfer/py.typed" in names


@pytest.mark.parametrize(
    "folder, name",
    [
        ("edgeinfer/backends/native", "_core"),
        ("edgeinfer/models", "_strings"),
        ("edgeinfer/models/gguf_reader", "_mapped"),
        ("edgeinfer/models/formats", "_quantize"),
        ("edgeinfer", "_sampler"),
    ],
)
def test_an_extension_is_installed_with_its_types(folder: str, name: str) -> None:
    installed = {Path(file).name for file in files("edgeinfer") or () if Path(file).parent == Path(folder)}
    assert f"{name}.pyi" in installed
    assert any(file.startswith(f"{name}.") and file.endswith((".so", ".pyd")) for file in installed)
