"""A device that multiplies with ternary matrices in the engine's place: the same bits, and its faults are errors."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend, NativeSession, _core
from edgeinfer.backends.native.weights import Part
from edgeinfer.common.errors import BackendLost, Interrupted
from edgeinfer.common.settings import LoadSettings, TernaryBits
from edgeinfer.common.types import Device, MemoryUse
from edgeinfer.models import read_spec
from edgeinfer.models.formats import codes_of
from edgeinfer.models.gguf import GGMLType, ModelFile

Answer = Callable[[int, np.ndarray], np.ndarray | None]
PRODUCT = ctypes.CFUNCTYPE(
    ctypes.c_bool,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int8),
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int32),
)


class NumpyDevice:
    """Multiplies in numpy. answer: of (matrix, x), where it is another; None is a fault."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.trits: list[np.ndarray] = []
        self.answer = answer or (lambda number, x: x.astype(np.int32) @ self.trits[number].T.astype(np.int32))
        self.calls: list[tuple[int, int]] = []
        self.product = PRODUCT(self._product)

    def place(self, weights: _core.Weights, model: ModelFile, parts: Sequence[Part]) -> MemoryUse:
        address = ctypes.cast(self.product, ctypes.c_void_p).value
        device = _core.ProductDevice(address or 0, 0, self)
        for part in parts:
            if part.type == GGMLType.I2_S:
                weights.set_device(part.block, part.role, device, len(self.trits))
                codes = codes_of(part.type, model.data(part.name)).values
                self.trits.append(np.array(codes, dtype=np.int8).reshape(part.shape))
        return MemoryUse(11, 0, 7)

    def _product(self, state: object, number: int, x: object, n_rows: int, y: object) -> bool:
        n_out, n_in = self.trits[number].shape
        self.calls.append((number, n_rows))
        found = self.answer(number, np.ctypeslib.as_array(x, (n_rows, n_in)))
        if found is not None:
            np.ctypeslib.as_array(y, (n_rows, n_out))[:] = found
        return found is not None


def session_of(path: Path, device: NumpyDevice | None, n_threads: int = 2, bits: TernaryBits = "2") -> NativeSession:
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        place = None if device is None else device.place
        backend = NativeBackend(ternary_bits=bits, tuned=False, placement=place)
        plan = backend.plan(file, spec, LoadSettings(256, n_batch=128, n_threads=n_threads))
        return backend.load(file, spec, plan, Device(n_threads)).session()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of 8 rows, which are no whole group of 16, and one matrix of another format."""
    file = tmp_path_factory.mktemp("tiny") / "m.gguf"
    return write_tiny_model(
        file, "bitnet-b1.58", "I2_S", n_heads=16, n_kv_heads=1, head_dim=8, types={"blk.1.ffn_up.weight": "Q8_0"}
    )


@pytest.mark.parametrize("bits", ["2", "1.6"])
def test_logits_with_a_device_are_those_of_the_kernels(path: Path, bits: TernaryBits, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 291, 75).astype(np.int32)
    alone = session_of(path, None, bits=bits)
    for n_threads in (1, 3):
        device = NumpyDevice()
        session = session_of(path, device, n_threads, bits)
        for n in (70, 75):
            wanted = alone.forward(tokens[n - 70 : n], logits="all").logits
            assert np.array_equal(session.forward(tokens[n - 70 : n], logits="all").logits, wanted)
        n_rows = np.zeros(len(device.trits), dtype=int)
        for number, n in device.calls:
            n_rows[number] += n
        assert (n_rows == 140).all() and len(n_rows) == 13  # each row of each matrix once, whatever the threads
        decoder = session.model.decoder()
        use = session.memory()
        assert (use.weights, use.activations) == (decoder.weight_bytes + 11, decoder.activation_bytes + 7)


def test_a_device_that_fails_is_an_error_with_its_matrix_and_the_session_goes_on(path: Path) -> None:
    device = NumpyDevice()
    session, right = session_of(path, device), device.answer
    wanted = session.forward([1, 2, 3]).logits
    device.answer = lambda number, x: None if number == 5 else right(number, x)
    with pytest.raises(BackendLost, match="the device of ternary products failed at matrix 5"):
        session.forward([1, 2, 3])
    assert device.calls[-1][0] == 5
    device.answer = right
    assert np.array_equal(session.forward([1, 2, 3]).logits, wanted)


def test_a_pass_is_interrupted_between_rows_of_a_device(path: Path) -> None:
    device = NumpyDevice()
    session, right = session_of(path, device, 1), device.answer

    def slow(number: int, x: np.ndarray) -> np.ndarray | None:
        session.interrupt()
        return right(number, x)

    device.answer = slow
    with pytest.raises(Interrupted):
        session.forward(list(range(64)))
    assert len(device.calls) == 1


def test_only_ternary_matrices_with_a_scale_a_row_go_to_one_device(path: Path) -> None:
    weights = _core.Weights(1 << 20)
    weights.set_matrix("b", "ternary", int(GGMLType.I2_S), 16, 256)
    weights.set_matrix("b", "other", int(GGMLType.Q8_0), 16, 256)
    device, second = _core.ProductDevice(1, 0, None), _core.ProductDevice(1, 0, None)
    weights.set_device("b", "ternary", device, 0)
    for role, given, message in [
        ("other", device, "weight b.other must be I2_S for a device: found another format"),
        ("missing", device, "weight b.missing is missing"),
        ("ternary", second, "weights can have one device: found a second one"),
    ]:
        with pytest.raises(ValueError, match=message):
            weights.set_device("b", role, given, 0)
    with pytest.raises(ValueError, match="product must be the address of a function"):
        _core.ProductDevice(0, 0, None)
