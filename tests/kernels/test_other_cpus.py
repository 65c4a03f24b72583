"""The bits of the engine on this CPU, in every instruction set it has, and on an emulated one of another kind."""

import shutil
import subprocess

import pytest
from dumped_bits import build_dump, hashes_of
from parts import missing

NEON_SETS = {"neon", "neon_i8mm", "scalar"}


def dump(name: str, configure: list[str], run: list[str]) -> dict[str, dict[str, str]]:
    """{instruction set: {what: hash}} of dump_bits, built with these options and run by that command."""
    program = build_dump(name, *configure)
    return hashes_of(subprocess.run([*run, program], check=True, capture_output=True, text=True).stdout.splitlines())


@pytest.fixture(scope="module")
def here() -> dict[str, dict[str, str]]:
    if shutil.which("cmake") is None:
        missing("compiler", "cmake is needed to build the engine without Python")
    return dump("bits", [], [])


def test_every_instruction_set_of_this_cpu_gives_the_same_bits(here: dict[str, dict[str, str]]) -> None:
    assert len(here["scalar"]) == 18 + 7 + 2 * 42
    assert len(set(here["scalar"].values())) == len(here["scalar"])  # a hash of nothing would be one for all
    for isa, hashes in here.items():
        assert hashes == here["scalar"], isa


def test_an_emulated_arm_cpu_gives_the_same_bits(here: dict[str, dict[str, str]]) -> None:
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        missing("qemu", f"{compiler} and {emulator} are needed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    cross = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]
    arm = dump("bits-aarch64", cross, [emulator, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"])
    assert set(arm) == NEON_SETS
    for isa, hashes in arm.items():
        assert hashes == here["scalar"], isa
