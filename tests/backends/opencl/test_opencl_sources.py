"""The kernels through another compiler: for devices that no test machine has."""

import shutil
import subprocess
from pathlib import Path

import pytest
from parts import missing

from edgeinfer.backends.opencl import device as device_module
from edgeinfer.backends.opencl.matrices import FORMATS

SOURCES = Path(device_module.__file__).parent
GROUPS = {"SLICES": 8, "TOKENS": 4, "WIDTH": 16}
HEADS = {"GROUP": 64, "HEAD_DIM": 80, "N_HEADS": 6, "N_KV_HEADS": 2}
PROGRAMS = {
    "check": (["dot.cl", "check.cl"], {}),
    "ternary": (["dot.cl", "ternary.cl"], GROUPS),
    "decoder": (["common.cl", "decoder.cl"], {"GROUP": 64}),
    "attention": (["common.cl", "attention.cl"], HEADS),
    "gate": (["common.cl", "gate.cl"], {"GROUP": 64, "ACTIVATION": 1}),
    "tree": (["common.cl", "tree.cl"], {"GROUP": 64, "TOP": 4}),
    **{type.name: (["dot.cl", "matrix.cl"], GROUPS | format.defines()) for type, format in FORMATS.items()},
}


def compiled(tmp_path: Path, program: str, *options: str) -> str:
    """What clang makes of a program, as text. Any warning is an error."""
    clang = next((found for version in range(20, 14, -1) if (found := shutil.which(f"clang-{version}"))), None)
    if clang is None:
        missing("clang", "clang 15 or newer is needed, which comes with PoCL")
    names, defines = PROGRAMS[program]
    source = tmp_path / "all.cl"
    source.write_text("\n".join((SOURCES / name).read_text() for name in names))
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    command = [clang, "-target", "spir64", "-S", "-emit-llvm", "-Werror", *options, *macros, source, "-o", "-"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_need_neither_doubles_nor_arithmetic_in_halves(program: str, tmp_path: Path) -> None:
    extensions = "-Xclang", "-cl-ext=-cl_khr_fp64,-cl_khr_fp16,-__opencl_c_fp64"
    for standard in ("CL1.2", "CL3.0"):
        text = compiled(tmp_path, program, f"-cl-std={standard}", *extensions, "-DINTEGER_DOT=0")
        assert "spir_kernel" in text and "double" not in text


@pytest.mark.parametrize("program", [name for name, (files, _) in PROGRAMS.items() if "dot.cl" in files])
def test_the_packed_dot_products_compile_for_devices_that_have_them(program: str, tmp_path: Path) -> None:
    features = [
        "-Xclang",
        "-cl-ext=+cl_khr_integer_dot_product",
        "-D__opencl_c_integer_dot_product_input_4x8bit_packed=1",
    ]
    text = compiled(tmp_path, program, "-cl-std=CL3.0", *features, "-DINTEGER_DOT=1")
    floats = program in ("F32", "F16", "BF16")
    assert floats or "dot_4x8packed" in text
