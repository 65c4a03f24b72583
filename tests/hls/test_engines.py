"""The Verilog engines in Verilator: exact products, and exactly the cycles of the model."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from parts import is_there, missing

from edgeinfer.common.errors import BackendUnavailable, InvalidArgument, ShapeError, SimulationError
from edgeinfer.hls.cycles import cycles
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import pack
from edgeinfer.hls.simulation import build
from edgeinfer.hls.simulation import engine as simulated
from edgeinfer.hls.simulation.engine import Engine
from edgeinfer.hls.stalls import Stalls

if not is_there("verilator"):
    missing("verilator", "verilator is not installed: apt install verilator")

TOPS = sorted(top for top in build.TOPS.values() if (build.RTL / f"{top}.sv").exists())
SMALL = Geometry("base3", 2, 2, 1)
WIDE = Geometry("base3", 4, 16)
LUTS = Geometry("g3x5", 10, 4, 1)  # a RAM of seven rows, and three of one
ADDERS = Geometry("2bit", 2, 4, 1)
STALLS = [None, Stalls(0.5, 0.3, 0.2, seed=1), Stalls(0.9, 0.0, 0.9, seed=2), Stalls(0.0, 0.9, 0.0, seed=3)]
STALLS += [Stalls(w=0.5, seed=seed, length=600) for seed in (2, 10)]  # beats of several steps come at once


@functools.cache
def engine_of(geometry: Geometry) -> Engine:
    return Engine(geometry, 4096, 1024)


def case(geometry: Geometry, n_out: int, n_in: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Activations, the stream of weights, and the product."""
    rng = np.random.default_rng(seed)
    trits = rng.integers(-1, 2, (n_out, n_in)).astype(np.int8)
    x = rng.integers(-128, 128, (1, n_in)).astype(np.int8)
    return x, pack(trits, geometry), x.astype(np.int32) @ trits.astype(np.int32).T


@pytest.mark.parametrize("geometry", [SMALL, WIDE, LUTS, ADDERS], ids=str)
def test_products_are_exact_and_take_the_cycles_of_the_model(geometry: Geometry) -> None:
    """48 shapes in all: one input, one tile, steps of 1 to 4 tiles, where totals must not overtake, and more."""
    rows, inputs = geometry.rows, geometry.step_inputs
    shapes = [
        (1, 1),
        (rows, inputs + 1),
        (rows + 1, 4 * inputs - 2),
        (3 * rows - 1, 3 * inputs),
        (4 * rows, 5 * inputs),
    ]
    shapes += [(17 * rows, 2 * inputs - 1), (40 * rows, 1), (rows * 244, 3 * inputs), (rows * 245, 2 * inputs)]
    shapes += [(4 * rows, 5 * inputs), (rows * 2, 9 * inputs), (rows * 5 - 1, 8 * inputs), (rows * 100, 3 * inputs + 1)]
    for n_out, n_in in [(min(n_out, 1024), n_in) for n_out, n_in in shapes]:
        x, stream, wanted = case(geometry, n_out, n_in, n_out + n_in)
        for stalls in STALLS:
            y, took = engine_of(geometry).product(x, stream, n_out, stalls)
            assert np.array_equal(y, wanted), (n_out, n_in, stalls)
            assert took == [cycles(geometry, n_in, n_out, stalls)], (n_out, n_in, stalls)


@pytest.mark.parametrize("geometry", [SMALL, LUTS, ADDERS], ids=str)
@pytest.mark.parametrize("weight", [-1, 1])
def test_totals_are_as_wide_as_the_largest_sum(geometry: Geometry, weight: int) -> None:
    """4,096 inputs of -128 with weights -1 make 2^19, which needs 21 bits."""
    trits = np.full((3, 4096), weight, dtype=np.int8)
    x = np.stack([np.full(4096, value, dtype=np.int8) for value in (-128, 127, 0)])
    y, _ = engine_of(geometry).product(x, pack(trits, geometry), 3)
    assert y.tolist() == [[weight * 4096 * value] * 3 for value in (-128, 127, 0)]


def test_a_flipped_weight_changes_the_product() -> None:
    x, stream, wanted = case(WIDE, 9, 200, 1)
    x[0, 80] = 99  # of the lowest digit of byte 0 of step 1, tile 1
    stream[64 * 4] ^= 1
    assert not np.array_equal(engine_of(WIDE).product(x, stream, 9)[0][0, 4:], wanted[0, 4:])


def test_c_code_can_call_the_engine() -> None:
    x, stream, wanted = case(SMALL, 5, 33, 4)
    engine, y = engine_of(SMALL), np.zeros(5, dtype=np.int32)
    pointer, size = ctypes.c_void_p, ctypes.c_int32
    product = ctypes.CFUNCTYPE(ctypes.c_int64, pointer, pointer, size, pointer, size, pointer)(engine.product_function)
    took = product(engine.handle, x.ctypes.data, 33, stream.ctypes.data, 5, y.ctypes.data)
    assert np.array_equal(y, wanted[0]) and took == cycles(SMALL, 33, 5)


def test_what_does_not_fit_is_refused() -> None:
    x, stream, _ = case(SMALL, 5, 33, 5)
    engine = engine_of(SMALL)
    with pytest.raises(ShapeError, match=r"\(5, 33\) must have a stream of \d+ bytes: found uint8 \(\d+,\); it is cut"):
        engine.product(x, stream[:-16], 5)
    with pytest.raises(ShapeError, match=r"1\.\.1024 outputs: found \(1, 33\) and 1025"):
        engine.product(x, stream, 1025)
    with pytest.raises(InvalidArgument, match="found 0 inputs"):
        Engine(SMALL, 0, 1)


def test_an_engine_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And works again afterwards."""
    x, stream, wanted = case(SMALL, 5, 33, 6)
    with monkeypatch.context() as patch:
        patch.setattr(simulated, "_PATIENCE", 0)
        with pytest.raises(SimulationError, match=r"\(5, 33\) on Geometry.*the engine hangs"):
            engine_of(SMALL).product(x, stream, 5, Stalls(0.1))
    assert np.array_equal(engine_of(SMALL).product(x, stream, 5)[0], wanted)


@pytest.mark.parametrize("geometry", [SMALL, LUTS, ADDERS], ids=str)
def test_a_reset_in_the_middle_of_a_product_leaves_nothing_of_it(
    geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither activations whose weights are missing, nor results that nobody takes. A reset of one cycle."""
    with monkeypatch.context() as patch:
        for stalls in (Stalls(w=0.999, seed=1), Stalls(y=0.999, seed=2)):
            patch.setattr(simulated, "_PATIENCE", 0.001)
            x, stream, _ = case(geometry, 500, 100, 8)
            with pytest.raises(SimulationError, match="the engine hangs"):
                engine_of(geometry).product(x, stream, 500, stalls)
            x, stream, wanted = case(geometry, 20, 100, 9)
            y, took = engine_of(geometry).product(x, stream, 20)
            assert np.array_equal(y, wanted) and took == [cycles(geometry, 100, 20)]


def test_totals_that_overtake_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The assertion fails in an engine whose steps of few tiles do not pause."""
    shutil.copytree(build.RTL, tmp_path / "rtl")
    sequencer = tmp_path / "rtl" / "ei_sequencer.sv"
    pause = "pause <= 3'b111"
    assert pause in sequencer.read_text()
    sequencer.write_text(sequencer.read_text().replace(pause, "pause <= 3'b000"))
    monkeypatch.setattr(build, "RTL", tmp_path / "rtl")
    geometry = Geometry("base3", 1, 1, 1)
    x, stream, _ = case(geometry, 1, 2000, 7)
    with pytest.raises(SimulationError, match="an assertion in the Verilog failed"):
        Engine(geometry, 2000, 1).product(x, stream, 1, Stalls(w=0.997, seed=1))


def test_without_verilator_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="needs verilator, which is not installed: apt install verilator"):
        Engine(SMALL, 4096, 1024)


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("values", ["", "-GROWS=8 -GTABLES=2 -GMAX_STEPS=1 -GMAX_TILES=1", "-GROWS=19 -GACC_BITS=15"])
def test_verilator_has_no_warning(top: str, values: str) -> None:
    command = ["verilator", "--lint-only", "-Wall", "-y", build.RTL, "--top-module", top, *values.split()]
    done = subprocess.run([*command, build.RTL / f"{top}.sv"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("value, said", [("ACC_BITS=11", "the sum of one step"), ("TABLES=6", "a power of two")])
def test_engines_refuse_parameters_that_would_give_wrong_sums(value: str, said: str) -> None:
    for top in TOPS:
        command = ["verilator", "--lint-only", "-y", build.RTL, "--top-module", top, f"-G{value}"]
        done = subprocess.run([*command, build.RTL / f"{top}.sv"], capture_output=True, text=True)
        assert done.returncode != 0 and said in done.stderr, done.stderr


@pytest.mark.parametrize("top", TOPS)
def test_icarus_reads_the_engines(top: str, tmp_path: Path) -> None:
    if not is_there("iverilog"):
        missing("iverilog", "iverilog is not installed: apt install iverilog")
    command = ["iverilog", "-g2012", "-Wall", "-y", build.RTL, "-Y", ".sv", "-s", top, "-o", tmp_path / "engine"]
    done = subprocess.run([*command, build.RTL / f"{top}.sv"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
