"""Ternary matrices of codes and of weights, and the scales of their rows."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix


@pytest.fixture
def codes(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-1, 2, (6, 512), dtype=np.int8)


def test_codes_give_the_weights_that_they_are(codes: np.ndarray) -> None:
    scales = np.array([[0.5], [2.0], [0.0], [-1.5]] * 3, dtype=np.float32)  # of runs of 256
    matrix = TernaryMatrix.of_codes("m", codes, scales)
    weights = (codes.reshape(12, 256) * scales).reshape(codes.shape)
    assert_array_equal(matrix.weights(), weights)
    assert_array_equal(np.sign(matrix.weights()), matrix.trits * (matrix.weights() != 0))
    assert (matrix.scales >= 0).all()
    assert_array_equal(TernaryMatrix.of_codes("m", codes, scales[:1]).weights(), codes * np.float32(0.5))


def test_codes_that_are_no_trits_are_refused(codes: np.ndarray) -> None:
    one = np.ones((1, 1), dtype=np.float32)
    with pytest.raises(UnsupportedModel, match=r"tensor m: codes must be -1, 0 or 1: found -1\.\.2"):
        TernaryMatrix.of_codes("m", np.where(np.arange(512) == 9, 2, codes).astype(np.int8), one)
    with pytest.raises(UnsupportedModel, match="tensor m: scales must be finite numbers"):
        TernaryMatrix.of_codes("m", codes, one * np.nan)


def test_a_row_has_one_scale_or_is_refused(codes: np.ndarray) -> None:
    codes[3] = 0
    codes[4, :256] = 0  # the scale of nothing counts for nothing
    scales = np.array([[1, 1], [2, 2], [3, 3], [4, 5], [7, 6], [0.5, 0.5]], dtype=np.float32)
    assert TernaryMatrix(codes, scales).row_scales("m").tolist() == [1, 2, 3, 5, 6, 0.5]
    assert TernaryMatrix.of_one_scale(codes, 0.25).row_scales("m").tolist() == [0.25] * 6
    codes[4, 0] = 1
    with pytest.raises(
        UnsupportedModel, match="tensor m: each row must have one scale: found 2 in row 4, such as 6 and 7"
    ):
        TernaryMatrix(codes, scales).row_scales("m")
