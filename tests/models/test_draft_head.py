"""What is read of the file of a draft head, and what is refused."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tiny_heads import write_tiny_eagle3, write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import (
    ConcatenatedInput,
    GatedFusion,
    check_target,
    fingerprint,
    is_draft_head,
    read_head,
)
from edgeinfer.models.gguf import ModelFile


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
    assert (spec.n_layers, spec.n_vocab, spec.n_logits, spec.n_embd) == (2, 291, 3, 96)
    assert spec.layers[0].mixer.head_dim == 24
    assert spec.output_norm is None and spec.token_embd is None and isinstance(head.front, GatedFusion)
    shapes = head.tensor_shapes()
    assert shapes[head.front.mix] == (96, 192) and shapes["output.weight"] == (3, 96)
    assert "token_embd.weight" not in shapes


def test_a_head_may_have_no_blocks(target: Path, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_head(tmp_path / "head.gguf", target, n_layers=0)) as file:
        assert read_head(file).decoder.layers == ()


def test_a_head_may_be_fed_by_rows_of_several_layers(target: Path, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_head(tmp_path / "head.gguf", target, taps=(0, 1))) as file:
        head = read_head(file)
        with ModelFile.open(target) as model:
            check_target(head, file.path, model, read_spec(model))
        shallow = write_tiny_model(tmp_path / "shallow.gguf", "llama", "F16", n_layers=1)
        with ModelFile.open(shallow) as model, pytest.raises(UnsupportedModel, match="goes on from layer 1, but"):
            check_target(head, file.path, model, read_spec(model))
    combine = head.features
    assert head.taps == (0, 1) and combine is not None and (combine.n_rows, combine.n_normed) == (192, 96)
    shapes = head.tensor_shapes()
    assert shapes["combine.weight"] == (96, 192) and shapes["combine_norm.weight"] == (192,)
    with ModelFile.open(write_tiny_head(tmp_path / "without.gguf", target)) as file:
        assert read_head(file).taps is True and read_head(file).features is None
    odd = write_tiny_model(tmp_path / "odd.gguf", "llama", "F16", n_embd=104)
    with ModelFile.open(write_tiny_head(tmp_path / "head.gguf", odd, taps=(1,))) as file:
        with pytest.raises(UnsupportedModel, match="must be a multiple of 16 with target_layers: found 104"):
            read_head(file)


def test_a_head_says_how_often_it_was_right(target: Path, tmp_path: Path) -> None:
    known = {"draft-head.matches": [0.5, 0.25, 0.0]}
    with ModelFile.open(write_tiny_head(tmp_path / "head.gguf", target, metadata=known)) as file:
        head = read_head(file)
    # of 1 + 0.5 + 0.125 tokens that a chain drafts until one is wrong
    assert head.matches == (0.5, 0.25, 0.0) and head.acceptance_rate == (0.5 + 0.125) / 1.625
    with ModelFile.open(write_tiny_head(tmp_path / "without.gguf", target)) as file:
        assert read_head(file).matches == () and read_head(file).acceptance_rate is None


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
        ({"taps": range(17)}, r"target_layers must be 1 to 16 layers from 0 on: found \[0, 1, 2"),
        ({"metadata": {"draft-head.target_layers": 3}}, "target_layers must be 1 to 16 layers from 0 on: found 3"),
        ({"taps": (4096,)}, r"target_layers must be 1 to 16 layers from 0 on: found \[4096\]"),
        ({"taps": (0, 1), "leave_out": "combine"}, "combine.weight .* is missing"),
        ({"taps": (0, 1), "leave_out": "combine_norm"}, "combine_norm.weight .* is missing"),
        ({"metadata": {"draft-head.target_layers": [1]}}, "combine.weight .* is missing"),
        ({"metadata": {"draft-head.matches": 0.5}}, "matches must be up to 64 shares from 0.0 to 1.0: found 0.5"),
        ({"metadata": {"draft-head.matches": [0.5, 1.5]}}, r"matches must be up to 64 .* found \[0.5, 1.5\]"),
        ({"metadata": {"draft-head.matches": [1, 0]}}, r"matches must be up to 64 .* found \[1, 0\]"),
        ({"metadata": {"draft-head.matches": [0.5] * 65}}, "matches must be up to 64 shares"),
        ({"leave_out": "output"}, "output.weight .* is missing"),
        (
            {"leave_out": "output", "metadata": {"draft-head.output_type": "Q4_K"}},
            "output_type must be F16, Q8_0, Q4_0: found 'Q4_K'",
        ),
        (
            {"leave_out": "output", "metadata": {"draft-head.output_type": 2}},
            "output_type must be F16, Q8_0, Q4_0: found 2",
        ),
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


def test_an_eagle3_head_becomes_a_spec(target: Path, tmp_path: Path) -> None:
    options = {"norm_before_fc": True, "norm_before_residual": True, "target_layers": (1, 1, 2)}
    path = write_tiny_eagle3(tmp_path / "head.gguf", target, draft_vocab=[0, 5, 290], **options)
    with ModelFile.open(path) as file, ModelFile.open(target) as model:
        assert is_draft_head(file)
        head = read_head(file)
        check_target(head, path, model, read_spec(model))
    spec = head.decoder
    assert head.draft_vocab.tolist() == [0, 5, 290] and head.draft_vocab.dtype == np.int32
    assert head.taps == (0, 0, 1) and head.feature_tap == 0 and spec.n_logits == 3 and spec.token_embd is None
    assert isinstance(head.front, ConcatenatedInput) and head.front.normed_residual
    assert head.features is not None and head.features.n_rows == head.features.n_normed == 288
    shapes = head.tensor_shapes()
    assert shapes["fc.weight"] == (96, 288) and shapes["enc.output_norm.weight"] == (288,)
    assert shapes["blk.0.attn_k.weight"] == (48, 192) and "token_embd.weight" not in shapes
    whole = write_tiny_eagle3(tmp_path / "whole.gguf", target, draft_vocab=None, has_embeddings=True, n_embd=64)
    with ModelFile.open(whole) as file:
        head = read_head(file)
    assert head.draft_vocab.tolist() == list(range(291))
    assert head.tensor_shapes()["token_embd.weight"] == (291, 64) and head.target.n_embd == 96


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target_layers": (0, 1, 2)}, r"target_layers must be 3 layers from 1 on: found \[0, 1, 2\]"),
        ({"target_layers": (1, 2)}, "target_layers must be 3 layers"),
        ({"metadata": {"eagle3.target_layers": None}}, "target_layers must be 3 layers"),
        ({"metadata": {"eagle3.block_count": 2}}, r"block_count must be an integer in 1\.\.1"),
        (
            {"metadata": {"eagle3.target_hidden_size": 64}},
            "target_hidden_size must be 96, as there is no embedding matrix",
        ),
        ({"metadata": {"eagle3.target_hidden_size": 64}, "has_embeddings": True}, "fc.weight must have shape"),
        ({"metadata": {"eagle3.norm_before_fc": 3}}, "norm_before_fc must be true or false"),
        ({"norm_before_fc": True, "leave_out": "enc.output_norm"}, "enc.output_norm.weight .* is missing"),
        ({"metadata": {"eagle3.target_hidden_size": 64}, "leave_out": "output"}, "as there is no output matrix"),
        ({"leave_out": "output"}, "output.weight is missing, and d2t has no use"),
        ({"leave_out": "blk.0.attn_norm_2"}, "attn_norm_2.weight .* is missing"),
        ({"leave_out": "output_norm"}, "output_norm.weight"),
        ({"draft_vocab": [5, 4]}, "d2t must be ascending: found 4 behind 5"),
        ({"draft_vocab": [5, 291]}, r"d2t must be ids in 0\.\.290"),
        ({"draft_vocab": [5, 1 << 40]}, r"d2t must be ids in 0\.\.290"),
    ],
)
def test_an_eagle3_head_that_does_not_fit_itself_is_refused_with_the_reason(target, tmp_path, options, message):
    with ModelFile.open(write_tiny_eagle3(tmp_path / "head.gguf", target, **options)) as file:
        with pytest.raises(UnsupportedModel, match=message):
            read_head(file)


@pytest.mark.parametrize(
    "other, message",
    [
        ({"n_embd": 64}, r"the target of tiny eagle3 \(291 tokens, rows of 96\), but .*other.gguf is .* rows of 64\)"),
        ({"n_layers": 1}, r"goes on from layer 1, but .*other.gguf is tiny llama F16 \(layers 0..0\)"),
        ({"vocabulary": "spm"}, "fingerprint"),
    ],
)
def test_an_eagle3_head_of_another_model_is_refused_with_what_differs(target, tmp_path, other, message) -> None:
    head = write_tiny_eagle3(tmp_path / "head.gguf", target)
    another = write_tiny_model(tmp_path / "other.gguf", "llama", "F16", **other)
    with ModelFile.open(head) as file, ModelFile.open(another) as model:
        with pytest.raises(UnsupportedModel, match=message):
            check_target(read_head(file), head, model, read_spec(model))


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
