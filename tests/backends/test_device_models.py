"""Models on OpenCL and ONNX Runtime, whose weights several sessions share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_sessions import Kind, backend_of, difference, head_backend_of, some_tokens
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.base import HeadModel, Model, Rows
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.common.errors import ContextOverflow, EdgeInferError, InvalidArgument
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile


@pytest.fixture
def model(kind: Kind, tmp_path: Path) -> Model:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "gemma2", "F32")) as file:
        backend, spec = backend_of(kind), read_spec(file)
        return backend.load(file, spec, backend.plan(file, spec, LoadSettings(128, n_batch=16)), Device(1))


@pytest.fixture
def head_model(kind: Kind, tmp_path: Path) -> HeadModel:
    target = write_tiny_model(tmp_path / "m.gguf", "llama", "F32")
    with ModelFile.open(write_tiny_head(tmp_path / "h.gguf", target)) as head, ModelFile.open(target) as file:
        backend, spec = head_backend_of(kind, file), read_head_beside(head, file, read_spec(file))
        loaded: HeadModel = backend.load(head, spec, backend.plan(head, spec, LoadSettings(128, n_batch=16)), Device(1))
        return loaded


def test_the_rows_of_several_texts_are_what_each_gives_alone(model: Model, rng: np.random.Generator) -> None:
    tokens = [some_tokens(rng, n) for n in (30, 1, 6)]
    parents = [None, None, [-1, 0, 0, 1, -1, 4]]
    alone = []
    for text, links in zip(tokens, parents, strict=True):
        session = model.session()
        session.forward(text[:1])
        session.commit([0])
        alone.append(session.forward(text, links, logits="all", hidden=(0,)))
    together = [model.session() for _ in tokens]
    firsts = model.forward([Rows(session, text[:1]) for session, text in zip(together, tokens, strict=True)])
    assert [len(out.logits) for out in firsts] == [1, 1, 1]
    for session in together:
        session.commit([0])
    batch = [
        Rows(session, text, links, logits="all", hidden=(0,))
        for session, text, links in zip(together, tokens, parents, strict=True)
    ]
    for ours, theirs in zip(model.forward(batch), alone, strict=True):
        assert ours.hidden is not None and theirs.hidden is not None
        assert difference(ours.logits, theirs.logits) < 1e-6 and difference(ours.hidden, theirs.hidden) < 1e-6
    together[2].commit([0, 2])
    assert [session.n_past for session in together] == [1, 1, 3]
    together[0].close()
    assert getattr(together[0], "_cache", "none") is None  # its memory is free
    assert together[1].forward([3]).logits.shape == (1, model.spec.n_vocab)


def test_a_session_may_be_shorter_and_no_longer_than_planned(model: Model, rng: np.random.Generator) -> None:
    tokens = some_tokens(rng, 20)
    short, long = model.session(20), model.session()
    assert (short.n_ctx, long.n_ctx, short.model, short.spec) == (20, 128, model, model.spec)
    assert difference(short.forward(tokens).logits, long.forward(tokens).logits) < 1e-6
    assert short.memory().kv_cache <= long.memory().kv_cache and model.memory().kv_cache == 0
    with pytest.raises(ContextOverflow):
        short.forward([1] * 21)
    sizes: list[Any] = [0, 129, "x", True]
    for size in sizes:
        with pytest.raises(InvalidArgument, match=rf"must be an integer in 1\.\.128: found {size!r}"):
            model.session(size)
    other: Any = "q4"
    with pytest.raises(InvalidArgument, match="cache_type must be f16, q8_0 or k6v4: found 'q4'"):
        model.session(cache_type=other)
    with pytest.raises(InvalidArgument, match="KV cache of f16 only: found q8_0"):
        model.session(cache_type="q8_0")


def test_rows_that_do_not_belong_into_a_pass_are_refused(model: Model, tmp_path: Path, kind: Kind) -> None:
    session, other = model.session(), model.session()
    with pytest.raises(InvalidArgument, match="found none"):
        model.forward([])
    with pytest.raises(InvalidArgument, match="once in a pass"):
        model.forward([Rows(session, [1]), Rows(session, [2])])
    with pytest.raises(InvalidArgument, match="found n_pending 1, features none"):
        model.forward([Rows(session, [1], n_pending=1)])
    with pytest.raises(InvalidArgument, match="found n_pending 0, features given"):
        model.forward([Rows(session, [1], features=np.zeros((1, 96), dtype=np.float32))])
    with pytest.raises(ContextOverflow):  # the second one: then the first has no rows either
        model.forward([Rows(session, [1, 2]), Rows(other, [1] * 129)])
    with pytest.raises(EdgeInferError):
        session.commit([0])
    assert session.truncate(0) == 0


def test_a_closed_model_closes_its_sessions(model: Model) -> None:
    session = model.session()
    model.close()
    for call in (lambda: session.forward([1]), lambda: session.memory(), model.memory, model.session):
        with pytest.raises(EdgeInferError, match="this model is closed"):
            call()
    model.interrupt()


def test_texts_of_a_head_share_its_weights_too(head_model: HeadModel, rng: np.random.Generator) -> None:
    tokens = [some_tokens(rng, n) for n in (9, 4)]
    features = [rng.standard_normal((n, 96), dtype=np.float32) for n in (9, 4)]
    alone = [head_model.session().forward(*each, logits="all") for each in zip(tokens, features, strict=True)]
    first, second = head_model.session(), head_model.session(20)
    assert first.n_ctx == 128 and second.n_ctx == 20 and first.spec is head_model.spec
    out = head_model.forward(
        [
            Rows(first, tokens[0], features=features[0], logits="all"),
            Rows(second, tokens[1], features=features[1], logits="all"),
        ]
    )
    for ours, theirs in zip(out, alone, strict=True):
        assert difference(ours.logits, theirs.logits) < 1e-6
    second.commit([0, 1])
    assert (first.n_past, second.n_past) == (0, 2)
    [more] = head_model.forward([Rows(first, tokens[1], features=features[1], n_pending=9)])
    assert more.logits.shape == (1, head_model.spec.decoder.n_logits)
    with pytest.raises(InvalidArgument, match="leave `hidden` out"):
        head_model.forward([Rows(first, tokens[1], features=features[1], hidden=True)])


@pytest.mark.parametrize("kind", ["onnx contrib", "onnx plain"], indirect=True)
def test_a_session_whose_rotations_are_not_those_of_the_graph_is_refused(kind: Kind, tmp_path: Path) -> None:
    keys = {"phi3.rope.scaling.original_context_length": 64}
    path = write_tiny_model(tmp_path / "m.gguf", "phi3", "F32", rope_freqs=True, metadata=keys)
    with ModelFile.open(path) as file:
        backend, spec = backend_of(kind), read_spec(file)
        model = backend.load(file, spec, backend.plan(file, spec, LoadSettings(128)), Device(1))
    assert model.session(65).n_ctx == 65
    with pytest.raises(InvalidArgument, match="64 positions has other rotations than the graph, .* made for 128"):
        model.session(64)


@pytest.mark.parametrize("kind", ["opencl"], indirect=True)
def test_on_opencl_each_session_has_the_rotations_of_its_length(kind: Kind, tmp_path: Path) -> None:
    keys = {"phi3.rope.scaling.original_context_length": 64}
    path = write_tiny_model(tmp_path / "m.gguf", "phi3", "F32", rope_freqs=True, metadata=keys)
    tokens = np.arange(30, dtype=np.int32)
    with ModelFile.open(path) as file:
        backend, spec = backend_of(kind), read_spec(file)
        both = backend.load(file, spec, backend.plan(file, spec, LoadSettings(128)), Device(1))
        short = (
            backend.load(file, spec, backend.plan(file, spec, LoadSettings(64)), Device(1))
            .session()
            .forward(tokens)
            .logits
        )
    assert difference(both.session(64).forward(tokens).logits, short) < 1e-6
    assert difference(both.session(65).forward(tokens).logits, short) > 1e-2
