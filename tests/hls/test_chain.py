"""From an exported folder and no other files: all implementations give the golden sums, and each finds every fault."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fpga_chain import Cells, ChainError, Cpu, CSim, Implementation, Numpy, Rtl, compared, exported
from parts import is_there, missing
from ternary_shapes import Shapes, write_ternary_model

from edgeinfer.backends.native import available_isas
from edgeinfer.exporters.fpga.doctor import faults_in
from edgeinfer.hls.compiler import vendor_headers
from edgeinfer.hls.csim import Headers, build_bench
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.geometry import Geometry

SHAPES = Shapes(9, 1, 1, 2, 13)  # products (6, 9), (9, 2), (26, 9), (9, 13): no whole steps, no whole tiles
MOST_IN, MOST_OUT, SUMS, VECTORS = 13, 26, 50, 6
SMALL = Geometry("base3", 4, 2)
MUTATIONS = ("weight", "golden", "geometry", "short")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Geometry, Path]:
    path = tmp_path_factory.mktemp("chain")
    model = write_ternary_model(path / "m.gguf", SHAPES, 3)
    geometries = (SMALL, Geometry("g3x5", 8, 4), Geometry("2bit", 4, 4))
    return {each: exported(model, each, path / each.encoding, VECTORS) for each in geometries}


def mutated(folder: Path, mutation: str, out: Path) -> Path:
    """A copy with one fault: another weight, another golden sum, the hash of another engine, or a file cut short."""
    shutil.copytree(folder, out)
    if mutation == "weight":
        change(out / "weights.0.bin", 0, lambda byte: byte ^ (1 if byte ^ 1 < 243 else 2))
    elif mutation == "golden":
        change(out / "golden" / "layers.0.qkv.y.bin", 4, lambda byte: byte ^ 1)
    elif mutation == "geometry":
        text = (out / "manifest.json").read_text()
        (out / "manifest.json").write_text(text.replace(SMALL.hash(), SMALL.hash()[::-1]))
    else:
        cut = out / "weights.3.bin"
        cut.write_bytes(cut.read_bytes()[:8])
    return out


def change(path: Path, at: int, to: Callable[[int], int]) -> None:
    data = bytearray(path.read_bytes())
    data[at] = to(data[at])
    path.write_bytes(data)


def check(implementation: Implementation, folder: Path, tmp_path: Path, vectors: int = VECTORS) -> None:
    """The golden sums, and what each fault is called."""
    name = implementation.name
    assert compared(folder, implementation, vectors) == (4, vectors * SUMS)
    if implementation.geometry != SMALL:
        return
    messages = {
        "weight": f"{name}: layers.0.qkv: vector 0, row 0 gives .*: the golden file has",
        "golden": rf"{name}: layers.0.qkv: vector 0, row 1 gives .*; 1 of {vectors * 6} sums differ",
        "geometry": f"{name}: this engine has the geometry {SMALL.hash()}: the files .* for {SMALL.hash()[::-1]}",
        "short": f"{name}: layers.0.qkv: .*must (take|have).* bytes.*: found",
    }
    for mutation in MUTATIONS:
        with pytest.raises(ChainError, match=messages[mutation]):
            compared(mutated(folder, mutation, tmp_path / mutation), implementation, vectors)


def test_numpy_and_the_kernels_of_the_cpu(folders: dict[Geometry, Path], tmp_path: Path) -> None:
    for geometry, folder in folders.items():
        check(Numpy(geometry), folder, tmp_path / geometry.encoding)
        for isa in available_isas():
            for base_three in (False, True):
                kernel = Cpu(geometry, isa, base_three)
                check(kernel, folder, tmp_path / geometry.encoding / kernel.name)


@pytest.mark.parametrize("headers", Headers)
def test_the_c_simulation(headers: Headers, folders: dict[Geometry, Path], tmp_path: Path) -> None:
    if not is_there("compiler"):
        missing("compiler", "there is no C++ compiler")
    if headers is Headers.VENDOR and vendor_headers() is None:
        missing("hls4ml", "its headers are not installed: pip install --no-deps hls4ml==1.3.0")
    check(CSim(SMALL, MOST_IN, MOST_OUT, headers, ["-O0"]), folders[SMALL], tmp_path)


def test_the_verilog(folders: dict[Geometry, Path], tmp_path: Path) -> None:
    if not is_there("verilator"):
        missing("verilator", "it is not installed: apt install verilator g++")
    for geometry, folder in list(folders.items())[:2]:  # each takes seconds to compile
        check(Rtl(geometry, MOST_IN, MOST_OUT), folder, tmp_path)


def test_the_netlist(folders: dict[Geometry, Path], tmp_path: Path) -> None:
    for part in ("pyosys", "iverilog"):
        if not is_there(part):
            missing(part, "netlists are made by pyosys and simulated by Icarus")
    check(Cells(SMALL, MOST_IN, MOST_OUT, tmp_path / "netlist"), folders[SMALL], tmp_path, vectors=1)


def test_the_test_bench_in_c(folders: dict[Geometry, Path], tmp_path: Path) -> None:
    if not is_there("compiler"):
        missing("compiler", "there is no C++ compiler")
    bench = build_bench(BoardFolder.open(folders[SMALL]), flags=["-O0"])

    def run(folder: Path) -> tuple[int, str]:
        done = subprocess.run([bench, folder], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert run(folders[SMALL]) == (0, f"csim rows={VECTORS * SUMS} mismatches=0\n")
    said = {
        "weight": (1, "layers.0.qkv: row 0 differs"),
        "golden": (1, f"row 1 differs for 1 of {VECTORS} tokens, and 1 rows in all: a golden value is not the product"),
        "geometry": (2, "wrong geometry: the weights are packed for"),
        "short": (2, "short file: "),
    }
    for mutation, (status, text) in said.items():
        found = run(mutated(folders[SMALL], mutation, tmp_path / mutation))
        assert found[0] == status and text in found[1], (mutation, found)


def test_the_doctor_of_folders(folders: dict[Geometry, Path], tmp_path: Path) -> None:
    assert all(list(faults_in(folder)) == [] for folder in folders.values())
    said = {
        "weight": ["weights.0.bin: sha256 must be", "golden vector 0 of layers.0.qkv, row 0: the weights give"],
        "golden": ["layers.0.qkv.y.bin: sha256 must be", "golden vector 0 of layers.0.qkv, row 1: the weights give"],
        "geometry": [f"the geometry hash must be {SMALL.hash()}"],
        "short": ["weights.3.bin: must have .* bytes: found .*; it is cut short"],
    }
    for mutation, texts in said.items():
        found = list(faults_in(mutated(folders[SMALL], mutation, tmp_path / mutation)))
        for text in texts:
            assert any(re.search(text, fault) for fault in found), (mutation, text, found)
