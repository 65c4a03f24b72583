"""However the native engine reads its weights, the bits are the same."""

from pathlib import Path

import numpy as np
import pytest
from exactness import TREE, decode_one_by_one, prefill, same_bits
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend, NativeSession, available_isas, tuning
from edgeinfer.backends.native.tuning import MOST_TOKENS, Prefetch
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
FORMATS += ["TQ1_0", "TQ2_0", "I2_S", "Q2_0", "MXFP4"]
N_PROMPT = 32


def opened(path: Path, n_threads: int = 2, isa: str | None = None, tuned: bool = True) -> NativeSession:
    file = ModelFile.open(path)
    spec, backend = read_spec(file), NativeBackend(tuned=tuned)
    plan = backend.plan(file, spec, LoadSettings(128, n_batch=64, n_threads=n_threads))
    return backend.load(file, spec, plan, Device(n_threads, isa)).session()


def any_prefetch(rng: np.random.Generator) -> Prefetch:
    """One of all choices that there are."""
    return Prefetch(
        ahead=64 * int(rng.choice([0, 1, 74, 192, 1024])),
        easy=bool(rng.integers(2)),
        hint=int(rng.integers(3)),
        at_once=int(rng.choice([1, 2, 3, 4])),
        tokens=int(rng.integers(1, MOST_TOKENS + 1)),
        task=int(rng.choice([0, 1, 5000, 1 << 20])),
        tasks_each=int(rng.choice([1, 4, 64])),
        eager=bool(rng.integers(2)),
    )


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("format", FORMATS)
def test_all_choices_give_the_same_bits(format: str, isa: str, tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", format, n_ff=800 if format in ("F32", "Q8_0") else None)
    text = rng.integers(0, 290, N_PROMPT + len(TREE)).astype(np.int32)
    prompt, rest = text[:N_PROMPT], text[N_PROMPT:]
    plain = opened(path, isa=isa, tuned=False)
    prefill(plain, prompt, N_PROMPT)
    expected = decode_one_by_one(plain, rest)
    plain.truncate(N_PROMPT)
    tree = plain.forward(rest, TREE, logits="all").logits
    for n_threads in (1, 2, 3):
        session = opened(path, n_threads, isa, tuned=False)
        prefill(session, prompt, N_PROMPT)
        for _ in range(10):
            for n in range(1, MOST_TOKENS + 1):
                for is_ternary in (False, True):
                    session.model.decoder().set_prefetch(is_ternary, n, tuple(any_prefetch(rng)))
                logits = session.forward(rest[:n], logits="all").logits
                assert same_bits(logits, expected[:n]), (n, session.model.decoder().prefetch(False, n))
            assert same_bits(session.forward(rest, TREE, logits="all").logits, tree)


@pytest.mark.parametrize("format", ["Q4_K", "I2_S"])
def test_a_session_that_was_tuned_gives_the_same_bits_and_begins_empty(
    format: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    path = write_tiny_model(tmp_path / "m.gguf", "llama", format, n_layers=5)
    text = rng.integers(0, 290, 40).astype(np.int32)
    plain = opened(path, tuned=False)
    expected = prefill(plain, text, len(text))
    assert plain.model.tuning is None
    monkeypatch.setattr(tuning, "LEAST_BYTES", 0)
    monkeypatch.setattr(tuning, "_LEAST_BUSY", 0.0)
    for origin in ("measured", "kept"):
        session = opened(path)
        assert session.model.tuning is not None and session.model.tuning.origin == origin and session.n_past == 0
        used = {
            n: Prefetch(*session.model.decoder().prefetch(format == "I2_S", n)) for n in session.model.tuning.streams
        }
        assert used == session.model.tuning.streams
        assert same_bits(prefill(session, text, len(text)), expected)


def test_parts_of_a_pass_read_all_weights_between_them(tmp_path: Path) -> None:
    session = opened(write_tiny_model(tmp_path / "m.gguf", "qwen2", "Q4_K", n_layers=7, n_vocab=512))
    decoder = session.model.tuned(8)
    matrices = 7 * sum(_matrix_bytes(shape) for shape in ((256, 256), (128, 256), (128, 256), (256, 256)))
    matrices += 7 * 3 * _matrix_bytes((768, 256)) + _matrix_bytes((512, 256))
    for n_parts in (1, 2, 4):
        assert sum(decoder.part_bytes(n_parts, part) for part in range(n_parts)) == matrices
        assert all(decoder.seconds_of_part(n, n_parts, n_parts - 1) > 0 for n in (1, 3, 8))
    session.forward([1, 2, 3])
    session.commit(range(3))
    decoder.seconds_of_part(2, 1, 0)
    assert session.n_past == 3


def _matrix_bytes(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * 144 // 256  # Q4_K


def test_parts_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    decoder = opened(write_tiny_model(tmp_path / "m.gguf")).model.tuned(64)
    for n_parts, part in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(IndexError, match="no such part"):
            decoder.seconds_of_part(1, n_parts, part)
        with pytest.raises(IndexError, match="no such part"):
            decoder.part_bytes(n_parts, part)
    for n in (0, 65):
        with pytest.raises(ValueError, match="do not fit together"):
            decoder.seconds_of_part(n, 1, 0)
    for n in (0, 9):
        with pytest.raises(ValueError, match="only products of a few tokens"):
            decoder.prefetch(False, n)


def test_a_wrong_variable_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    monkeypatch.setenv(tuning.VARIABLE, "fast")
    with pytest.raises(InvalidArgument, match="EDGEINFER_TUNE must be auto, off, again: found 'fast'"):
        opened(path)
    assert opened(path, tuned=False).model.tuning is None
