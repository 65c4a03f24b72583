"""What holds for every format that is read: the values of the gguf package, and refusals that say what was found."""

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tiny_models import TENSOR_TYPES, quantize

from edgeinfer.common.errors import ShapeError, UnsupportedModel
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType

F16_FIELDS = {  # bytes at which a block has float16 numbers
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "MXFP4": [],
}


@pytest.mark.parametrize("name", F16_FIELDS)
def test_every_code_and_scale_has_the_value_that_the_gguf_package_gives(name: str, rng: np.random.Generator) -> None:
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (3 * 7, n_bytes), dtype=np.uint8)
    for at in F16_FIELDS[name]:
        blocks[:, at : at + 2] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(3, 7 * n_weights)
    # Equal, not close: both multiply and add once, in the same order.
    assert_array_equal(dequantize(GGMLType[name], blocks.reshape(-1), (3, 7 * n_weights)), expected)


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"IQ1_M is not supported.*BF16.*I2_S.*Q4_K.*Q8_0"):
        dequantize(GGMLType.IQ1_M, np.zeros(56, dtype=np.uint8), (256,))


@pytest.mark.parametrize(
    "name, n_bytes, shape, words",
    [
        ("Q4_0", 18, (33,), "multiple of 32"),
        ("Q4_K", 144, (2, 128), "multiple of 256"),
        ("Q4_0", 17, (32,), "18 bytes"),
        ("F32", 8, (3,), "12 bytes"),
        ("I2_S", 32, (1, 128), "64 bytes"),
        ("I2_S", 64, (2, 64), "multiple of 128"),
        ("F32", 4, (), r"shape \(\)"),
    ],
)
def test_data_that_does_not_fit_its_shape_is_refused(
    name: str, n_bytes: int, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        dequantize(GGMLType[name], np.zeros(n_bytes, dtype=np.uint8), shape)


# Root mean square error over the deviation of gaussian weights. A format of b bits with its range cut at the largest of
# 32 numbers (about 2.1 deviations) has about 4.2 / 2**b / sqrt(12), with asymmetric ones and sub-scales a little less.
ERRORS = {"Q8_0": 0.006, "Q4_0": 0.09, "Q4_1": 0.08, "Q5_0": 0.045, "Q5_1": 0.04, "Q4_K": 0.08, "Q5_K": 0.04}
ERRORS |= {"F32": 0.0, "F16": 0.0003, "BF16": 0.002, "Q6_K": 0.02}
ERRORS |= {"Q2_K": 0.34, "Q3_K": 0.17, "MXFP4": 0.12}  # numbers of one or two significant bits
# Three levels leave 0.44 at best (Max, 1960), and more where the outer ones are the largest of 256 numbers.
ERRORS |= {"TQ1_0": 0.95, "TQ2_0": 0.95, "I2_S": 0.55, "Q2_0": 0.55}


@pytest.mark.parametrize("name", TENSOR_TYPES)
def test_tiny_model_weights_come_back_close_to_what_was_quantised(name: str, rng: np.random.Generator) -> None:
    weights = rng.standard_normal((33, 512), dtype=np.float32) / np.float32(16)
    back = dequantize(GGMLType[name], quantize(name, weights).reshape(-1), weights.shape)
    assert np.sqrt(np.mean((back - weights) ** 2)) <= ERRORS[name] * weights.std()
