"""The bits of the engine on this CPU, in every instruction set it has, and on an emulated one of another kind."""

import shutil
import subprocess
from pathlib import Path

import pytest
from dumped_bits import build_dump, built_objects, hashes_of, link_dump
from parts import missing

NEON_SETS = {"neon", "neon_i8mm", "scalar"}


def dump(*command: str | Path) -> dict[str, dict[str, str]]:
    """{instruction set: {what: hash}} of dump_bits, run by this command."""
    return hashes_of(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    compiler, objects = shutil.which("g++"), built_objects()
    if compiler is None or not objects:
        missing("compiler", "g++ and the objects of a build in build/ are needed: make setup")
    return dump(link_dump(tmp_path_factory.mktemp("bits") / "dump_bits", compiler, objects))


def test_every_instruction_set_of_this_cpu_gives_the_same_bits(here: dict[str, dict[str, str]]) -> None:
    assert len(here["scalar"]) == 19 + 14 + 8 + 4 * (17 + 17 + 17 + 16)
    assert len(set(here["scalar"].values())) == len(here["scalar"])  # a hash of nothing would be one for all
    for isa, hashes in here.items():
        assert hashes == here["scalar"], isa


def test_an_emulated_arm_cpu_gives_the_same_bits(here: dict[str, dict[str, str]]) -> None:
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        missing("qemu", f"{compiler} and {emulator} are needed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    cross = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]
    # Of the scalar kernels, the copies for two row groups at once run above: leaving them out saves 17 s.
    program = build_dump("bits-aarch64", *cross, "-DCMAKE_CXX_FLAGS=-DEI_FEW_AT_ONCE")
    arm = dump(emulator, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", program)
    assert set(arm) == NEON_SETS
    for isa, hashes in arm.items():
        assert hashes == here["scalar"], isa
