"""The output matrix of a head that its file leaves out: rows of the target's, rewritten."""

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from exactness import same_bits
from numpy.testing import assert_array_equal
from reference_head import open_reference_head
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model, written

from edgeinfer.backends import head_weights
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import NativeBackend, _core, load_head, plan_head
from edgeinfer.backends.native import weights as weights_module
from edgeinfer.common.errors import EdgeInferError, UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.formats import dequantize, quantize
from edgeinfer.models.gguf import GGMLType, ModelFile

TYPES = [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0]


def rewritten(type: GGMLType, rows: np.ndarray, n_in: int, wanted: GGMLType) -> np.ndarray:
    n_rows = len(rows) // (n_in // type.block_elements * type.block_bytes)
    out = np.empty(n_rows * n_in // wanted.block_elements * wanted.block_bytes, dtype=np.uint8)
    _core.rewrite_rows(int(type), rows, n_in, int(wanted), out)
    return out


@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("type", [GGMLType.F32, *TYPES, GGMLType.Q6_K])
def test_rows_are_rewritten_as_exporters_write_them(type: GGMLType, wanted: GGMLType, rng: np.random.Generator) -> None:
    weights = rng.standard_normal((40, 512), dtype=np.float32) * rng.choice([1e-6, 0.01, 1, 50], (40, 1))
    weights[3, :64] = 0.0
    weights[4] = np.arange(512) % 253 - 126.5  # half-way between codes
    weights[4, ::32] = 127.0
    given = quantize(type, weights.astype(np.float32))
    found = rewritten(type, given, 512, wanted)
    assert_array_equal(found, quantize(wanted, dequantize(type, given, (40, 512))))


@pytest.mark.parametrize("wanted", TYPES)
def test_numbers_that_are_none_stay_in_their_block(wanted: GGMLType, rng: np.random.Generator) -> None:
    weights = rng.standard_normal((3, 64), dtype=np.float32)
    clean = weights.copy()
    weights[1, :32], clean[1, :32] = [np.nan, np.inf, -np.inf, 1.0] * 8, 0.0
    found, others = (
        dequantize(wanted, rewritten(GGMLType.F32, rows.reshape(-1).view(np.uint8), 64, wanted), (3, 64))
        for rows in (weights, clean)
    )
    expected = {GGMLType.F16: weights[1, :32], GGMLType.Q8_0: np.full(32, np.nan), GGMLType.Q4_0: np.zeros(32)}
    assert_array_equal(found[1, :32], expected[wanted])
    found[1, :32] = others[1, :32]
    assert_array_equal(found, others)


@pytest.mark.parametrize(
    "type, n_bytes, n_in, wanted, n_out",
    [
        (GGMLType.F32, 128, 32, GGMLType.Q4_K, 18),
        (GGMLType.I2_S, 128, 128, GGMLType.Q4_0, 72),
        (GGMLType.F32, 128, 16, GGMLType.Q8_0, 34),
        (GGMLType.F32, 100, 32, GGMLType.F16, 64),
        (GGMLType.F32, 128, 32, GGMLType.F16, 63),
    ],
)
def test_rows_that_cannot_be_rewritten_are_refused(type, n_bytes, n_in, wanted, n_out) -> None:
    rows, out = (np.zeros(n, dtype=np.uint8) for n in (n_bytes, n_out))
    with pytest.raises(ValueError):
        _core.rewrite_rows(int(type), rows, n_in, int(wanted), out)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_embd=256)


def without_output(target: Path, type: GGMLType, **options: object) -> Path:
    keys = {"draft-head.output_type": type.name}
    return write_tiny_head(target.with_name("h.gguf"), target, metadata=keys, leave_out="output", **options)  # type: ignore


@pytest.mark.parametrize("type", TYPES)
def test_a_head_without_its_rows_is_as_one_that_has_them(
    type: GGMLType, target: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    vocabulary = sorted(rng.permutation(291)[:270].tolist())  # more than are gathered at once
    left_out = without_output(target, type, draft_vocab=vocabulary)
    stored = write_tiny_head(tmp_path / "stored.gguf", target, tensor_type=type.name, draft_vocab=vocabulary)
    tokens, features = [5, 80, 200, 7], rng.standard_normal((4, 256), dtype=np.float32)
    with ModelFile.open(left_out) as ours, ModelFile.open(stored) as theirs, ModelFile.open(target) as model:
        of_target = read_spec(model)
        spec, of_stored = (read_head_beside(file, model, of_target) for file in (ours, theirs))
        assert spec.output_type == type and of_stored.output_type is None
        assert spec.decoder == of_stored.decoder
        if type == GGMLType.Q8_0:  # what the target has
            assert_array_equal(ours.data("output.weight"), theirs.data("output.weight"))
        plan = NativeBackend().plan(model, of_target, LoadSettings(64, n_batch=64, n_threads=2))
        loaded = NativeBackend().load(model, of_target, plan, Device(2))
        found = []
        for n_threads in (2, 1):
            of_head = plan_head(ours, spec, LoadSettings(64, n_batch=64, n_threads=n_threads))
            head = load_head(ours, spec, loaded, of_head, Device(n_threads))
            assert head.memory().weights == of_head.use.weights
            found.append(head.session().forward(tokens, features, logits="all").logits)
            ours.release("output.weight")
            head.close()
        loaded.close()
        reference = open_reference_head(ours, spec, model, of_target, 64, "float32")
        wanted = reference.forward(tokens, features, logits="all").logits
    assert wanted is not None and wanted.shape == (4, 270)
    assert same_bits(*found) and np.abs(found[0] - wanted).max() < 0.02 * np.abs(wanted).max()


def test_of_the_target_little_is_in_memory_while_rows_are_made(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", np.ones((1500, 2048), dtype=np.float16))
    ids = np.arange(0, 1500, 3, dtype=np.int32)
    with ModelFile.open(written(writer, path)) as model:
        tracemalloc.start()
        made = head_weights._rows(model, "output.weight", ids, GGMLType.Q4_0, 0, 500 * 1152)
        peak = tracemalloc.get_traced_memory()[1] - made.nbytes
        tracemalloc.stop()
    assert made.nbytes == 500 * 1152
    assert peak < 2 << 20  # the 500 rows are 2 MiB of the target's, with what lies between them 6 MiB


def test_rows_are_made_a_few_at_a_time_and_packed_as_they_come(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    data = ModelFile.data

    def noting(self: ModelFile, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        found = data(self, name, first, last)
        if self.makes(name):
            read.append(found.nbytes)
        return found

    def logits_of(head: ModelFile, model: ModelFile) -> np.ndarray:
        of_target = read_spec(model)
        spec = read_head_beside(head, model, of_target)
        loaded = NativeBackend().load(
            model,
            of_target,
            NativeBackend().plan(model, of_target, LoadSettings(64, n_batch=64, n_threads=1)),
            Device(1),
        )
        opened = load_head(
            head, spec, loaded, plan_head(head, spec, LoadSettings(64, n_batch=64, n_threads=1)), Device(1)
        )
        found = opened.session().forward([5, 80], np.ones((2, 256), dtype=np.float32), logits="all").logits
        opened.close()
        loaded.close()
        assert found is not None
        return found

    path = without_output(target, GGMLType.Q4_0, draft_vocab=list(range(1, 291)))
    monkeypatch.setattr(ModelFile, "data", noting)
    found = []
    for limit in (1 << 20, 40 * 144):  # 290 rows of 144 bytes; groups of 16
        monkeypatch.setattr(weights_module, "PIECE_BYTES", limit)
        with ModelFile.open(path) as head, ModelFile.open(target) as model:
            found.append(logits_of(head, model))
    assert same_bits(*found)
    assert read == [290 * 144] + 9 * [32 * 144] + [2 * 144]
    with ModelFile.open(path) as head, ModelFile.open(target) as model:
        read_head_beside(head, model, read_spec(model))
        part = head.data("output.weight", 7 * 144, 9 * 144)
        assert_array_equal(part, head.data("output.weight")[7 * 144 : 9 * 144])


def test_rows_of_half_floats_need_no_blocks(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "m.gguf", "llama", "F16", n_embd=80)
    with ModelFile.open(without_output(target, GGMLType.F16)) as head, ModelFile.open(target) as model:
        spec = read_head_beside(head, model, read_spec(model))
        rows = model.data("output.weight").reshape(291, 160)[spec.draft_vocab]
        assert_array_equal(head.data("output.weight"), rows.reshape(-1))
    with ModelFile.open(without_output(target, GGMLType.Q8_0)) as head:
        with pytest.raises(
            UnsupportedModel, match="embedding_length must be a multiple of 32 for rows of Q8_0: found 80"
        ):
            read_head(head)


def test_rows_are_made_only_while_the_target_is_open(target: Path) -> None:
    with ModelFile.open(without_output(target, GGMLType.Q4_0)) as head:
        with ModelFile.open(target) as model:
            spec = read_head_beside(head, model, read_spec(model))
            rows = model.data("output.weight").reshape(291, -1)[spec.draft_vocab].reshape(-1)
            assert_array_equal(head.data("output.weight"), rewritten(GGMLType.Q8_0, rows, 256, GGMLType.Q4_0))
            again = read_head_beside(head, model, read_spec(model))
            assert spec.output_type == GGMLType.Q4_0 and again.output_type is None and again.decoder == spec.decoder
        with pytest.raises(EdgeInferError, match="this model file is closed"):
            head.data("output.weight")


def test_a_head_of_another_target_gets_no_rows(target: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other.gguf", "llama", "Q8_0", n_embd=256, seed=1)
    with ModelFile.open(without_output(target, GGMLType.Q4_0)) as head, ModelFile.open(other) as model:
        with pytest.raises(UnsupportedModel, match="use the head of this model"):
            read_head_beside(head, model, read_spec(model))
        assert "output.weight" not in head.tensors
