"""The target in torch: the logits of the reference, of one pass or of many, and the answers of the native engine."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from more_blocks import experts_like
from numpy.testing import assert_allclose, assert_array_equal
from parts import missing
from tiny_models import Architecture, write_tiny_model

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
import torch

import edgeinfer
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import NumericalError, UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, TokenIds
from edgeinfer.models import Dense, read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.training import agreement, batch_author
from edgeinfer.training import target as target_module
from edgeinfer.training.author import MIN_ANSWER, NativeAuthor, tree_rows
from edgeinfer.training.batch_author import BatchAuthor, TorchRecorder
from edgeinfer.training.corpus import AnswerRequest, Mix
from edgeinfer.training.features import Halves, NativeRecorder, Taps
from edgeinfer.training.head import HeadSizes
from edgeinfer.training.prompts import Prompt
from edgeinfer.training.target import KVCache, TorchTarget

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tensor_type", ["F32", "Q4_1", "Q4_K"])
def test_logits_equal_those_of_the_reference(
    architecture: Architecture, tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, tensor_type, rope_freqs=architecture != "qwen3")
    texts = [rng.integers(0, 291, n).astype(np.int32) for n in [4] * 24 + [40]]
    with ModelFile.open(path) as file:
        backend, spec = ReferenceBackend("int8"), read_spec(file)
        session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64, n_batch=64)), Device(1)).session()
        target = TorchTarget(file, spec, CPU)
        logits = [target.logits(rows).numpy() for rows in target.text_features(texts)]
        expected = [session.forward(text, logits="all").logits for text in texts]
    errors = [np.abs(a - b).max(axis=1) / np.abs(b).max() for a, b in zip(logits, expected, strict=True)]
    # As between the native engine and the reference: see test_native.py.
    assert np.mean(np.concatenate(errors[:24]) < 5e-6) > 0.6
    assert max(map(np.max, errors)) < (1e-3 if tensor_type == "F32" else 3e-2)


def test_a_text_read_in_steps_has_the_features_of_one_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    tokens = torch.from_numpy(rng.integers(0, 291, (2, 12)))
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", tensor_type="F32")) as file:
        target = TorchTarget(file, read_spec(file), CPU)
    whole = target.text_features([row.numpy() for row in tokens])
    cache = KVCache.empty(target.spec, 2, 16, CPU)
    for position in range(12):
        positions = torch.full((2, 1), position)
        mask = torch.ones((2, 1, 1, position + 1), dtype=torch.bool)
        rows = target.features(tokens[:, position : position + 1], positions, mask, cache)
        for text in range(2):
            assert_allclose(rows[text, 0].numpy(), whole[text][position].numpy(), atol=2e-3)


def test_a_recipe_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    for architecture, words in (("gemma2", "soft caps"), ("olmo2", "norms over whole queries"), ("granite", "a scale")):
        with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", architecture)) as file:
            with pytest.raises(UnsupportedModel, match=f"cannot be trained for {architecture}, which has {words}"):
                TorchTarget(file, read_spec(file), CPU)


def test_every_layer_is_looked_at(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama")) as file:
        spec = read_spec(file)
        for role, changes, words in [
            ("mixer", {"window": 9}, "windows of attention in layers.1.mixer"),
            ("mixer", {"post_norm": "blk.1.post_attention_norm.weight"}, "norms after attention in layers.1.mixer"),
            ("mixer", {"n_in": 512}, "attention from rows of 512 numbers in layers.1.mixer"),
            ("ffn", {"activation": "relu2"}, "an activation other than SiLU in layers.1.ffn"),
            ("ffn", {"sub_norm": "blk.1.ffn_sub_norm.weight"}, "norms inside the network in layers.1.ffn"),
        ]:
            layer = replace(spec.layers[1], **{role: replace(getattr(spec.layers[1], role), **changes)})
            with pytest.raises(UnsupportedModel, match=f"cannot be trained for llama, which has {words}; it can"):
                TorchTarget(file, replace(spec, layers=(spec.layers[0], layer)), CPU)


def test_unknown_blocks_and_fields_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama")) as file:
        spec = read_spec(file)
        dense = spec.layers[1].ffn
        kind = make_dataclass("Clamped", [("clamp", float | None, None)], bases=(Dense,), frozen=True)
        block = kind(**vars(dense), clamp=7.0)
        other = replace(spec, layers=(spec.layers[0], replace(spec.layers[1], ffn=block)))
        with pytest.raises(UnsupportedModel, match="layers.1.ffn is a block Clamped, which the training"):
            TorchTarget(file, other, CPU)
        monkeypatch.setitem(target_module.BLOCKS, kind, target_module.BLOCKS[Dense])  # as if Dense had got the field
        monkeypatch.setitem(target_module._NOT_COMPUTED, kind, target_module._NOT_COMPUTED[Dense])
        with pytest.raises(UnsupportedModel, match=r"layers.1.ffn has clamp, which the training backend does not know"):
            TorchTarget(file, other, CPU)


def test_experts_and_attention_sinks_are_refused_by_name(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama")) as file:
        spec = read_spec(file)
        layer = spec.layers[1]
        sinks = replace(layer, mixer=replace(layer.mixer, sinks="blk.1.attn_sinks.weight"))
        for other, message in [
            (replace(layer, ffn=experts_like(layer)), "layers.1.ffn is a block Experts, which the training"),
            (sinks, "layers.1.mixer has sinks, which the training"),
        ]:
            with pytest.raises(UnsupportedModel, match=message):
                TorchTarget(file, replace(spec, layers=(spec.layers[0], other)), CPU)


def test_a_head_is_not_made_for_layers_of_several_sizes(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama")) as file:
        spec = read_spec(file)
        assert HeadSizes.of(file, spec, 1).n_heads == 4
        layer = replace(spec.layers[1], mixer=replace(spec.layers[1].mixer, n_heads=2))
        with pytest.raises(UnsupportedModel, match=r"must all be the same: found .* \(768, 2, 2\), \(768, 4, 2\)"):
            HeadSizes.of(file, replace(spec, layers=(spec.layers[0], layer)), 1)


def test_layers_have_heads_and_caches_of_their_own(tmp_path: Path, rng: np.random.Generator) -> None:
    """The second layer's rows are read as half the heads of twice the size."""
    tokens = rng.integers(0, 291, 12).astype(np.int32)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", tensor_type="F32")) as file:
        spec = read_spec(file)
        mixer = replace(spec.layers[1].mixer, n_heads=2, n_kv_heads=1, head_dim=48, scale=0.11, rope=None)
        other = replace(spec, layers=(spec.layers[0], replace(spec.layers[1], mixer=mixer)))
        backend, target = ReferenceBackend("int8"), TorchTarget(file, other, CPU)
        session = backend.load(
            file, other, backend.plan(file, other, LoadSettings(64, n_batch=64)), Device(1)
        ).session()
    expected = session.forward(tokens, logits="all").logits
    cache, found = KVCache.empty(other, 1, 16, CPU), []
    for position, token in enumerate(tokens):
        mask = torch.ones((1, 1, 1, position + 1), dtype=torch.bool)
        rows = target.features(torch.tensor([[int(token)]]), torch.tensor([[position]]), mask, cache)
        found.append(target.logits(rows[0, 0]).numpy())
    assert_allclose(np.stack(found), expected, atol=2e-3 * np.abs(expected).max())
    assert KVCache.bytes_of(other, 16) == sum(part.nbytes for part in (*cache.keys, *cache.values))


def test_a_target_that_parts_from_the_native_engine_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensor_type="Q4_K")
    tokens = rng.integers(0, 291, 60).astype(np.int32)
    with edgeinfer.load(path, draft="none") as engine, ModelFile.open(path) as file:
        target = TorchTarget(file, read_spec(file), CPU)
        found = agreement.check(target, engine.session, [tokens])
        assert found.deviation < 0.02 and found.same_token > 0.9 and found.n_tokens == 60
        target._whole["blk.1.attn_k.weight"].values.mul_(-1.0)
        with pytest.raises(NumericalError, match=r"must give the native engine's logits to within 0.15"):
            agreement.check(target, engine.session, [tokens])


def test_both_authors_write_the_same_greedy_answers_and_keep_to_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensor_type="F32", n_embd=64)
    monkeypatch.setattr(batch_author, "READ_AT_ONCE", 2)
    monkeypatch.setattr(batch_author, "SHORT", 25)
    prompts = [Prompt((f"number {n} " * (n + 1),)) for n in range(6)] + [Prompt(("word " * 200,))]
    greedy, sampled = Mix(3, 1.0, 0.8), Mix(3, 0.0, 0.8)
    with edgeinfer.load(path, n_ctx=128, draft="none") as engine, ModelFile.open(path) as file:
        native = NativeAuthor(engine, 128, 24)
        batch = BatchAuthor(TorchTarget(file, read_spec(file), CPU), engine, 128, 24, n_prompts=32)
        ours, theirs = (author.write([greedy.request(prompt) for prompt in prompts]) for author in (batch, native))
        drawn = batch.write([sampled.request(prompt) for prompt in prompts])
        again = batch.write([sampled.request(prompt) for prompt in prompts])
        stop_ids = engine.tokenizer.stop_ids
    assert len(ours) == len(theirs) == 6  # the last has no room
    same = [mine.tokens.tolist() == other.tokens.tolist() for mine, other in zip(ours, theirs, strict=True)]
    assert sum(same) >= 5  # one may have two tokens as likely
    assert [text.n_prompt for text in ours] == [text.n_prompt for text in theirs]
    for text in (*ours, *drawn):
        answer = text.tokens[text.n_prompt :].tolist()
        assert 1 <= len(answer) <= 24 and not stop_ids.intersection(answer[:-1])
        assert len(answer) == 24 or answer[-1] in stop_ids or len(text.tokens) == 128
    assert [text.tokens.tolist() for text in drawn] == [text.tokens.tolist() for text in again]
    assert [text.tokens.tolist() for text in drawn] != [text.tokens.tolist() for text in ours]
    assert all(text.is_greedy for text in ours) and not any(text.is_greedy for text in drawn)


def test_answers_written_side_by_side_are_those_written_alone(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensor_type="Q4_K", n_embd=256)
    mix = Mix(5, 0.5, 0.9)
    prompts = [Prompt(tuple(f"turn {turn} of {n}, " * (n % 4 + 1) for turn in range(1 + n % 2))) for n in range(9)]
    requests = [mix.request(prompt) for prompt in prompts]
    with edgeinfer.load(path, n_ctx=400, n_batch=400, draft="none") as engine:
        session, sizes = engine.session, []
        forward = session.forward
        session.forward = lambda tokens, *rest, **named: sizes.append(len(tokens)) or forward(tokens, *rest, **named)
        texts = NativeAuthor(engine, 400, 24).write(requests)
        session.forward = forward
        assert 2 * len(sizes) < sum(text.n_answer for text in texts)  # several in a pass; not all fit into one tree
        at = 0
        for request in requests:
            conversation = engine.chat()
            for turn in request.prompt.turns:
                text = texts[at]
                room = 400 - text.n_prompt
                assert room >= MIN_ANSWER
                stream = conversation.send(turn, params=request.params, max_tokens=min(24, room))
                for _ in stream:
                    pass
                answer, done = text.tokens[text.n_prompt :].tolist(), stream.completion
                assert stream.completion.usage.prompt_tokens == text.n_prompt
                assert answer[: len(done.tokens)] == list(done.tokens)
                assert len(answer) - len(done.tokens) == (done.finish_reason == "stop")
                at += 1
    assert at == len(texts) and {text.is_greedy for text in texts} == {True, False}


@pytest.mark.parametrize("taps", [True, (0, 1)])
def test_answers_come_with_the_rows_that_would_be_recorded(taps: Taps, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensor_type="Q4_K", n_embd=256)
    prompts = [Prompt(tuple(f"turn {turn} of {n}, " * (n % 3 + 1) for turn in range(1 + n % 2))) for n in range(7)]
    requests = Mix(5, 0.5, 0.9).requests([*prompts, Prompt(("word " * 45,))])  # the last one ends with its context
    with edgeinfer.load(path, n_ctx=300, n_batch=300, draft="none") as engine:
        without = NativeAuthor(engine, 300, 24).write(requests)
        texts = NativeAuthor(engine, 300, 24, taps).write(requests)
        recorded = NativeRecorder(engine.session, taps).record([text.tokens for text in texts])
    assert len(texts) > len(requests) and all(text.rows is None for text in without)
    for text, other, rows in zip(texts, without, recorded, strict=True):
        assert_array_equal(text.tokens, other.tokens)
        assert text.rows is not None
        assert_array_equal(text.rows, rows)


def test_trees_hold_what_changes_no_model(tmp_path: Path) -> None:
    def rows(architecture: Architecture, context: int) -> int:
        with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", architecture, rope_freqs=True)) as file:
            return tree_rows(read_spec(file), context)

    assert rows("llama", 64) > 64 and rows("llama", 5000) == 5000
    assert rows("phi3", 64) == 64  # whose rotation is another one in longer contexts


def test_a_conversation_has_a_text_for_each_turn(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensor_type="F32", n_embd=64)
    with edgeinfer.load(path, n_ctx=256, draft="none") as engine:
        request = AnswerRequest(Prompt(("one", "two")), Mix(3, 1.0, 0.8).request(Prompt(("one",))).params)
        first, second = NativeAuthor(engine, 256, 10).write([request])
    assert second.n_prompt > len(first.tokens) - 1
    assert second.tokens[: first.n_prompt].tolist() == first.tokens[: first.n_prompt].tolist()


def test_recorders_agree(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensor_type="F32")
    texts = [rng.integers(0, 291, n).astype(np.int32) for n in (5, 17, 1)]
    with edgeinfer.load(path, n_ctx=64, n_batch=8, draft="none") as engine, ModelFile.open(path) as file:
        spec = read_spec(file)
        native = NativeRecorder(engine.session).record(texts)
        target = TorchTarget(file, spec, CPU)
        ours = TorchRecorder(target, 4).record(texts)
        of_layers = NativeRecorder(engine.session, (0, 1)).record(texts), TorchRecorder(target, 4, (0, 1)).record(texts)
        branches, firsts = rng.integers(0, 291, (3, 4)).astype(np.int32), np.array([1, 9, 15])
        of_branches = [
            recorder.record_branches(texts[1], firsts, branches)
            for recorder in (NativeRecorder(engine.session, (0, 1)), TorchRecorder(target, 4, (0, 1)))
        ]
        whole = NativeRecorder(engine.session, (0, 1)).record(
            [np.concatenate([texts[1][:n], branch]) for n, branch in zip(firsts, branches, strict=True)]
        )
        output = target.output.numpy()
        logits = engine.session.forward(texts[1], logits="last").logits
    for mine, theirs in zip(ours, native, strict=True):
        assert mine.dtype == theirs.dtype == np.float16
        assert_allclose(mine.astype(np.float32), theirs.astype(np.float32), atol=0.02)
    assert_allclose(output @ native[1][-1].astype(np.float32), logits[0], atol=0.03)  # after the norm
    for first, rows, mine, theirs in zip(firsts, whole, *of_branches, strict=True):
        assert mine.tobytes() == rows[first:].tobytes() and mine.shape == theirs.shape == (4, 2 * spec.n_embd)
        assert_allclose(mine.astype(np.float32), theirs.astype(np.float32), atol=0.02 * np.abs(mine).max())
    for features, mine, theirs in zip(native, *of_layers, strict=True):
        assert mine.shape == (len(features), 2 * spec.n_embd)
        assert_allclose(mine.astype(np.float32), theirs.astype(np.float32), atol=0.02 * np.abs(theirs).max())
        last = target.after_last_norm(torch.from_numpy(mine).float())
        assert_allclose(last.numpy(), features.astype(np.float32), atol=0.02)


def test_threads_that_record_at_once_get_their_own_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensor_type="F32")
    texts = [rng.integers(0, 291, n).astype(np.int32) for n in (30, 41, 23, 37) * 8]
    firsts, branch = np.array([4, 9]), rng.integers(0, 291, (2, 3)).astype(np.int32)
    with edgeinfer.load(path, n_ctx=64, n_batch=8, draft="none") as engine, ThreadPoolExecutor(3) as threads:
        recorder = NativeRecorder(engine.session)

        def both(text: TokenIds) -> list[Halves]:
            return [*recorder.record([text]), recorder.record_branches(text, firsts, branch)]

        for mine, alone in zip(threads.map(both, texts), [both(text) for text in texts], strict=True):
            assert [rows.tobytes() for rows in mine] == [rows.tobytes() for rows in alone]
