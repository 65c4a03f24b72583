"""Draft models and heads for several texts: their drafts are passes of all of them, and change nothing."""

import random
import shutil

import numpy as np
import pytest
from drafting import FixedCosts
from other_vocabulary import write_reordered
from random_requests import random_requests, served
from tiny_heads import write_tiny_eagle3, write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import CacheFull, NumericalError
from edgeinfer.speculation.drafters.known_text import SEGMENT, FeatureMemory, KnownText

PROMPTS = [f"hello world number {i}, there is the one and there is {'more ' * (3 * i)}" for i in range(6)]
GREEDY = {"temperature": 0.0}

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=1024)


@pytest.fixture(scope="module")
def expected(model):
    """The completions of the prompts alone, greedily and drawn."""
    with edgeinfer.load(model, draft="none", parallel=1) as engine:
        engine.tokenizer.stop_ids = frozenset()
        return {t: [engine.generate(p, max_tokens=60, temperature=t, seed=5).tokens for p in PROMPTS] for t in (0, 0.8)}


@pytest.fixture(scope="module", params=["model", "other vocabulary", "head", "taps", "eagle3"])
def draft(request, model, expected, tmp_path_factory):
    """A draft model or a head that is mostly right on these texts."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    if request.param == "model":
        return shutil.copy(model, path)
    if request.param == "other vocabulary":
        return write_reordered(path, model, random.Random(3).sample(range(291), 291))
    with edgeinfer.load(model, draft="none") as engine:
        texts = [[*engine.tokenize(p), *tokens] for p, tokens in zip(PROMPTS, expected[0], strict=True)]
    if request.param == "eagle3":
        return write_tiny_eagle3(path, model, texts)
    return write_tiny_head(path, model, texts, **({"taps": (0, 1)} if request.param == "taps" else {"n_layers": 1}))


@pytest.fixture
def opened(model, draft):
    engines = []

    def load(**changes):
        engine = edgeinfer.load(model, backend="native", **{"parallel": 4, "draft": [str(draft)]} | changes)
        engine.tokenizer.stop_ids = frozenset()
        engine.speculator.costs = FixedCosts()
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()


def joint_passes(engine, monkeypatch):
    """Numbers of texts of the passes of the draft model or the head that are of several, from now on."""
    model, sizes = engine.speculator.drafters[-1].session.model, []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda batch: sizes.append(len(batch)) or forward(batch))
    return sizes


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_texts_share_the_passes_of_a_drafter_and_are_what_they_are_alone(opened, expected, temperature, monkeypatch):
    engine = opened()
    sizes = joint_passes(engine, monkeypatch)
    found = list(engine.generate_many(PROMPTS, max_tokens=60, temperature=temperature, seed=5))
    assert [each.tokens for each in found] == expected[temperature]
    assert max(sizes, default=0) == 4, "four at once"
    name = engine.speculator.drafters[-1].name
    assert all(each.timings.speculation.dropped == {} for each in found)
    assert all(0 < each.timings.speculation.waited_seconds < 60 for each in found)
    accepted = [each.timings.speculation.by_drafter[name].accepted for each in found]
    assert all(accepted) if temperature == 0 else any(accepted)


def test_memory_stays_as_planned(opened):
    engine = opened()
    for _ in range(3):
        list(engine.generate_many(PROMPTS, max_tokens=60, **GREEDY))
    held, planned = engine.speculator.held(), engine.memory_plan.use.drafters
    assert set(held) >= {"weights", "caches", "rows"} and sum(held.values()) <= planned


def test_random_requests_give_what_they_give_alone(model, draft):
    requests = random_requests(24, 3)
    with edgeinfer.load(model, draft="none", parallel=1) as engine:
        alone = [request.run(engine) for request in requests]
    with edgeinfer.load(model, draft=[str(draft)], parallel=4, n_ctx=400, n_batch=32) as engine:
        engine.speculator.costs = FixedCosts()
        assert served(engine, requests, 8) == alone


@pytest.mark.parametrize("error", [CacheFull(128), NumericalError("a pass that fails")])
def test_a_joint_pass_of_a_drafter_that_fails_changes_no_text(opened, expected, error, monkeypatch):
    """Where memory is short, the drafter is asked again; after another error it is not."""
    engine, n_passes = opened(), []
    drafter = engine.speculator.drafters[-1]
    forward = drafter.session.model.forward

    def failing(batch):
        n_passes.append(len(batch))
        if len(batch) > 1 and len(n_passes) % 3 == 0:
            raise error
        return forward(batch)

    monkeypatch.setattr(drafter.session.model, "forward", failing)
    found = list(engine.generate_many(PROMPTS[:4], max_tokens=60, **GREEDY))
    assert [each.tokens for each in found] == expected[0][:4] and len(n_passes) > 2
    dropped = [drafter.name in each.timings.speculation.dropped for each in found]
    assert any(dropped) == isinstance(error, NumericalError)


def test_the_memory_of_a_text_that_ended_is_had_by_others(opened, expected):
    """Each place keeps what it has of its last text, until others need it."""
    engine = opened(n_ctx=256, n_batch=32)
    for prompt in [*PROMPTS, *PROMPTS[::-1]]:
        list(engine.generate_many([prompt, PROMPTS[0], PROMPTS[1]], max_tokens=40, **GREEDY))
    found = list(engine.generate_many(PROMPTS[:3], max_tokens=40, **GREEDY))
    assert [each.tokens for each in found] == [tokens[:40] for tokens in expected[0][:3]]
    name = engine.speculator.drafters[-1].name
    assert all(name in each.timings.speculation.by_drafter for each in found)


def test_known_texts_share_their_memory_and_keep_their_rows():
    """Against lists, for random texts that grow, are cut, begin anew and rest."""
    rng = random.Random(1)
    memory, gone = FeatureMemory(10 * SEGMENT, 3, n_texts=3), []
    texts = [KnownText(memory, lambda i=i: gone.append(i)) for i in range(3)]
    rows = [np.zeros((0, 3), np.float32) for _ in texts]
    n_full = 0
    for step in range(600):
        i = rng.randrange(3)
        text = texts[i]
        for each in gone:
            rows[each] = rows[each][:0]
        gone.clear()
        kind = rng.random()
        if kind < 0.1:
            start = rng.randrange(300)
            text.begin(list(range(start)), start)
            rows[i] = np.zeros((start, 3), np.float32)
        elif kind < 0.3 and len(text.tokens) > text.start:
            n = rng.randint(text.start, len(text.tokens))
            text.cut(n)
            rows[i] = rows[i][:n]
        elif kind < 0.4:
            memory.set_idle(text, True)
        else:
            memory.set_idle(text, False)
            n = rng.randint(1, 200)
            new = np.full((n, 3), step, np.float32) + np.arange(n, dtype=np.float32)[:, None] / 1024
            before = len(text.tokens)
            try:
                text.extend(list(range(before, before + n)), new)
            except CacheFull:
                n_full += 1
                assert len(text.tokens) == before
            else:
                rows[i] = np.concatenate([rows[i], new])
        for each in gone:
            rows[each] = rows[each][:0]
        gone.clear()
        for text, expected in zip(texts, rows, strict=True):
            assert len(text.tokens) == len(expected)
            if text.start < len(expected):
                assert np.array_equal(text.features(text.start, len(expected)), expected[text.start :])
    assert n_full > 3 and memory.n_bytes == memory.rows.nbytes and memory.rows.shape == (12, SEGMENT, 3)
