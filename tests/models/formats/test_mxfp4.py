"""MXFP4 by hand, and against the gguf package."""

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgeinfer.models.formats import dequantize, quantize
from edgeinfer.models.gguf import GGMLType

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def block(exponent: int, codes: list[int]) -> np.ndarray:
    """17 bytes of 32 codes."""
    pairs = np.array(codes, dtype=np.uint8).reshape(2, 16)
    return np.concatenate([[np.uint8(exponent)], pairs[0] | pairs[1] << 4]).astype(np.uint8)


def test_one_block_by_hand() -> None:
    weights = dequantize(GGMLType.MXFP4, block(128, [*range(16), *range(15, -1, -1)]), (32,))
    both = [2 * number for number in (*NUMBERS, *(-number for number in NUMBERS))]
    assert weights.tolist() == both + both[::-1]


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254])
def test_every_exponent_is_a_power_of_two_even_where_that_is_no_normal_number(exponent: int) -> None:
    data = block(exponent, [1] * 32)  # half of 2^(exponent - 127)
    weights = dequantize(GGMLType.MXFP4, data, (32,))
    assert (weights == np.float32(2.0 ** (exponent - 128))).all() and weights[0] > 0
    assert_array_equal(weights, gguf.dequantize(data, gguf.GGMLQuantizationType.MXFP4))


def test_255_is_an_exponent_too_as_in_ggml() -> None:
    assert dequantize(GGMLType.MXFP4, block(255, [1] * 32), (32,))[0] == 2.0**127


def test_it_is_quantised_as_the_gguf_package_does(rng: np.random.Generator) -> None:
    weights = rng.standard_normal((40, 64), dtype=np.float32) * np.exp2(rng.integers(-30, 30, (40, 1))).astype("<f4")
    weights[3, :32] = 0
    expected = gguf.quantize(weights, gguf.GGMLQuantizationType.MXFP4)
    assert_array_equal(quantize(GGMLType.MXFP4, weights), expected.reshape(-1))


def test_numbers_of_the_format_are_kept_and_those_above_its_largest_become_that() -> None:
    weights = np.array([*NUMBERS, *(-number for number in NUMBERS)] * 2, dtype=np.float32)
    assert_array_equal(dequantize(GGMLType.MXFP4, quantize(GGMLType.MXFP4, weights), (32,)), weights)
    weights[[7, 20]] = 7.9, 2.4
    back = dequantize(GGMLType.MXFP4, quantize(GGMLType.MXFP4, weights), (32,))
    assert back[[7, 20]].tolist() == [6, 2]


def test_weights_that_no_half_float_holds_can_be_written() -> None:
    weights = np.full((1, 32), 2.0**100, dtype=np.float32)
    assert_array_equal(dequantize(GGMLType.MXFP4, quantize(GGMLType.MXFP4, weights), (1, 32)), weights)
