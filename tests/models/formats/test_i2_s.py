"""I2_S by hand."""

import numpy as np
from numpy.testing import assert_array_equal

from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType


def test_one_run_of_i2_s_by_hand() -> None:
    codes = np.full(32, 0b00_01_10_01, dtype=np.uint8)  # weights 0..31, 32..63, 64..95, 96..127
    codes[5] = 0b10_01_01_00
    tail = np.array([0.5, 7.0, 0, 0, 0, 0, 0, 0], dtype="<f4").view(np.uint8)
    weights = dequantize(GGMLType.I2_S, np.concatenate([codes, tail]), (1, 128))[0]
    expected = np.repeat([-0.5, 0, 0.5, 0], 32)
    expected[[5, 37, 69, 101]] = [0.5, 0, 0, -0.5]
    assert_array_equal(weights, expected)
