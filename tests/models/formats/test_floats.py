"""F32, F16 and BF16: the values of the gguf package, in an array of its own."""

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_every_kind_of_float_has_the_value_that_the_gguf_package_gives(name: str) -> None:
    n_bytes = 4 if name == "F32" else 2
    steps = 257 if name == "F32" else 1
    patterns = np.arange(0, 1 << 16, steps, dtype=np.uint32) << (16 if name == "F32" else 0)
    data = patterns.astype(f"<u{n_bytes}").view(np.uint8)
    expected = gguf.dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType[name])[0]
    assert_array_equal(dequantize(GGMLType[name], data, (1, len(patterns)))[0], expected)


def test_the_result_is_a_copy_of_its_own() -> None:
    data = np.array([1.0, 2.0], dtype="<f4").view(np.uint8)
    data.flags.writeable = False
    weights = dequantize(GGMLType.F32, data, (2,))
    weights += 1
    assert data.view("<f4").tolist() == [1.0, 2.0]


def test_data_at_an_odd_address_is_read() -> None:
    data = np.concatenate([[np.uint8(0)], np.array([1.0, 2.0], dtype="<f4").view(np.uint8)])[1:]
    assert dequantize(GGMLType.F32, data, (2,)).tolist() == [1.0, 2.0]
