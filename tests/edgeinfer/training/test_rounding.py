"""Rounding in torch against the bytes that the exporter writes."""

import importlib.util

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from parts import missing

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
import torch

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.formats import dequantize, quantize
from edgeinfer.models.gguf import GGMLType
from edgeinfer.training.rounding import rounded


def as_written(values: np.ndarray, type: GGMLType) -> np.ndarray:
    return dequantize(type, quantize(type, values), values.shape)


@pytest.fixture
def weights(rng: np.random.Generator) -> np.ndarray:
    """Blocks of all sizes, one of zeros and one of numbers that no half float's scale reaches."""
    values = rng.standard_normal((96, 64), dtype=np.float32) * np.geomspace(1e-3, 10, 96, dtype=np.float32)[:, None]
    values[3, :32] = 0.0
    values[4, 32:] *= np.float32(1e-9)
    return values


@pytest.mark.parametrize("type", [GGMLType.F16, GGMLType.Q8_0])
def test_weights_are_rounded_as_they_are_written(weights: np.ndarray, type: GGMLType) -> None:
    found = rounded(torch.from_numpy(weights), type)
    assert_array_equal(found.numpy(), as_written(weights, type))
    assert_array_equal(rounded(found, type).numpy(), found.numpy())


def test_of_four_bits_all_but_blocks_with_two_scales_as_good(weights: np.ndarray) -> None:
    found, expected = rounded(torch.from_numpy(weights), GGMLType.Q4_0).numpy(), as_written(weights, GGMLType.Q4_0)
    differ = (found != expected).reshape(-1, 32).any(axis=1)
    assert differ.mean() < 0.02
    errors = [np.square(each - weights).reshape(-1, 32).sum(axis=1)[differ] for each in (found, expected)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-5)


def test_other_types_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="can be trained as F16, Q8_0 or Q4_0: found Q4_K"):
        rounded(torch.zeros((1, 256)), GGMLType.Q4_K)
