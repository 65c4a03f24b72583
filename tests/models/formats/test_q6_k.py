"""Q6_K as it is written: the layout of the gguf package, and the error of six bits."""

import gguf
import numpy as np
from numpy.testing import assert_array_equal

from edgeinfer.models.formats import dequantize, quantize
from edgeinfer.models.gguf import GGMLType


def back(weights: np.ndarray) -> np.ndarray:
    """The weights that the gguf package reads."""
    data = quantize(GGMLType.Q6_K, weights)
    read = gguf.dequantize(data.reshape(len(weights), -1), gguf.GGMLQuantizationType.Q6_K)
    assert_array_equal(dequantize(GGMLType.Q6_K, data, weights.shape), read)
    return np.asarray(read)


def test_the_error_of_gaussian_weights_is_that_of_six_bits(rng: np.random.Generator) -> None:
    weights = rng.standard_normal((40, 1024), dtype=np.float32) * np.float32(0.03)
    error = np.sqrt(np.mean((back(weights) - weights) ** 2)) / weights.std()
    assert error < 0.02


def test_each_sixteen_weights_have_a_scale_of_their_own(rng: np.random.Generator) -> None:
    sizes = np.repeat(np.float32(2) ** -np.arange(16), 16)
    weights = rng.uniform(-1, 1, (3, 256)).astype(np.float32) * sizes
    errors = np.abs(back(weights) - weights).reshape(3, 16, 16).max(axis=2) / sizes[::16]
    # Half a step, or a whole one where the largest number has the other sign; smaller parts keep fewer bits of scale.
    assert errors[:, :4].max() < 0.06


def test_a_weight_stands_where_the_layout_has_it() -> None:
    weights = np.eye(256, dtype=np.float32) * -32
    assert_array_equal(back(weights), weights)


def test_zeros_and_one_sided_blocks_come_back(rng: np.random.Generator) -> None:
    weights = np.zeros((2, 512), dtype=np.float32)
    weights[1, 256:] = np.abs(rng.standard_normal(256))
    found = back(weights)
    assert not found[0].any() and not found[1, :256].any()
    assert np.abs(found - weights).max() < 0.06
