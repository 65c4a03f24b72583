"""Which instruction sets a build has, which of them run, and what is said about the others."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from dumped_bits import built_objects
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.native import _core, available_isas, machine
from edgeinfer.cli import main
from edgeinfer.common.errors import BackendUnavailable

ROOT = Path(__file__).parents[4]
X86 = ["avx512zen4", "avx512vbmi", "avx512vnni", "avx512", "avxvnni", "avx2", "scalar"]
ARM = ["neon_i8mm", "neon", "scalar"]
CROSS = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
ON_X86 = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=x86_64")


def configured(folder: Path, *options: str) -> str:
    """What CMake says when it is asked to compile the engine; it compiles nothing but its own trials."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        missing("compiler", "cmake and a compiler are needed")
    command = ["cmake", "-S", ROOT / "backends", "-B", folder, "-DEI_DUMP_BITS=ON", *options]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    "options, sets",
    [
        ((*ON_X86, "-DEI_SETS=all"), X86),
        ((*ON_X86, "-DEI_SETS=avx2"), ["avx2", "scalar"]),
        ((*ON_X86, "-DEI_SETS=avx2, avx512vnni"), ["avx512vnni", "avx2", "scalar"]),
        ((*ON_X86, "-DEI_SETS=scalar"), ["scalar"]),
        # A CPU that cannot be asked: all are compiled.
        (ON_X86, X86),
        (CROSS, ARM),
        ((*CROSS, "-DEI_SETS=neon"), ["neon", "scalar"]),
        (("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=riscv64"), ["scalar"]),
    ],
)
def test_the_sets_that_are_asked_for_are_compiled(options: tuple[str, ...], sets: list[str], tmp_path: Path) -> None:
    assert f"instruction sets: {', '.join(sets)}\n" in configured(tmp_path, *options)


def test_native_is_the_best_set_of_this_cpu_the_plainest_with_vectors_and_scalar(tmp_path: Path) -> None:
    known = _core.known_isas()
    present = [name for name, _, is_present in known if is_present]
    requested = dict.fromkeys([present[0], *(name for name in ("avx2", "neon") if name in present), "scalar"])
    assert f"instruction sets: {', '.join(requested)}\n" in configured(tmp_path, "-DEI_SETS=native")


@pytest.mark.parametrize("named, wrong", [("avx3", "avx3"), ("avx2,Scalar", "Scalar"), ("all,avx2", "all")])
def test_a_set_that_does_not_exist_is_refused(named: str, wrong: str, tmp_path: Path) -> None:
    said = " ".join(configured(tmp_path, *ON_X86, f"-DEI_SETS={named}").split())
    assert f"EI_SETS names '{wrong}'; it may be native, all, or a list of avx512zen4, " in said


def test_a_build_runs_what_both_it_and_the_cpu_have(tmp_path: Path) -> None:
    """As on another CPU than the one it was compiled on: with none of its sets but scalar, or without the best."""
    compiler = shutil.which("g++")
    kernels = {path.parents[1].name: path for path in built_objects() if path.name == "kernels.cpp.o"}
    if compiler is None or not kernels:
        missing("compiler", "g++ and the objects of a build in build/ are needed: make setup")
    source = (
        '#include "kernels/kernels.h"\n#include <cstdio>\nint main() { for (int i = 0; i < n_instruction_sets; i++) '
    )
    (tmp_path / "list.cpp").write_text(source + "if (instruction_sets[i].can_run()) puts(instruction_sets[i].name); }")
    native = ROOT / "backends" / "native"
    names = {name for name, _, _ in _core.known_isas()}
    for built in (
        {"scalar"},
        {"scalar", *available_isas()[1:]},
        {name for name, is_built, _ in _core.known_isas() if is_built},
    ):
        flags = [f"-DEI_BUILT_{name}={int(name in built)}" for name in names]
        command = [compiler, "-std=c++20", "-I", native, *flags, tmp_path / "list.cpp", native / "kernels" / "isa.cpp"]
        command += [kernels[f"ei_kernels_{name}.dir"] for name in built]
        subprocess.run([*command, "-o", tmp_path / "list"], check=True, capture_output=True)
        listed = subprocess.run([tmp_path / "list"], check=True, capture_output=True, text=True).stdout.split()
        assert listed == [name for name in available_isas() if name in built]


def test_on_an_older_cpu_an_installation_runs_scalar_with_the_same_bits(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-x86_64")
    if platform.machine() != "x86_64" or emulator is None:
        missing("qemu", "an x86-64 CPU and qemu-x86_64 are needed (Debian: qemu-user)")
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")
    ask = [sys.executable, ROOT / "tests" / "support" / "logits_hash.py", path]
    # Without OPENBLAS_CORETYPE, by which numpy would take kernels of OpenBLAS that the older CPU lacks.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    here, there = (
        subprocess.run([*command, *ask], check=True, capture_output=True, text=True, env=environment).stdout.split()
        for command in ([], [emulator, "-cpu", "Nehalem"])
    )
    assert here[0] == available_isas()[0] and there == ["scalar", here[1]]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build with scalar alone on a CPU with AVX2 and without AVX-512."""
    known = [("avx512", False, False), ("avx2", False, True), ("scalar", True, True)]
    monkeypatch.setattr(_core, "known_isas", lambda: known)
    monkeypatch.setattr(_core, "available_isas", lambda: ["scalar"])
    monkeypatch.delenv("EDGEINFER_ISA", raising=False)
    machine.warn_of_better_isa.cache_clear()
    yield
    machine.warn_of_better_isa.cache_clear()


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize(
    "requested, said",
    [
        (
            "avx2",
            "which this CPU has, but which was not compiled into this build; .*EDGEINFER_SETS=all make setup.*scalar",
        ),
        ("avx512", "which this CPU does not have; .*scalar"),
        ("mmx", "no instruction set that edgeinfer knows here; .*scalar"),
    ],
)
def test_a_set_that_cannot_run_is_an_error_that_says_why(
    requested: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_ISA", requested)
    with pytest.raises(BackendUnavailable, match=f"EDGEINFER_ISA={requested}.* {said}"):
        machine.best_isa()


@pytest.mark.usefixtures("moved")
def test_a_better_set_of_this_cpu_is_named_once(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")
    with pytest.warns(
        RuntimeWarning, match="compiled without avx2, which this CPU has, and runs scalar; .*EDGEINFER_SETS=all"
    ):
        edgeinfer.load(path, draft="none").close()
    machine.warn_of_better_isa()  # says nothing: warnings are errors there


@pytest.mark.usefixtures("moved")
def test_devices_lists_what_was_not_compiled() -> None:
    cpu = json.loads(CliRunner().invoke(main, ["devices", "--json"]).stdout)["cpu"]
    assert (cpu["isa"], cpu["isas"], cpu["isas_not_compiled"]) == ("scalar", ["scalar"], ["avx2"])
    assert "not compiled" in CliRunner().invoke(main, ["devices"]).stdout
