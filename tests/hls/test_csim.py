"""The C++ of the kernels, compiled here: equal to numpy and to the native engine, and faults are found."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parts import is_there, missing

from edgeinfer.backends.native import _core, available_isas
from edgeinfer.common.errors import BackendUnavailable, BadBoardFolder, InvalidArgument, ShapeError
from edgeinfer.hls import arithmetic, compiler
from edgeinfer.hls.csim import CSimulation, Headers, build_bench, build_kernels, build_program
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.writer import write_folder
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import pack
from edgeinfer.models.gguf import GGMLType

MAX_IN, MAX_OUT = 4096, 300
BASE3, G3X5, TWO_BIT = Geometry("base3", 4, 16), Geometry("g3x5", 16, 4, 3), Geometry("2bit", 4, 64)
SIZES = [(1, 1), (7, 83), (64, 384), (33, 79), (50, 640)]
QUICKLY = ["-O0"]  # it is compiling that takes time
SANITIZED = [*QUICKLY, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if not is_there("compiler"):
        missing("compiler", "there is no C++ compiler")


@pytest.fixture(
    scope="module",
    params=[(BASE3, Headers.OWN), (TWO_BIT, Headers.OWN), (G3X5, Headers.VENDOR)],
    ids=lambda each: f"{each[0].encoding}-{each[1].value}",
)
def simulation(request: pytest.FixtureRequest) -> CSimulation:
    geometry, headers = request.param
    if headers is Headers.VENDOR and compiler.vendor_headers() is None:
        missing("hls4ml", "its headers are not installed: pip install --no-deps hls4ml==1.3.0")
    return CSimulation(geometry, MAX_IN, MAX_OUT, headers, QUICKLY)


def trits_of(rng: np.random.Generator, n_out: int, n_in: int) -> np.ndarray:
    return rng.integers(-1, 2, (n_out, n_in), dtype=np.int8)


def check_product(simulation: CSimulation, trits: np.ndarray, x: np.ndarray) -> None:
    found = simulation.product(pack(trits, simulation.geometry), x, len(trits))
    assert np.array_equal(found, trits.astype(np.int64) @ x.astype(np.int64))


def check_floats(simulation: CSimulation, rng: np.random.Generator, n_out: int, n_in: int) -> None:
    """A linear and a norm of random sizes, by bits. Called by the run with sanitizers too."""
    trits, scales = trits_of(rng, n_out, n_in), rng.standard_normal(n_out).astype(np.float32)
    x = (rng.standard_normal((3, n_in)) * [[1e-7], [1], [1e5]]).astype(np.float32)
    found = simulation.linear(pack(trits, simulation.geometry), scales, x)
    assert np.array_equal(found.view(np.uint32), arithmetic.linear(trits, scales, x).view(np.uint32))
    weight = rng.standard_normal(n_in).astype(np.float32)
    q, q_scales = arithmetic.quantise(arithmetic.rms_norm(x, weight, 1e-5))
    found_q, found_scales = simulation.norm(x, weight, 1e-5)
    assert np.array_equal(found_q, q) and np.array_equal(found_scales, q_scales)


def test_products_are_exact(simulation: CSimulation, rng: np.random.Generator) -> None:
    for n_out, n_in in SIZES:
        x = rng.integers(-128, 128, n_in, dtype=np.int8)
        check_product(simulation, trits_of(rng, n_out, n_in), x)
    for trit in (-1, 1):  # 4,096 * 128 overflows 20 bits
        check_product(simulation, np.full((3, 4096), trit, dtype=np.int8), np.full(4096, -128, dtype=np.int8))


def test_linears_and_norms_have_the_bits_of_numpy(simulation: CSimulation, rng: np.random.Generator) -> None:
    for n_out, n_in in SIZES:
        check_floats(simulation, rng, n_out, n_in)


def test_a_linear_has_the_bits_of_the_native_engine(simulation: CSimulation, rng: np.random.Generator) -> None:
    trits = trits_of(rng, 37, 640)
    codes = (trits + 1).astype(np.uint8).reshape(-1, 4, 32)
    i2_s = (codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]).reshape(-1)
    x = (rng.standard_normal((4, 640)) * [[1e-9], [0.3], [1], [1e6]]).astype(np.float32)
    x[1, :8] = [0.5, -0.5, 1.5, -1.5, 2.5, 0, -0.0, 127]  # ties, at an inverse of 1
    native = np.empty((4, 37), dtype=np.float32)
    _core.PackedMatrix(int(GGMLType.I2_S), 37, 640, i2_s, 0.37, None).multiply(available_isas()[0], x, native)
    found = simulation.linear(pack(trits, simulation.geometry), np.full(37, 0.37, dtype=np.float32), x)
    assert np.array_equal(found.view(np.uint32), native.view(np.uint32))


def test_a_norm_is_within_a_millionth(rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((3, 2561)).astype(np.float32), rng.standard_normal(2561).astype(np.float32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.abs(arithmetic.rms_norm(x, weight, 1e-5) / exact - 1).max() < 1e-6


def test_what_does_not_fit_is_refused(simulation: CSimulation) -> None:
    stream = pack(np.ones((5, 81), dtype=np.int8), simulation.geometry)
    x = np.ones((1, 81), dtype=np.float32)
    assert simulation.hash == simulation.geometry.hash()
    with pytest.raises(ShapeError, match="bytes of weights"):
        simulation.product(stream[:-48], x[0].astype(np.int8), 5)
    with pytest.raises(InvalidArgument, match="larger max_in or max_out"):
        simulation.product(stream, np.ones(MAX_IN + 1, dtype=np.int8), 5)
    with pytest.raises(BadBoardFolder, match="packed for geometry 00000000000000ff"):
        simulation.linear(stream, np.ones(5, dtype=np.float32), x, "00000000000000ff")
    with pytest.raises(InvalidArgument, match=r"found \(5, 0\)"):
        simulation.product(stream[:0], x[0, :0].astype(np.int8), 5)


@pytest.mark.parametrize("n_in, n_out", [(0, 5), (5, 0), (-1, 5), (MAX_IN + 1, 5)])
def test_the_top_refuses_sizes_itself(
    simulation: CSimulation, n_in: int, n_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may ask for anything; without inputs the stages would wait for each other for ever."""
    monkeypatch.setattr(simulation, "_check", lambda *sizes: None)
    called = simulation._call

    def with_sizes(name: str, *arguments: object) -> None:
        called(name, *arguments[:4], 1, n_in, n_out, *arguments[7:])

    monkeypatch.setattr(simulation, "_call", with_sizes)
    stream = pack(np.ones((5, 81), dtype=np.int8), simulation.geometry)
    x = np.ones((1, MAX_IN + 1), dtype=np.float32)
    with pytest.raises(InvalidArgument, match="it ended with status 3"):
        simulation.linear(stream, np.ones(5, dtype=np.float32), x)


def test_own_types_compute_what_those_of_the_vendor_do() -> None:
    if compiler.vendor_headers() is None:
        missing("hls4ml", "its headers are not installed: pip install --no-deps hls4ml==1.3.0")
    source = [compiler.FOLDER / "tb" / "tb_types.cpp"]
    programs = [build_program(source, headers, flags=QUICKLY) for headers in Headers]
    own, vendor = (subprocess.run([each], check=True, capture_output=True, text=True).stdout for each in programs)
    assert own.count("\n") > 3900 and own == vendor


def test_gearbox_and_tables_are_clean_under_sanitizers(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_there("asan"):
        missing("asan", "g++ is needed to build with sanitizers")
    monkeypatch.setenv("CXX", "g++")
    build_kernels(G3X5, MAX_IN, MAX_OUT, flags=SANITIZED)
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    variables = {
        "LD_PRELOAD": library.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run([sys.executable, __file__], env=os.environ | variables, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "clean\n", run.stderr[-4000:]


# ---- the test bench, on an exported folder ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("board"), np.random.default_rng(5)
    write_folder(path, BASE3, {name: (trits_of(rng, *SIZES[1]), 0.5) for name in ("layers.0.o", "layers.1.o")})
    return path


@pytest.fixture(scope="module")
def bench(exported: Path) -> Path:
    return build_bench(BoardFolder.open(exported), flags=QUICKLY)


def bench_of(bench: Path, *arguments: object) -> tuple[int, str]:
    run = subprocess.run([bench, *map(str, arguments)], capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def test_the_bench_counts_all_rows_of_a_folder(bench: Path, exported: Path) -> None:
    assert bench_of(bench, exported) == (0, f"csim rows={2 * 3 * 7} mismatches=0\n")


FAULTS = {
    "weight": "row 0 differs for 3 of 3 tokens, and 1 rows in all: the weights are not those of the golden vectors",
    "golden": "row 0 differs for 1 of 3 tokens, and 1 rows in all: a golden value is not the product",
    "geometry": "wrong geometry: the weights are packed for",
    "short": "short file: weights of layers.0.o must have 256 bytes: found 255",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_bench_finds_a_fault_that_it_makes(bench: Path, exported: Path, kind: str) -> None:
    status, text = bench_of(bench, exported, "--mutate", kind)
    assert status == (1 if kind in ("weight", "golden") else 2) and FAULTS[kind] in text


def changed_byte(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def changed_hash(path: Path) -> None:
    facts = json.loads(path.read_text())
    facts["geometry"]["hash"] = "0123456789abcdef"
    path.write_text(json.dumps(facts))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights.0.bin": (lambda path: changed_byte(path, 0, 1), "the weights are not those of the golden vectors"),
    "weights.3.bin": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "short file: "),
    "golden/layers.1.o.y.bin": (lambda path: changed_byte(path, 4, 1), "a golden value is not the product"),
    "golden/layers.1.o.x.bin": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "short file: "),
    "manifest.json": (changed_hash, "wrong geometry: the weights are packed for 0123456789abcdef"),
    "weights.1.bin": (lambda path: changed_byte(path, 3, 0x80), "weights of layers.0.o are damaged: index"),
}


@pytest.mark.parametrize("file", FILES)
def test_the_bench_finds_a_fault_of_a_file(bench: Path, exported: Path, file: str, tmp_path: Path) -> None:
    change, message = FILES[file]
    folder = shutil.copytree(exported, tmp_path / "board")
    change(folder / file)
    status, text = bench_of(bench, folder)
    assert status != 0 and message in text


# ---- the compiler ----------------------------------------------------------------------------------------------------


def test_a_compiler_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendUnavailable, match="found neither g\\+\\+ nor clang\\+\\+"):
        CSimulation(BASE3)


def test_what_the_compiler_says_is_told(tmp_path: Path) -> None:
    (tmp_path / "wrong.cpp").write_text("int main() { return nothing; }")
    with pytest.raises(BackendUnavailable, match="nothing"):
        build_program([tmp_path / "wrong.cpp"])


def main() -> None:
    """What runs under the sanitizers, in a process of its own."""
    rng = np.random.default_rng(0)
    simulation = CSimulation(G3X5, MAX_IN, MAX_OUT, flags=SANITIZED)
    for n_out, n_in in [*SIZES, (MAX_OUT, 12), (3, MAX_IN)]:
        check_floats(simulation, rng, n_out, n_in)
        check_product(simulation, trits_of(rng, n_out, n_in), rng.integers(-128, 128, n_in, dtype=np.int8))
    print("clean")


if __name__ == "__main__":
    main()


def test_a_header_of_somebody_else_is_not_compiled(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "out"))
    text = (folder / "edgeinfer_model.h").read_text()
    (folder / "edgeinfer_model.h").write_text(text.replace("EI_ROWS 4", "EI_ROWS 5"))
    with pytest.raises(BadBoardFolder, match=r"edgeinfer_model\.h: disagrees with manifest\.json"):
        build_bench(BoardFolder.open(folder))
