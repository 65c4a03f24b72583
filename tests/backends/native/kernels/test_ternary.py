"""Ternary products: exact integers in every instruction set, and the packed bytes that packing.py draws."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from packed_ternary import pack_base_three, pack_two_bit
from tiny_models import quantize

from edgeinfer.backends.native import _core, available_isas
from edgeinfer.backends.native.weights import BASE_THREE
from edgeinfer.models.gguf import GGMLType

# Columns that hold their largest magnitude, 127, are rounded to themselves: what comes out is a sum of integers, exact
# in float32 below 2^24. Scales are powers of two.
ANY_COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
ROWS, TILES = ["I2_S", "I2_S in base three"], ["TQ1_0", "TQ2_0", "TQ1_0 in base three", "TQ2_0 in base three"]


def i2_s(trits: np.ndarray) -> np.ndarray:
    """A matrix as bitnet.cpp stores it, without the scale after it."""
    codes = (trits + 1).astype(np.uint8).reshape(-1, 4, 32)
    return (codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]).reshape(-1)


def tq(format: str, trits: np.ndarray, scale: float) -> np.ndarray:
    """The same by the gguf package."""
    return quantize(format, trits.astype(np.float32) * np.float32(scale)).reshape(-1).view(np.uint8)


def q2_0(trits: np.ndarray) -> np.ndarray:
    """A matrix of Q2_0 with scales of 0.25."""
    codes = (trits + 1).astype(np.uint8).reshape(-1, 16, 4)
    blocks = np.zeros((len(codes), 18), dtype=np.uint8)
    blocks[:, :2] = np.array([0.25], dtype="<f2").view(np.uint8)
    for n in range(4):
        blocks[:, 2:] |= codes[:, :, n] << 2 * n
    return blocks.reshape(-1)


def source_of(format: str, trits: np.ndarray) -> np.ndarray:
    return {"I2_S": i2_s, "Q2_0": q2_0}[format](trits) if format in ("I2_S", "Q2_0") else tq(format, trits, 0.25)


def packed(format: str, trits: np.ndarray) -> _core.PackedMatrix:
    format, _, dense = format.partition(" in ")
    kind = GGMLType[format]
    as_what = BASE_THREE[kind] if dense else None
    return _core.PackedMatrix(int(kind), *trits.shape, source_of(format, trits), 0.25, as_what)


def multiply(matrix: _core.PackedMatrix, n_out: int, x: np.ndarray, isa: str) -> np.ndarray:
    y = np.full((len(x), n_out), np.nan, dtype=np.float32)
    matrix.multiply(isa, x.astype(np.float32), y)
    return y


def product(format: str, trits: np.ndarray, x: np.ndarray, isa: str) -> np.ndarray:
    return multiply(packed(format, trits), len(trits), x, isa)


def integers(rng: np.random.Generator, n: int, n_in: int) -> np.ndarray:
    """Columns of whole numbers in -127..127, with a largest of 127 in each 32."""
    x = rng.integers(-127, 128, (n, n_in))
    x[:, ::32] = 127
    return x


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", [*ROWS, *TILES, "Q2_0"])
@pytest.mark.parametrize("n_out, n_in", [(1, 256), (16, 1280), (37, 2560), (50, 6912)])
def test_a_product_of_integers_is_exact(format: str, isa: str, n_out: int, n_in: int, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (n_out, n_in), dtype=np.int8)
    trits[:, ::256] = 1  # TQ takes its scale from the largest of 256
    matrix = packed(format, trits)
    x = integers(rng, max(ANY_COLUMNS), n_in)
    expected = x @ trits.T.astype(np.float64) * 0.25  # whole numbers below 2^53, which numpy's own product rounds never
    for n in ANY_COLUMNS:
        assert_array_equal(multiply(matrix, n_out, x[:n], isa), expected[:n])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize("n_in", [128, 384, 6912, 8576])
@pytest.mark.parametrize("trit", [-1, 1])
@pytest.mark.parametrize("activation", [-127, 127])
def test_the_largest_sums_do_not_overflow(isa: str, format: str, n_in: int, trit: int, activation: int) -> None:
    """16-bit sums over a whole row would, from 130 inputs on."""
    matrix = packed(format, np.full((20, n_in), trit, dtype=np.int8))
    for n in ANY_COLUMNS:
        x = np.full((n, n_in), activation)
        assert_array_equal(multiply(matrix, 20, x, isa), np.full((n, 20), 0.25 * trit * activation * n_in))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", [*TILES, "Q2_0"])
def test_the_largest_sums_of_a_tile_do_not_overflow(format: str, isa: str) -> None:
    for trit in (-1, 1):
        matrix = packed(format, np.full((20, 6912), trit, dtype=np.int8))
        for n in ANY_COLUMNS:
            x = np.full((n, 6912), -127)
            assert_array_equal(multiply(matrix, 20, x, isa), np.full((n, 20), -0.25 * trit * 127 * 6912))


@pytest.mark.parametrize("n_out, n_in", [(1, 128), (16, 256), (37, 640)])
def test_i2_s_is_packed_as_packing_draws_it(n_out: int, n_in: int, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (n_out, n_in), dtype=np.int8)
    matrix = _core.PackedMatrix(int(GGMLType.I2_S), n_out, n_in, i2_s(trits), 0.37)
    assert_array_equal(matrix.data, pack_two_bit(trits, np.full(n_out, 0.37, dtype=np.float32)).reshape(-1))


@pytest.mark.parametrize("n_out, n_in", [(1, 128), (16, 640), (37, 256)])
def test_base_three_is_packed_as_packing_draws_it(n_out: int, n_in: int, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (n_out, n_in), dtype=np.int8)
    as_what = BASE_THREE[GGMLType.I2_S]
    matrix = _core.PackedMatrix(int(GGMLType.I2_S), n_out, n_in, i2_s(trits), 0.37, as_what)
    drawn = pack_base_three(trits, np.full(n_out, 0.37, dtype=np.float32))
    assert_array_equal(matrix.data, drawn.reshape(-1))
    tiles = rng.integers(-1, 2, (33, 512), dtype=np.int8)
    matrix = _core.PackedMatrix(int(GGMLType.TQ2_0), 33, 512, tq("TQ2_0", tiles, 0.5), 1.0, BASE_THREE[GGMLType.TQ2_0])
    lines = matrix.data.reshape(3, -1)[:, 64:].reshape(3, 2, -1)
    for tile in range(2):
        drawn = pack_base_three(tiles[:, 256 * tile : 256 * tile + 256], np.ones(33, dtype=np.float32))
        assert_array_equal(lines[:2, tile], drawn[:2, 64:])


@pytest.mark.parametrize("isa", available_isas())
def test_every_byte_of_base_three_is_unpacked(isa: str) -> None:
    """Each of the 243 fives of weights, in each of the places of a line."""
    fives = np.stack(np.unravel_index(np.arange(243), (3,) * 5), axis=1).astype(np.int8) - np.int8(1)
    for c in range(4):
        trits = np.zeros((243, 128), dtype=np.int8)
        trits[:, c:20:4] = fives
        x = np.zeros((5, 128))
        x[np.arange(5), c + 4 * np.arange(5)] = 127
        assert_array_equal(product("I2_S in base three", trits, x, isa), 0.25 * 127 * fives.T)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", ["I2_S", "TQ1_0", "TQ2_0"])
def test_both_ways_to_hold_a_weight_give_the_same_bits(format: str, isa: str, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (37, 1280), dtype=np.int8)
    x = rng.standard_normal((9, 1280), dtype=np.float32)
    matrices = [packed(name, trits) for name in (format, f"{format} in base three")]
    for n in ANY_COLUMNS[:9]:
        two, dense = (multiply(matrix, 37, x[:n], isa) for matrix in matrices)
        assert_array_equal(two.view(np.uint32), dense.view(np.uint32))


def test_the_ternary_formats_give_the_same_trits(rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (33, 1024), dtype=np.int8)
    one, two = (
        _core.PackedMatrix(int(GGMLType[format]), 33, 1024, tq(format, trits, 0.5)) for format in ("TQ1_0", "TQ2_0")
    )
    assert_array_equal(one.data, two.data)
    lines = two.data.reshape(3, 2, -1)[:, :, 64:].reshape(3, -1)  # without the scales of each two tiles
    assert_array_equal(lines[:2], pack_two_bit(trits, np.ones(33, dtype=np.float32))[:2, 64:])


def test_tokens_are_rounded_by_their_largest_input_as_bitnet_does(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 256), dtype=np.float32)
    x[1] *= 1e-7  # the scale of a token is at least 1e-5 / 127
    x[2] = 0
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-5))
    codes = np.rint(x * (np.float32(127) / largest))
    y = product("I2_S", np.ones((1, 256), dtype=np.int8), x, "scalar")
    expected = codes.sum(axis=1, keepdims=True) * np.float32(0.25) * (largest / np.float32(127))
    assert_array_equal(y, expected)


def test_a_code_that_is_no_trit_is_found(rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (3, 256), dtype=np.int8)
    for format in ("I2_S", "TQ2_0", "Q2_0"):
        kind, source = int(GGMLType[format]), source_of(format, trits)
        for at in (2, 70, 3 * 64 - 1):
            broken = source.copy()
            assert _core.holds_trits(kind, broken)
            broken[at] |= 3
            assert not _core.holds_trits(kind, broken)
    assert _core.holds_trits(int(GGMLType.TQ1_0), tq("TQ1_0", trits, 1))
