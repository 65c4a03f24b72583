"""How the peer is compiled on a CPU with AMX, where its own products crash."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import peer_build
import pytest
from parts import missing
from peer import llama_cpp_crashes
from peer_build import cmake_args, has_amx
from tiny_models import write_tiny_model

SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu avx512_vnni amx_bf16 amx_tile amx_int8 flush_l1d\n"
NO_AMX = "processor\t: 0\nflags\t\t: fpu avx2\nbugs\t\t: amx_int8\n"
SOURCE = "#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)\ncrash\n#endif\n"


@pytest.fixture
def gcc() -> str:
    found = shutil.which("gcc")
    if found is None or subprocess.run([found, "-march=sapphirerapids", "-E", "-x", "c", "/dev/null"]).returncode:
        missing("compiler", "no GCC that knows a CPU with AMX")
    return found


def test_amx_is_left_out_where_the_cpu_has_it(gcc: str) -> None:
    expected = "-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"
    assert cmake_args(SAPPHIRE_RAPIDS, "", gcc) == expected
    assert cmake_args(SAPPHIRE_RAPIDS, "-DGGML_CUDA=OFF", gcc) == f"-DGGML_CUDA=OFF {expected}"
    for cpuinfo in (NO_AMX, "", "Features : asimd i8mm\n"):
        assert cmake_args(cpuinfo, "", gcc) == ""
        assert cmake_args(cpuinfo, "-DX=Y", gcc) == "-DX=Y"
    assert cmake_args(SAPPHIRE_RAPIDS, "", "no-such-compiler") == ""


def test_the_flag_takes_out_what_ggml_compiles_for_amx(gcc: str) -> None:
    """The condition is that of ggml-cpu/amx/mmq.cpp. Flags of CMake come before -march, which must not matter."""

    def compiled(*flags: str) -> bool:
        run = subprocess.run([gcc, *flags, "-E", "-x", "c", "-"], input=SOURCE, capture_output=True, text=True)
        return "crash" in run.stdout

    assert compiled("-march=sapphirerapids")
    assert not compiled("-mno-amx-int8", "-march=sapphirerapids")


def test_a_peer_that_crashes_is_found(llama_cpp: ModuleType, tmp_path: Path) -> None:
    assert has_amx(SAPPHIRE_RAPIDS) and not has_amx(NO_AMX)
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")
    assert not llama_cpp_crashes(path)
    path.write_bytes(path.read_bytes()[:-100_000])
    assert llama_cpp_crashes(path)


def test_it_can_be_called_by_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DA=B")
    run = subprocess.run([sys.executable, peer_build.__file__], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("-DA=B") and run.stdout.count("\n") == 1
    assert Path(peer_build.__file__).name == "peer_build.py"
