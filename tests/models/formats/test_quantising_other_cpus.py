"""The quantisers on an emulated CPU of another kind: the same bytes."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from parts import missing
from quantiser_cases import FORMATS, N_IN, importances, matrices, quantized

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "models" / "formats"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs dump_quantised on an emulated ARM CPU."""
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        missing("qemu", f"{compiler} and {emulator} are needed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    path = str(tmp_path_factory.mktemp("arm") / "dump_quantised")
    sources = [str(Path(__file__).with_name("dump_quantised.cpp")), str(FOLDER / "quantizers.cpp")]
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", f"-I{FOLDER}"]
    names = ["-DQUANTIZERS=quantizers_portable", '-DISA_NAME="portable"']
    subprocess.run([compiler, *options, *names, *sources, "-o", path], check=True, capture_output=True)
    return [emulator, "-L", "/usr/aarch64-linux-gnu", path]


def test_an_emulated_arm_cpu_gives_the_same_bytes(program: list[str]) -> None:
    columns = importances()["some columns unseen"]
    assert columns is not None
    weights = np.concatenate([rows[:1] for rows in matrices().values()])  # emulation is slow
    given = weights.tobytes() + columns.tobytes()
    run = subprocess.run([*program, str(len(weights)), str(N_IN)], input=given, check=True, capture_output=True)
    expected = [quantized(name, weights, of) for name in FORMATS for of in (None, columns)]
    assert run.stdout == np.concatenate(expected).tobytes()
