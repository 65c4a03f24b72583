"""What is read of the file of a draft head, and what is refused."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.errors import UnsupportedModel
from edgeinfer.gguf import ModelFile
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import check_target, fingerprint, is_draft_head, read_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny.gguf", "llama", "F16")


def test_keys_tensors_and_vocabulary_become_a_spec(target: Path, tmp_path: Path) -> None:
    path = write_tiny_head(tmp_path / "head.gguf", target, n_layers=2, draft_vocab=[0, 5, 290])
    with ModelFile.open(path) as file, ModelFile.open(target) as model:
        assert is_draft_head(file) and not is_draft_head(model)
        head = read_head(file)
        check_target(head, path, model, read_spec(model))
    assert head.draft_vocab.tolist() == [0, 5, 290] and head.draft_vocab.dtype == np.int32
    assert head.target.name == "tiny llama F16" and head.target.architecture == "llama"
    spec = head.decoder
    assert (spec.n_layers, spec.n_vocab, spec.n_logits, spec.n_embd, spec.head_dim) == (2, 291, 3, 96, 24)
    assert spec.output_norm is None and spec.gate is not None
    shapes = spec.tensor_shapes()
    assert shapes[spec.gate.mix] == (96, 192) and shapes["output.weight"] == (3, 96) and spec.token_embd not in shapes


def test_a_head_may_have_no_blocks(target: Path, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_head(tmp_path / "head.gguf", target, n_layers=0)) as file:
        assert read_head(file).decoder.layers == ()


def test_the_fingerprint_is_of_the_tokens_and_the_last_norm(target: Path, tmp_path: Path) -> None:
    with ModelFile.open(target) as file:
        tokens = "\0".join(file.metadata["tokenizer.ggml.tokens"]).encode()
        norm = file.data("output_norm.weight").tobytes()
        assert fingerprint(file) == hashlib.sha256(tokens + norm).hexdigest()
    requantised = write_tiny_model(tmp_path / "same.gguf", "llama", "Q8_0")
    tuned = write_tiny_model(tmp_path / "tuned.gguf", "llama", "F16", seed=1)
    with ModelFile.open(target) as a, ModelFile.open(requantised) as b, ModelFile.open(tuned) as c:
        assert fingerprint(a) == fingerprint(b) != fingerprint(c)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"metadata": {"draft-head.kind": "medusa"}}, "draft-head.kind must be dgf: found 'medusa'"),
        ({"metadata": {"draft-head.kind": None}}, "draft-head.kind must be dgf: found None|must be a text: found None"),
        ({"metadata": {"draft-head.target.fingerprint": None}}, "target.fingerprint must be a text"),
        ({"metadata": {"draft-head.block_count": 2}}, "blk.1.* is missing"),
        ({"metadata": {"draft-head.block_count": -1 & 0xFFFF}}, "block_count must be an integer in 0..4096"),
        ({"metadata": {"draft-head.attention.head_count": 5}}, "must divide|must have shape|even"),
        ({"metadata": {"draft-head.feed_forward_length": 97}}, "must have shape"),
        ({"metadata": {"draft-head.embedding_length": 64}}, "must have shape"),
        ({"leave_out": "gate.mix"}, "gate.mix.weight .* is missing"),
        ({"leave_out": "draft_vocab"}, "draft_vocab must be I32 .*: found none"),
        ({"draft_vocab": [3, 3, 4]}, "must be ascending: found 3 behind 3"),
        ({"draft_vocab": [5, 4, 290]}, "must be ascending: found 4 behind 5"),
        ({"draft_vocab": [-1, 4]}, r"must be ids in 0\.\.290: found -1\.\.4"),
        (
            {"draft_vocab": [4, 290], "metadata": {"draft-head.target.vocab_size": 290}},
            r"ids in 0\.\.289: found 4\.\.290",
        ),
    ],
)
def test_a_head_that_does_not_fit_itself_is_refused_with_the_reason(target, tmp_path, options, message) -> None:
    with ModelFile.open(write_tiny_head(tmp_path / "head.gguf", target, **options)) as file:
        with pytest.raises(UnsupportedModel, match=message):
            read_head(file)


@pytest.mark.parametrize(
    "other, message",
    [
        (
            {"n_embd": 64},
            r"F16 \(291 tokens, rows of 96\), but .*other.gguf is .* \(291 tokens, rows of 64\)",
        ),
        ({"n_vocab": 300}, r"\(291 tokens, rows of 96\), but .* \(300 tokens"),
        ({"seed": 7}, r"fingerprint [0-9a-f]{16}\), but .*other.gguf is tiny llama F16 \(fingerprint"),
        ({"vocabulary": "spm"}, "fingerprint"),
    ],
)
def test_a_head_of_another_model_is_refused_naming_both(target, tmp_path, other, message) -> None:
    head = write_tiny_head(tmp_path / "head.gguf", target)
    another = write_tiny_model(tmp_path / "other.gguf", "llama", "F16", **other)
    with ModelFile.open(head) as file, ModelFile.open(another) as model:
        with pytest.raises(UnsupportedModel, match=message):
            check_target(read_head(file), head, model, read_spec(model))
