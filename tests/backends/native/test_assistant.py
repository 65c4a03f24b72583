"""Assistants of Gemma 4: the native engine against the numpy oracle, and the same bits in every pass."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import same_bits
from reference_head import ReferenceAssistant, open_reference_assistant
from tiny_assistants import write_tiny_assistant
from tiny_gemma4 import GEMMA4_VARIANTS, Gemma4Variant, write_tiny_gemma4
from tiny_models import write_tiny_model

from edgeinfer.backends.base import Rows, TargetReader
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import (
    NativeAssistantModel,
    NativeAssistantSession,
    NativeBackend,
    NativeSession,
    available_isas,
    load_assistant,
    plan_head,
)
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import EdgeInferError, Interrupted, InvalidArgument, ShapeError
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device, Features, TokenIds
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

WINDOW = 9
RNG = np.random.default_rng(4)
TEXT = RNG.integers(0, 259, 200).astype(np.int32)
CLUSTERS: list[dict[str, Any]] = [{}, {"n_clusters": 97, "n_used": 20}, {"n_clusters": 3, "n_used": 2}]


@dataclass
class Pair:
    """A target and its assistant on disk."""

    target: Path
    assistant: Path

    def native(
        self, cache_type: CacheType = "f16", isa: str | None = None, n_threads: int = 2, n_texts: int = 1
    ) -> Any:
        """(model of the target, model of the assistant)."""
        settings = LoadSettings(256, n_batch=64, n_threads=n_threads, cache_type=cache_type, parallel=n_texts)
        device = Device(n_threads, isa)
        with ModelFile.open(self.target) as model, ModelFile.open(self.assistant) as file:
            spec = read_spec(model)
            loaded = NativeBackend().load(model, spec, NativeBackend().plan(model, spec, settings), device)
            head = read_head_beside(file, model, spec)
            return loaded, load_assistant(file, head, loaded, plan_head(file, head, settings), device)

    def sessions(self, n_past: int, **options: Any) -> tuple[NativeSession, NativeAssistantSession]:
        """A session of the target with so many tokens of TEXT, and one of the assistant that reads it."""
        target, assistant = self.native(**options)
        session, reader = target.session(), assistant.session()
        read(session, n_past)
        reader.follow(session)
        return session, reader

    def reference(self, n_past: int, cache_type: CacheType = "f16") -> ReferenceAssistant:
        with ModelFile.open(self.target) as model, ModelFile.open(self.assistant) as file:
            spec, backend = read_spec(model), ReferenceBackend("int8")
            plan = backend.plan(model, spec, LoadSettings(256, cache_type=cache_type))
            session = backend.load(model, spec, plan, Device(1)).session()
            read(session, n_past)
            return open_reference_assistant(file, read_head_beside(file, model, spec), model, session, "int8")


def read(session: Any, n_past: int) -> None:
    for first in range(0, n_past, 64):
        session.forward(TEXT[first : min(n_past, first + 64)], logits=())
        session.commit(range(min(64, n_past - first)))


def rows(n: int, seed: int = 0) -> tuple[TokenIds, Features]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 259, n).astype(np.int32), rng.standard_normal((n, 96)).astype(np.float32)


@pytest.fixture
def pair_of(tmp_path: Path) -> Callable[..., Pair]:
    def made(variant: Gemma4Variant = "small", tensor_type: str = "F16", **options: Any) -> Pair:
        target = write_tiny_gemma4(tmp_path / "target.gguf", variant, tensor_type, window=WINDOW)
        return Pair(target, write_tiny_assistant(tmp_path / "a.gguf", target, tensor_type=tensor_type, **options))

    return made


@pytest.mark.parametrize("clusters", CLUSTERS, ids=["whole", "97 clusters", "3 clusters"])
@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("variant", GEMMA4_VARIANTS)
def test_drafts_equal_those_of_the_reference(
    pair_of: Callable[..., Pair], variant: Gemma4Variant, tensor_type: str, clusters: dict[str, Any]
) -> None:
    pair, errors, n_same = pair_of(variant, tensor_type, **clusters), [], 0
    for n_past in (1, 8, 9, 150):
        (_, ours), theirs = pair.sessions(n_past), pair.reference(n_past)
        tokens, features = rows(5, n_past)
        a, b = (each.forward(tokens, features, logits="all") for each in (ours, theirs))
        assert a.hidden is not None and b.hidden is not None and a.logits.shape == b.logits.shape
        errors.extend(np.abs(a.hidden[0] - b.hidden[0]).max(axis=1) / np.abs(b.hidden[0]).max())
        for row in range(5):  # of near scores another cluster may be chosen
            if a.tokens is None or b.tokens is None or np.array_equal(a.tokens[row], b.tokens[row]):
                n_same += 1
                errors.append(np.abs(a.logits[row] - b.logits[row]).max() / np.abs(b.logits).max())
    # Keys and values of the two targets differ by roundings, to half floats and of what goes into products: after one
    # token by few.
    is_float = tensor_type in ("F32", "F16")
    assert n_same >= (15 if is_float else 8) and np.median(errors[:10]) < 1e-4
    assert np.max(errors) < (2e-3 if is_float else 0.15)


@pytest.mark.parametrize("cache_type", ["q8_0", "k6v4"])
def test_the_types_of_the_target_s_cache_are_read(pair_of: Callable[..., Pair], cache_type: CacheType) -> None:
    pair = pair_of("dense")
    tokens, features = rows(5)
    _, ours = pair.sessions(150, cache_type=cache_type)
    found = ours.forward(tokens, features, logits="all").logits
    expected = pair.reference(150, cache_type).forward(tokens, features, logits="all").logits
    assert np.abs(found - expected).max() < 3e-2 * np.abs(expected).max()


@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=["whole", "clusters"])
def test_pass_threads_and_instruction_set_change_no_bit(pair_of: Callable[..., Pair], clusters: dict[str, Any]) -> None:
    pair = pair_of("small", "Q8_0", **clusters)
    tokens, features = rows(7)
    expected = None
    for isa in available_isas():
        for n_threads in (1, 3):
            _, reader = pair.sessions(150, isa=isa, n_threads=n_threads)
            together = reader.forward(tokens, features, logits="all")
            alone = [reader.forward(tokens[i : i + 1], features[i : i + 1]) for i in range(7)]
            expected = expected or together
            assert same_bits(together.logits, expected.logits) and same_bits(together.hidden, expected.hidden)  # type: ignore
            assert same_bits(np.concatenate([each.logits for each in alone]), expected.logits)
            if expected.tokens is not None:
                assert np.array_equal(np.concatenate([each.tokens for each in alone]), expected.tokens)


@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=["whole", "clusters"])
def test_rows_of_several_texts_are_what_they_are_alone(pair_of: Callable[..., Pair], clusters: dict[str, Any]) -> None:
    target, assistant = pair_of("experts", "Q8_0", **clusters).native(n_texts=3)
    sessions = [target.session() for _ in range(3)]
    readers = [assistant.session() for _ in range(3)]
    for session, reader, n_past in zip(sessions, readers, (3, 40, 120), strict=True):
        read(session, n_past)
        reader.follow(session)
    batch = []
    for i, reader in enumerate(readers):
        tokens, features = rows(30, i)
        batch.append(Rows(reader, tokens, logits="all" if i else [3, 1], features=features))
    together = assistant.forward(batch)  # two passes of 64 rows at most
    for i, (each, out) in enumerate(zip(batch, together, strict=True)):
        alone = readers[i].forward(each.tokens, each.features, logits=each.logits)
        assert same_bits(out.logits, alone.logits) and same_bits(out.hidden, alone.hidden)  # type: ignore[arg-type]
        assert (out.tokens is None) == (alone.tokens is None)
        assert out.tokens is None or np.array_equal(out.tokens, alone.tokens)


def test_reading_leaves_the_target_as_it_is(pair_of: Callable[..., Pair]) -> None:
    """Whatever is drafted between its passes, and also while rows are pending."""
    pair = pair_of("dense", "Q8_0")
    session, reader = pair.sessions(130)
    plain, _ = pair.sessions(130)
    tokens, features = rows(6)
    before = reader.forward(tokens, features, logits="all").logits.copy()
    for first in range(130, 150, 5):
        ours, theirs = (each.forward(TEXT[first : first + 5], logits="all").logits for each in (session, plain))
        assert same_bits(ours, theirs)
        after = reader.forward(tokens, features, logits="all").logits
        assert same_bits(after, before)  # what is pending is not seen
        for each in (session, plain):
            each.commit(range(5))
        before = reader.forward(tokens, features, logits="all").logits.copy()
        assert not same_bits(before, after)
    assert session.truncate(146) == 146
    with_146 = reader.forward(tokens, features, logits="all").logits
    read(other := pair.native()[0].session(), 146)
    reader.model.target.session()  # another one changes nothing
    assert other.n_past == reader.n_past == 146
    assert same_bits(with_146, reader.forward(tokens, features, logits="all").logits)


def test_what_was_given_up_of_a_window_is_not_read(tmp_path: Path) -> None:
    """A text of several segments, of which layers with windows keep the last ones."""
    target = write_tiny_gemma4(tmp_path / "t.gguf", "dense", window=40, n_ctx_train=2048)
    pair = Pair(target, write_tiny_assistant(tmp_path / "a.gguf", target))
    models = []
    for n_ctx in (1024,):
        settings = LoadSettings(n_ctx, n_batch=64, n_threads=1)
        with ModelFile.open(pair.target) as model, ModelFile.open(pair.assistant) as file:
            spec = read_spec(model)
            loaded = NativeBackend().load(model, spec, NativeBackend().plan(model, spec, settings), Device(1))
            head = read_head_beside(file, model, spec)
            models = [loaded, load_assistant(file, head, loaded, plan_head(file, head, settings), Device(1))]
            backend = ReferenceBackend()
            reference = backend.load(model, spec, backend.plan(model, spec, LoadSettings(1024)), Device(1)).session()
            theirs = open_reference_assistant(file, head, model, reference)
    session, reader = models[0].session(), models[1].session()
    reader.follow(session)
    tokens, features = rows(3)
    text = np.random.default_rng(8).integers(0, 259, 960).astype(np.int32)
    for first in range(0, 960, 64):
        for each in (session, reference):
            each.forward(text[first : first + 64], logits=())
            each.commit(range(64))
    found, expected = (each.forward(tokens, features, logits="all").logits for each in (reader, theirs))
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_what_cannot_run_is_refused(pair_of: Callable[..., Pair], tmp_path: Path) -> None:
    pair = pair_of()
    target, assistant = pair.native()
    session, reader = target.session(), assistant.session()
    tokens, features = rows(2)
    assert isinstance(reader, TargetReader)
    with pytest.raises(ShapeError, match="what its target has read: found no committed token"):
        reader.forward(tokens, features)
    reader.follow(session)
    with pytest.raises(ShapeError, match="found no committed token"):
        reader.forward(tokens, features)
    read(session, 4)
    for bad, message in [(features[:1], "features must be"), (features[:, :64], "features must be")]:
        with pytest.raises(ShapeError, match=message):
            reader.forward(tokens, bad)
    with pytest.raises(ShapeError, match="token ids must be"):
        reader.forward([291, 0], features)
    with pytest.raises(ShapeError, match="64 rows of a session at once: found 65"):
        reader.forward(*rows(65))
    with pytest.raises(ShapeError, match="need features"):
        assistant.forward([Rows(reader, tokens)])
    with pytest.raises(InvalidArgument, match="no layers to choose from"):
        assistant.forward([Rows(reader, tokens, hidden=True, features=features)])
    with pytest.raises(InvalidArgument, match="of the model that it was loaded for"):
        reader.follow(pair.native()[0].session())
    session.close()
    read_on = target.session()
    reader.follow(read_on)
    read(read_on, 192)
    read_on.forward(TEXT[:64], logits=())
    read_on.commit(range(64))
    with pytest.raises(ShapeError, match="context of 256 tokens is full"):
        reader.forward(tokens, features)
    read_on.close()
    with pytest.raises(EdgeInferError, match="this session is closed"):
        reader.forward(tokens, features)
    reader.close()
    with pytest.raises(EdgeInferError, match="this session is closed"):
        reader.forward(tokens, features)


def test_an_interrupt_ends_a_pass_and_no_more(pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    _, reader = pair_of().sessions(20)
    tokens, features = rows(2)
    expected = reader.forward(tokens, features).logits.copy()
    decoder = reader.model.decoder()

    class Interrupting:
        """Is interrupted between the count of interrupts and the pass."""

        interrupts = property(lambda self: (decoder.interrupts, reader.interrupt())[0])

        def __getattr__(self, name: str) -> Any:
            return getattr(decoder, name)

    with monkeypatch.context() as patch:
        patch.setattr(reader.model, "decoder", Interrupting)
        with pytest.raises(Interrupted):
            reader.forward(tokens, features)
    assert same_bits(reader.forward(tokens, features).logits, expected)


@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=["whole", "clusters"])
def test_memory_is_as_planned(pair_of: Callable[..., Pair], clusters: dict[str, Any]) -> None:
    pair = pair_of("dense", "Q8_0", **clusters)
    settings = LoadSettings(256, n_batch=64, n_threads=2)
    with ModelFile.open(pair.target) as model, ModelFile.open(pair.assistant) as file:
        head = read_head_beside(file, model, read_spec(model))
        planned = plan_head(file, head, settings).use
    _, assistant = pair.native()
    assert isinstance(assistant, NativeAssistantModel)
    assert assistant.memory() == planned and planned.kv_cache == 0 and planned.weights > 60_000
    assistant.close()
    gc.collect()
    with pytest.raises(EdgeInferError, match="this model is closed"):
        assistant.memory()


def test_a_head_that_keeps_its_own_is_no_reader(tmp_path: Path) -> None:
    session = NativeBackend()
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F16")
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        loaded = session.load(file, spec, session.plan(file, spec, LoadSettings(64)), Device(1)).session()
    assert not isinstance(loaded, TargetReader)
