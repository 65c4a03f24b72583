"""Each weight format against plain arithmetic, and each instruction set against the other."""

import itertools

import numpy as np
import pytest
from tiny_models import quantize

from edgeinfer.backends.native import _core, available_isas
from edgeinfer.backends.native.tuning import Prefetch
from edgeinfer.backends.native.weights import BASE_THREE
from edgeinfer.backends.reference import round_activations
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType

BLOCKS = {"F32": 1, "F16": 1, "BF16": 1, "Q8_0": 32, "Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "MXFP4": 32}
BLOCKS |= {"Q2_K": 256, "Q3_K": 256, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256, "TQ1_0": 256, "TQ2_0": 256}
BLOCKS |= {"I2_S": 128, "Q2_0": 64}
BLOCKS |= {"TQ1_0 in base three": 256, "I2_S in base three": 128}
FORMATS = list(BLOCKS)


def packed(format: str, weights: np.ndarray) -> tuple[_core.PackedMatrix, np.ndarray]:
    """The matrix as the engine has it, and its weights as float32."""
    format, _, dense = format.partition(" in ")
    data = np.ascontiguousarray(quantize(format, weights)).reshape(-1).view(np.uint8)
    kind = GGMLType[format]
    floats = dequantize(kind, data, weights.shape)
    scale = 1.0
    if format == "I2_S":  # whose scale stands after the rows
        data, tail = data[:-I2_S_TAIL_BYTES], data[-I2_S_TAIL_BYTES:]
        scale = float(tail.view("<f4")[0])
    as_what = BASE_THREE[kind] if dense else None
    return _core.PackedMatrix(int(kind), *weights.shape, data, scale, as_what), floats


def multiply(
    matrix: _core.PackedMatrix, isa: str, x: np.ndarray, n_out: int, stream: Prefetch | None = None
) -> np.ndarray:
    y = np.full((len(x), n_out), np.nan, dtype=np.float32)
    matrix.multiply(isa, x, y, stream)
    return y


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n_out, n_blocks", [(1, 1), (16, 2), (33, 3), (250, 5)])
def test_a_product_equals_plain_arithmetic(format: str, n_out: int, n_blocks: int, rng: np.random.Generator) -> None:
    block = BLOCKS[format]
    n_in = n_blocks * max(block, 7)  # float formats: lengths that are no multiple of anything
    n_in -= n_in % block
    matrix, weights = packed(format, rng.standard_normal((n_out, n_in), dtype=np.float32))
    x = rng.standard_normal((5, n_in), dtype=np.float32)
    seen = x if block == 1 else round_activations(x, {"I2_S": n_in, "Q2_0": 32}.get(format.split()[0], block))
    expected = seen.astype(np.float64) @ weights.astype(np.float64).T
    # Only the sums over blocks are rounded, to float32: a few ulp of the largest partial sum.
    tolerance = 4e-7 * (np.abs(seen).astype(np.float64) @ np.abs(weights).astype(np.float64).T)
    y = multiply(matrix, "scalar", x, n_out)
    assert np.all(np.abs(y - expected) <= tolerance)


@pytest.mark.parametrize("isa", [isa for isa in available_isas() if isa != "scalar"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_instruction_set_gives_the_same_bits(format: str, isa: str, rng: np.random.Generator) -> None:
    for n_out, n_in in [(1, 256), (48, 512), (37, 2304)]:
        matrix, _ = packed(format, rng.standard_normal((n_out, n_in), dtype=np.float32))
        x = rng.standard_normal((9, n_in), dtype=np.float32) * np.float32(10) ** rng.integers(-6, 6, (9, 1))
        x = x.astype(np.float32)
        np.testing.assert_array_equal(
            multiply(matrix, "scalar", x, n_out).view(np.uint32), multiply(matrix, isa, x, n_out).view(np.uint32)
        )


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", FORMATS)
def test_a_column_does_not_depend_on_how_many_there_are(format: str, isa: str, rng: np.random.Generator) -> None:
    matrix, _ = packed(format, rng.standard_normal((40, 768), dtype=np.float32))
    x = rng.standard_normal((19, 768), dtype=np.float32)
    alone = np.concatenate([multiply(matrix, isa, x[i : i + 1], 40) for i in range(len(x))])
    for n in range(1, len(x) + 1):
        np.testing.assert_array_equal(multiply(matrix, isa, x[:n], 40).view(np.uint32), alone[:n].view(np.uint32))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", FORMATS)
def test_how_a_matrix_is_read_changes_no_bits(format: str, isa: str, rng: np.random.Generator) -> None:
    n_out = 90  # six row groups: four at once and two that are left, the last one not whole
    matrix, _ = packed(format, rng.standard_normal((n_out, 768), dtype=np.float32))
    x = rng.standard_normal((11, 768), dtype=np.float32)
    x[1] *= 1e4  # products with scales do not fit into 16 bits
    x = x.astype(np.float32)
    x[2, 5] = np.inf  # which must not get into another column
    alone = np.concatenate([multiply(matrix, isa, x[i : i + 1], n_out) for i in range(len(x))])
    reach = itertools.cycle(itertools.product((0, 2048, 32768), (0, 1, 2), (True, False)))
    for at_once, columns, n in itertools.product((1, 2, 4), range(1, 9), (1, 2, 3, 4, 5, 7, 8, 9, 11)):
        # At least so many: 1 and n - 1 stand for all below n, which ask for nothing. 4 at once are for one column only.
        if 1 < columns < min(n - 1, 8) or (at_once == 4 and 1 < columns < 8):
            continue
        ahead, hint, flag = next(reach)
        stream = Prefetch(ahead, flag, hint, at_once, columns, 4096, 2, flag)
        y = multiply(matrix, isa, x[:n], n_out, stream)
        np.testing.assert_array_equal(y.view(np.uint32), alone[:n].view(np.uint32), f"{stream}, {n} columns")


@pytest.mark.parametrize(
    "change",
    [{"ahead": -64}, {"ahead": 10}, {"hint": 3}, {"at_once": 5}, {"tokens": 9}, {"task": -1}, {"tasks_each": 0}],
)
def test_a_way_to_read_that_does_not_exist_is_refused(change: dict[str, int], rng: np.random.Generator) -> None:
    matrix, _ = packed("Q8_0", rng.standard_normal((16, 32), dtype=np.float32))
    stream = Prefetch(64, True, 0, 1, 1, 0, 1, True)._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such way to read"):
        matrix.multiply("scalar", np.ones((1, 32), np.float32), np.empty((1, 16), np.float32), stream)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_extremes_come_through(format: str, isa: str, rng: np.random.Generator) -> None:
    matrix, _ = packed(format, rng.standard_normal((16, 256), dtype=np.float32))
    x = np.zeros((4, 256), dtype=np.float32)
    x[1, 3] = np.nan
    x[2, 255] = np.inf
    x[3, 7] = 1e-35  # 127 / x would overflow
    y = multiply(matrix, isa, x, 16)
    np.testing.assert_array_equal(y[0], np.zeros(16, dtype=np.float32))
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()
    assert np.isfinite(y[3]).all()


# Bytes of a block, and where its half floats stand.
HALVES = {"Q8_0": (34, [0]), "Q4_0": (18, [0]), "Q4_1": (20, [0, 2]), "Q5_0": (22, [0]), "Q5_1": (24, [0, 2])}
HALVES |= {"Q2_K": (84, [80, 82]), "Q3_K": (110, [108]), "Q4_K": (144, [0, 2]), "Q5_K": (176, [0, 2])}
HALVES |= {"Q6_K": (210, [208]), "MXFP4": (17, [])}


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", HALVES)
def test_the_largest_codes_times_the_largest_activations_do_not_overflow(format: str, isa: str) -> None:
    matrix, weights = of_extremes(format, n_in := 3 * max(BLOCKS[format], 64))
    signs = np.ones((4, n_in), dtype=np.float32)
    signs[1] = -1
    signs[2, ::2] = -1
    signs[3, (np.arange(n_in) // 2) % 2 == 1] = -1  # each lane of 16 bits has one sign
    x = np.tile(signs * np.float32(127), (5, 1))  # rounded to 127 exactly
    expected = x.astype(np.float64) @ weights.T
    assert np.abs(expected).max() > 5e4
    np.testing.assert_allclose(multiply(matrix, isa, x, 4), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_activations_that_just_fit_into_pairs_and_those_that_do_not(format: str, isa: str) -> None:
    matrix, weights = of_extremes(format, 1024)
    x = np.empty((64, 64, 16), dtype=np.float32)
    for column in range(64):  # 16 magnitudes that add up to 1014 .. 1029: 1023 is the limit
        total, sign = 1014 + column // 4, (-1) ** column
        x[column] = sign * np.array([127, *np.diff(np.arange(16) * (total - 127) // 15)])
    x = x.reshape(64, 1024)
    alone = np.concatenate([multiply(matrix, isa, column[None], 4) for column in x])
    np.testing.assert_array_equal(multiply(matrix, isa, x, 4).view(np.uint32), alone.view(np.uint32))
    expected = x.astype(np.float64) @ weights.T
    np.testing.assert_allclose(alone, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("n_in", [32, 96, 128, 160, 2880])  # one line of exponents serves four blocks
def test_rows_of_mxfp4_may_have_any_number_of_blocks(n_in: int, isa: str, rng: np.random.Generator) -> None:
    matrix, weights = packed("MXFP4", rng.standard_normal((50, n_in), dtype=np.float32))
    n_blocks = n_in // 32
    assert matrix.data.nbytes == 4 * (-(-n_blocks // 4) * 64 + n_blocks * 256)
    x = rng.standard_normal((17, n_in), dtype=np.float32)
    seen = round_activations(x, 32)
    tolerance = 4e-7 * (np.abs(seen).astype(np.float64) @ np.abs(weights).astype(np.float64).T)
    y = multiply(matrix, isa, x, 50)
    assert np.all(np.abs(y - seen.astype(np.float64) @ weights.astype(np.float64).T) <= tolerance)
    np.testing.assert_array_equal(y.view(np.uint32), multiply(matrix, "scalar", x, 50).view(np.uint32))


@pytest.mark.parametrize("isa", available_isas())
def test_every_code_and_exponent_of_mxfp4_is_exact(isa: str, rng: np.random.Generator) -> None:
    blocks = rng.integers(0, 256, (240, 17), dtype=np.uint8)  # in every place many codes; above, sums are infinite
    blocks[:, 0] = np.arange(240)
    data = blocks.reshape(-1)
    weights = dequantize(GGMLType.MXFP4, data, (240, 32)).astype(np.float64)
    assert (weights[:2] != 0).any() and (np.abs(weights[:2]) <= 12 * 2.0**-127).all()  # subnormal scales
    matrix = _core.PackedMatrix(int(GGMLType.MXFP4), 240, 32, data)
    x = np.eye(32, dtype=np.float32)  # rounded to 127 and a scale
    expected = (127 * weights.T * np.float64(np.float32(1) / np.float32(127))).astype(np.float32)
    np.testing.assert_array_equal(multiply(matrix, isa, x, 240), expected)


def of_extremes(format: str, n_in: int) -> tuple[_core.PackedMatrix, np.ndarray]:
    """A matrix of four rows of the largest and the smallest codes, and its weights as float64."""
    n_bytes, halves = HALVES[format]
    blocks = np.zeros((4, n_in // BLOCKS[format], n_bytes), dtype=np.uint8)
    blocks[0] = 0xFF
    blocks[1] = 0x7F  # Q8_0: 127; scales of Q6_K likewise
    blocks[2] = 0x80
    for at in halves:
        blocks[:, :, at : at + 2] = np.frombuffer(np.float16(0.25 if at in (2, 82) else 0.5).tobytes(), dtype=np.uint8)
    if format == "Q6_K":
        blocks[3, :, 192:208] = 0x80  # the smallest codes, the largest scale
    if format == "MXFP4":
        blocks[:, :, 0] = 128  # a scale of 1
        blocks[3, :, 1:] = 0x77  # the largest number in every place
    kind = GGMLType[format]
    data = blocks.reshape(-1)
    matrix = _core.PackedMatrix(int(kind), 4, n_in, data)
    return matrix, dequantize(kind, data, (4, n_in)).astype(np.float64)


def test_a_matrix_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="source has another size"):
        _core.PackedMatrix(int(GGMLType.Q4_0), 16, 64, np.zeros(7, dtype=np.uint8))
    with pytest.raises(ValueError, match="multiple of the type's block"):
        _core.PackedMatrix(int(GGMLType.Q4_K), 16, 64, np.zeros(7, dtype=np.uint8))
    with pytest.raises(ValueError, match="no kernel"):
        _core.packed_bytes(int(GGMLType.IQ4_NL), 16, 256)
    with pytest.raises(ValueError, match="cannot be packed so"):
        _core.PackedMatrix(int(GGMLType.Q4_0), 16, 128, np.zeros(7, dtype=np.uint8), 1.0, BASE_THREE[GGMLType.I2_S])
    with pytest.raises(ValueError, match="no type that a file could have"):
        _core.PackedMatrix(BASE_THREE[GGMLType.I2_S], 16, 128, np.zeros(7, dtype=np.uint8))
