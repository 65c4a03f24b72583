"""Quantisers in C++: llama.cpp's bytes, on every instruction set and number of threads, or a smaller error."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from quantiser_cases import FORMATS, Floats, cases, gaussian, hash_of, importances, matrices, quantized

from edgeinfer.common.errors import ShapeError
from edgeinfer.models.formats import _quantize, quantize, quantize_plain
from edgeinfer.models.gguf import GGMLType

# {format: {case: hash of libgguf's bytes}}; tests/benchmarks/compare_quantisers.py writes it.
HASHES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("quantiser_hashes.json").read_text())
SEARCHED = [name for name in FORMATS if name not in ("F16", "BF16", "Q8_0")]
BY_DEFAULT_AS_LLAMA_CPP = ("F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def back(format: str, data: np.ndarray, weights: Floats) -> Floats:
    """What the gguf package reads."""
    kind = gguf.GGMLQuantizationType[format]
    read = gguf.dequantize(data.reshape(len(weights), -1).view(np.float16 if format == "F16" else np.uint8), kind)
    return np.asarray(read, dtype=np.float32)


def error(format: str, data: np.ndarray, weights: Floats, columns: Floats | float = 1.0) -> float:
    """Root of the weighted mean square error over that of the weights."""
    squares = np.square(back(format, data, weights) - weights, dtype=np.float64)
    return float(np.sqrt((columns * squares).sum() / (columns * np.square(weights, dtype=np.float64)).sum()))


@pytest.mark.parametrize("format", FORMATS)
def test_every_instruction_set_and_number_of_threads_gives_the_bytes_of_llama_cpp(format: str) -> None:
    found = set()
    for name, weights, columns in cases(format):
        for n_threads, isa in enumerate(_quantize.instruction_sets(), 1):
            data = quantized(format, weights, columns, n_threads, isa)
            assert hash_of(data) == HASHES[format][name], (name, isa)
        found.add(name)
    assert found == set(HASHES[format])


def test_the_last_round_of_a_descent_counts() -> None:
    """One block in 30,000 needs all five; the hash is of libgguf's bytes."""
    weights = np.zeros((1, 256), np.float32)
    weights[0, 128:144] = [-2, -7, -4, 1, -1, 2, -9, 0, -2, -3, -6, -3, 8, -8, -3, -3]
    assert hash_of(quantized("Q3_K", weights, None)) == "b1a81332d44362cb"


@pytest.mark.parametrize("format", ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_plain_rounding_is_that_of_the_gguf_package(format: str) -> None:
    half_way = (np.arange(11 * 768, dtype=np.float32) % 253 - 126.5).reshape(11, -1)  # between codes of Q8_0
    half_way[:, ::32] = 127
    kinds = ("gaussian", "heavy tails", "some zeros", "positive", "few levels", "huge")
    for name, weights in ({kind: matrices()[kind] for kind in kinds} | {"half-way": half_way}).items():
        expected = gguf.quantize(weights, gguf.GGMLQuantizationType[format])
        assert_array_equal(quantize_plain(GGMLType[format], weights), expected.view(np.uint8).reshape(-1), name)


def test_half_floats_are_those_of_numpy() -> None:
    bits = np.arange(0, 1 << 32, 65521, dtype=np.uint32).view(np.float32)
    weights = bits[np.abs(bits) <= 65504].reshape(1, -1)
    assert_array_equal(quantize(GGMLType.F16, weights), weights.astype("<f2").view(np.uint8).reshape(-1))


@pytest.mark.parametrize("format", FORMATS)
def test_without_importance_no_error_is_larger_than_that_of_llama_cpp(format: str) -> None:
    type = GGMLType[format]
    for name in ("gaussian", "heavy tails", "positive"):
        weights = matrices()[name]
        ours, theirs = quantize(type, weights), quantize_plain(type, weights)
        if format in BY_DEFAULT_AS_LLAMA_CPP:
            assert_array_equal(ours, theirs)
        else:
            assert error(format, ours, weights) < 0.995 * error(format, theirs, weights)


@pytest.mark.parametrize("format", SEARCHED)
def test_what_counts_more_is_nearer(format: str) -> None:
    weights, columns = matrices()["gaussian"], importances()["squares"]
    with_importance = error(format, quantize(GGMLType[format], weights, columns), weights, columns)
    assert with_importance < 0.97 * error(format, quantize(GGMLType[format], weights), weights, columns)


def test_the_scales_of_q4_0_are_the_best_of_thirteen() -> None:
    weights = matrices()["heavy tails"]
    blocks = weights.reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1) / np.float32(-8)
    errors = []
    for step in np.linspace(0.82, 1.06, 13, dtype=np.float32):
        scale = (largest * step).astype("<f2").astype(np.float32)
        rounded = np.rint(blocks / scale).clip(-8, 7) * scale
        errors.append(np.square(rounded - blocks).sum(axis=1))
    found = np.square(back("Q4_0", quantize(GGMLType.Q4_0, weights), weights).reshape(-1, 32) - blocks).sum(axis=1)
    np.testing.assert_allclose(found, np.min(errors, axis=0), rtol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_depends_on_nothing_else(format: str) -> None:
    weights, columns = matrices()["heavy tails"], importances()["squares"]
    for importance in (None, columns):
        together = quantize(GGMLType[format], weights.reshape(1, *weights.shape), importance)
        apart = [quantize(GGMLType[format], row, importance) for row in weights]
        assert_array_equal(together, np.concatenate(apart))
    assert quantize(GGMLType[format], weights[:0]).shape == (0,)


@pytest.mark.parametrize("format", SEARCHED)
def test_the_unit_of_importance_does_not_matter(format: str) -> None:
    weights, columns = matrices()["gaussian"], importances()["squares"]
    assert columns is not None
    expected = quantize(GGMLType[format], weights, columns)
    for power in (-120, 60, 120):
        assert_array_equal(quantize(GGMLType[format], weights, np.ldexp(columns, power)), expected)


@pytest.mark.parametrize("format", SEARCHED)
def test_columns_that_no_token_reached_keep_their_weights(format: str) -> None:
    weights, columns = matrices()["gaussian"], importances()["squares"]
    assert columns is not None
    unseen = columns.copy()
    unseen[256:512] = 0
    within = error(format, quantize(GGMLType[format], weights, unseen).reshape(11, -1), weights)
    assert within < 1.2 * error(format, quantize_plain(GGMLType[format], weights), weights)
    nothing = quantize(GGMLType[format], weights, np.zeros_like(columns))
    assert_array_equal(nothing, quantize(GGMLType[format], weights, np.ones_like(columns)))


@pytest.mark.parametrize("format", SEARCHED)
def test_the_largest_weights_stay_finite(format: str) -> None:
    weights = np.clip(gaussian(np.random.PCG64(3), (4, 512)) * 1e5, -65504, 65504).astype(np.float32)
    weights[0] = -65504
    weights[1, 1:] = 0
    for importance in (None, importances()["steep"][:512]):  # type: ignore[index]
        assert np.isfinite(back(format, quantize(GGMLType[format], weights, importance), weights)).all()


def test_weights_and_importance_that_no_format_holds_are_refused() -> None:
    weights, columns = np.zeros((3, 512), np.float32), np.ones(512, np.float32)
    for bad, shown in ((np.nan, "nan"), (-np.inf, "-inf"), (65536, "65536")):
        wrong = weights.copy()
        wrong[2, 7] = wrong[2, 9] = bad
        with pytest.raises(ShapeError, match=rf"of Q4_K must be finite and at most 65504: found {shown} at \(2, 7\)"):
            quantize(GGMLType.Q4_K, wrong, columns)
    with pytest.raises(ShapeError, match=r"BF16 must be finite and at most 3.38953e\+38: found 3.4e\+38 at \(1,\)"):
        quantize(GGMLType.BF16, np.array([1, 3.4e38], np.float32))
    with pytest.raises(ShapeError, match=r"rows of Q6_K must be a multiple of 256: found \(2, 384\)"):
        quantize(GGMLType.Q6_K, np.zeros((2, 384), np.float32))
    with pytest.raises(ShapeError, match=r"one number a column of weights \(3, 512\): found shape \(256,\)"):
        quantize(GGMLType.Q4_K, weights, columns[:256])
    for bad, shown in ((-1, "-1"), (np.nan, "nan"), (np.inf, "inf")):
        wrong = columns.copy()
        wrong[300] = bad
        with pytest.raises(
            ShapeError, match=rf"importance must be finite and not negative: found {shown} in column 300"
        ):
            quantize(GGMLType.Q4_K, weights, wrong)


def test_the_extension_refuses_what_does_not_fit() -> None:
    weights, columns, to = np.zeros((2, 256), np.float32), np.ones(256, np.float32), np.zeros(288, np.uint8)
    wrong = [
        ("Q9", "plain", weights, None, to),
        ("Q4_K", "own", weights, None, to),
        ("Q4_K", "weighted", weights, None, to),
        ("Q4_K", "weighted", weights, columns[:32], to),
        ("Q4_K", "plain", weights[:, :128].copy(), None, to),
        ("Q4_K", "plain", weights, None, to[:144]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError):
            _quantize.quantize(*arguments, 1)
    with pytest.raises(ValueError, match="instruction set"):
        _quantize.quantize("Q4_K", "plain", weights, None, to, 1, "mmx")
