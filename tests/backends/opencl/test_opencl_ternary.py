"""Ternary products on OpenCL: the integers of numpy, whatever the shape and the way."""

import numpy as np
import pytest
from numpy.typing import NDArray
from packed_dot import with_packed_dot
from packed_ternary import pack_two_bit

from edgeinfer.backends.opencl import OpenCLDevice, TernaryMatrix, available_ways, fastest_way, measure_ways
from edgeinfer.common.errors import InvalidArgument, ShapeError


@pytest.fixture(scope="module", params=["plain", "dot", "lookup"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def device(opencl_device: OpenCLDevice) -> OpenCLDevice:
    return with_packed_dot(opencl_device)


def random_trits(rng: np.random.Generator, n_out: int, n_in: int) -> NDArray[np.int8]:
    return rng.integers(-1, 2, (n_out, n_in), dtype=np.int8)


def matrix_of(device: OpenCLDevice, trits: NDArray[np.int8], way: str | None = None) -> TernaryMatrix:
    scales = np.linspace(0.5, 2, len(trits), dtype=np.float32)
    return TernaryMatrix(device, pack_two_bit(trits, scales), *trits.shape, way)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape", [(1, 1), (16, 16), (17, 15), (5, 33), (640, 256), (257, 999), (300, 1000), (31, 6912)], ids=str
)
def test_ragged_shapes_give_the_integers_of_numpy(
    device: OpenCLDevice, way: str, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    trits = random_trits(rng, *shape)
    matrix = matrix_of(device, trits, way)
    for n in (1, 2, 4, 5, 9):
        activations = rng.integers(-128, 128, (n, shape[1]), dtype=np.int8)
        assert np.array_equal(matrix.integers(activations), activations.astype(np.int32) @ trits.T.astype(np.int32))


@pytest.mark.parametrize("k", [6912, 8640])
@pytest.mark.parametrize("largest", [127, -127, -128])
def test_the_worst_case_overflows_nothing(device: OpenCLDevice, way: str, k: int, largest: int) -> None:
    matrix = matrix_of(device, np.ones((33, k), dtype=np.int8), way)
    activations = np.full((3, k), largest, dtype=np.int8)
    assert np.array_equal(matrix.integers(activations), np.full((3, 33), largest * k))


def test_items_that_share_a_row_give_the_same_integers(
    device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """As on a GPU, with groups of several rows' slices."""
    monkeypatch.setattr(OpenCLDevice, "is_cpu", False)
    trits = random_trits(rng, 100, 777)
    for way in available_ways(device):
        matrix = matrix_of(device, trits, way)
        for n in (1, 6):
            activations = rng.integers(-128, 128, (n, 777), dtype=np.int8)
            assert np.array_equal(matrix.integers(activations), activations.astype(np.int32) @ trits.T.astype(np.int32))


def test_a_product_has_the_scales_of_rows_and_tokens(device: OpenCLDevice, rng: np.random.Generator) -> None:
    trits = random_trits(rng, 50, 70)
    activations, scales = rng.integers(-128, 128, (3, 70), dtype=np.int8), rng.random(3, dtype=np.float32)
    expected = (activations * scales[:, None].astype(np.float64)) @ (trits * np.linspace(0.5, 2, 50)[:, None]).T
    np.testing.assert_allclose(matrix_of(device, trits).product(activations, scales), expected, rtol=1e-5, atol=1e-4)


def test_the_fastest_way_is_measured_once(opencl_device: OpenCLDevice) -> None:
    seconds = measure_ways(opencl_device, n=2, shape=(64, 64))
    assert set(seconds) == set(available_ways(opencl_device)) and min(seconds.values()) > 0
    way = fastest_way(opencl_device)
    assert way in available_ways(opencl_device) and opencl_device.measured["ternary"] == way
    assert matrix_of(opencl_device, np.ones((16, 16), dtype=np.int8)).way == way


def test_misuse_is_refused(opencl_device: OpenCLDevice) -> None:
    packed = pack_two_bit(np.ones((16, 32), dtype=np.int8), np.ones(16, dtype=np.float32))
    with pytest.raises(ShapeError, match="cut short"):
        TernaryMatrix(opencl_device, packed[:, :-1], 16, 32)
    with pytest.raises(InvalidArgument, match="can be made by plain.*found 'fast'"):
        TernaryMatrix(opencl_device, packed, 16, 32, "fast")  # type: ignore[arg-type]
    matrix = TernaryMatrix(opencl_device, packed, 16, 32, "plain")
    for wrong in (np.ones((1, 31), dtype=np.int8), np.ones(32, dtype=np.int8), np.ones((1, 32), dtype=np.int16)):
        with pytest.raises(ShapeError, match=r"activations must be int8 \(n, 32\)"):
            matrix.integers(wrong)
    assert matrix.integers(np.empty((0, 32), dtype=np.int8)).shape == (0, 16)
    without = OpenCLDevice(opencl_device.info, has_integer_dot=False)
    with pytest.raises(InvalidArgument, match="found 'dot'"):
        TernaryMatrix(without, packed, 16, 32, "dot")
