"""Q4_1 by hand."""

import numpy as np

from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType


def test_one_block_of_q4_1_by_hand() -> None:
    d, m = np.array([0.5, -3.0], dtype="<f2").view(np.uint8).reshape(2, 2)
    codes = np.full(16, 0xF1, dtype=np.uint8)  # low halves 1: weights 0..15, high halves 15: weights 16..31
    weights = dequantize(GGMLType.Q4_1, np.concatenate([d, m, codes]), (32,))
    assert weights.tolist() == [-2.5] * 16 + [4.5] * 16
