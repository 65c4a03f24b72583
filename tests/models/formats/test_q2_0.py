"""Q2_0 by hand."""

import numpy as np

from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType


def test_one_block_of_q2_0_by_hand() -> None:
    codes = np.full(16, 0b01_01_01_01, dtype=np.uint8)
    codes[1] = 0b11_10_01_00  # weights 4..7
    block = np.concatenate([np.array([0.5], dtype="<f2").view(np.uint8), codes])
    weights = dequantize(GGMLType.Q2_0, block, (64,))
    assert weights[:8].tolist() == [0, 0, 0, 0, -0.5, 0, 0.5, 1]
    assert not weights[8:].any()
