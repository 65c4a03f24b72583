"""The bits of the engine on this CPU, in every instruction set it has, and on an emulated one of another kind."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dumped_bits import build_dump, built_objects, hashes_of, link_dump
from parts import missing

RECURRENT = 13 + 3 * (4 + 3)  # kernels, and passes of three decoders
LATENT = 4 * 4  # passes of four decoders
NEON_SETS = ["scalar", "neon", "neon_i8mm"]

pytestmark = pytest.mark.timeout(1500)  # it compiles the engine for another CPU, and emulates that


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
    assert len(here["scalar"]) == 19 + 16 + 8 + RECURRENT + LATENT + 4 * (17 + 17 + 17 + 16)
    assert len(set(here["scalar"].values())) == len(here["scalar"])  # a hash of nothing would be one for all
    for isa, hashes in here.items():
        assert hashes == here["scalar"], isa


def test_an_emulated_arm_cpu_gives_the_same_bits(here: dict[str, dict[str, str]]) -> None:
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        missing("qemu", f"{compiler} and {emulator} are needed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    cross = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]
    # As beside a better set: the scalar kernels for two row groups at once run above, and leaving them out saves 40 s.
    program = build_dump("bits-aarch64", *cross, "-DEI_SCALAR_IS_SPARE=ON")
    emulated = [emulator, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", program, "few"]
    with ThreadPoolExecutor(2) as two:
        arm = dict(zip(NEON_SETS, two.map(lambda isa: dump(*emulated, isa), NEON_SETS), strict=True))
    for isa, hashes in arm.items():
        assert hashes.keys() == {isa}
        assert len(hashes[isa]) == 19 + 16 + 8 + RECURRENT + LATENT + 4 * (17 + 5 + 5 + 5)
        assert hashes[isa].items() <= here["scalar"].items(), isa
