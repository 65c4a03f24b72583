"""Assistants of Gemma 4 in the engine: the texts are those of plain decoding, and a fitted one is often right."""

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import PROMPT, FixedCosts, tokens_of
from tiny_assistants import write_tiny_assistant
from tiny_gemma4 import GEMMA4_VARIANTS, write_tiny_gemma4
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.native import NativeAssistantSession
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.loading import plan as load_plan
from edgeinfer.memory.process import Process
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.calibration import measure_costs
from edgeinfer.speculation.draft_source import TimedReader
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.head import HeadDrafter

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2, 3)),
    {"temperature": 0.7, "repeat_penalty": 1.2, "seed": 5},
]
PROMPTS = (PROMPT, PROMPT + " again", "something else", PROMPT + " and then " * 20)  # all longer than the window

pytestmark = pytest.mark.usefixtures("native")


def opened(path: Path, **options: Any) -> Any:
    engine = edgeinfer.load(path, n_ctx=256, **options)
    engine.tokenizer.stop_ids = frozenset()
    if engine.speculator is not None:
        engine.speculator.costs = FixedCosts()
        for drafter in engine.speculator.drafters:
            if isinstance(drafter, HeadDrafter):
                drafter._costs = FixedCosts(lambda n: 0.1 + 0.001 * n)
    return engine


@dataclass(frozen=True)
class Pair:
    target: Path
    assistant: Path


@pytest.fixture(scope="module", params=[(variant, n) for variant in GEMMA4_VARIANTS for n in (0, 97)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """An assistant that is right about what its target writes greedily, with clusters of tokens and without."""
    variant, n_clusters = request.param
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_gemma4(folder / "target.gguf", variant, "Q8_0")
    with opened(target, draft="none") as engine:
        text = [*engine.tokenize(PROMPT), *tokens_of(engine, REQUESTS[0])]
    path = folder / "assistant.gguf"
    return Pair(target, write_tiny_assistant(path, target, [text], n_clusters=n_clusters, n_used=20))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Iterator[Any]:
    with opened(pair.target, draft="none") as engine:
        yield engine


def test_it_drafts_beside_the_drafters_without_a_model(pair: Pair) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(pair.target, draft=str(pair.assistant)) as engine:
            names = [drafter.name for drafter in engine.speculator.drafters]
            assert names == ["suffix", "answers", "recycling", "head"]
            assert isinstance(engine.speculator.drafters[-1].session, NativeAssistantSession)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_tokens_are_those_of_plain_decoding(pair: Pair, plain: Any, n_threads: int) -> None:
    for draft in (str(pair.assistant), [str(pair.assistant)]):
        with opened(pair.target, draft=draft, n_threads=n_threads) as engine:
            for request in REQUESTS:
                for prompt in PROMPTS:
                    expected = tokens_of(plain, request, prompt=prompt)
                    found = engine.generate(prompt, max_tokens=48, **request)
                    assert found.tokens == expected and found.timings.speculation.dropped == {}


@pytest.mark.parametrize("cache_type", ["q8_0", "k6v4"])
def test_with_every_type_of_cache(pair: Pair, cache_type: str) -> None:
    with opened(pair.target, draft="none", cache_type=cache_type) as plain:
        expected = [tokens_of(plain, request, prompt=PROMPTS[3]) for request in REQUESTS[:2]]
    with opened(pair.target, draft=[str(pair.assistant)], cache_type=cache_type) as engine:
        assert [tokens_of(engine, request, prompt=PROMPTS[3]) for request in REQUESTS[:2]] == expected


def test_it_is_right_where_it_was_fitted(pair: Pair) -> None:
    with opened(pair.target, draft=[str(pair.assistant)]) as engine:
        found = engine.generate(PROMPT, max_tokens=48, temperature=0.0)
        drafted = found.timings.speculation.by_drafter["head"]
        assert drafted.accepted > 20 and found.timings.tokens_per_step > 1.7


def test_a_conversation_that_goes_back_is_drafted_for(pair: Pair, plain: Any) -> None:
    """The second prompt shares a beginning with the first, and the third one is the first again."""
    with opened(pair.target, draft=[str(pair.assistant)]) as engine:
        for prompt in (PROMPTS[3], PROMPT + " and then others", PROMPTS[3]):
            found = engine.generate(prompt, max_tokens=32, temperature=0.0)
            assert found.tokens == tokens_of(plain, REQUESTS[0], 32, prompt) and found.timings.speculation.dropped == {}
            assert found.timings.speculation.by_drafter["head"].drafted > 0


def test_several_texts_at_once_are_what_they_are_alone(pair: Pair, plain: Any) -> None:
    prompts = [f"{PROMPT} {n}" for n in range(5)]
    requests = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
    with opened(pair.target, draft=[str(pair.assistant)], parallel=3) as engine:
        for request in requests:
            found = list(engine.generate_many(prompts, max_tokens=24, **request))
            assert sum(each.timings.speculation.by_drafter["head"].drafted for each in found) > 0
            assert [each.tokens for each in found] == [tokens_of(plain, request, 24, prompt) for prompt in prompts]


def test_its_memory_is_in_the_plan(pair: Pair) -> None:
    def planned(draft: Any, **options: Any) -> int:
        with opened(pair.target, draft=draft, **options) as engine:
            for request in REQUESTS[:2]:
                list(engine.generate_many([PROMPT, "another"], max_tokens=16, **request))
            items = {item.detail: item for item in engine.memory.items if item.purpose == "drafters"}
            assert all(item.taken is not None and item.taken <= item.planned for item in items.values())
            assert "caches" not in items or items["caches"].planned == 0
            total = sum(item.planned for item in items.values())
        assert total == edgeinfer.profile(pair.target, n_ctx=256, draft=draft, **options).ledger.of("drafters")
        return total

    for options in ({}, {"parallel": 3}):
        free = planned(["suffix", "answers", "recycling"], **options)
        assert planned(str(pair.assistant), **options) > free + 1e5


def test_it_is_left_out_where_there_is_no_room(pair: Pair, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
    with opened(pair.target, draft="none", parallel=1) as engine:
        budget = engine.memory.peak + 1000
    with pytest.warns(RuntimeWarning, match=r"reduced: no draft head \(assistant.gguf\)$"):
        engine = opened(pair.target, draft=[str(pair.assistant)], budget=budget, parallel=1)
    with engine:
        assert tokens_of(engine, REQUESTS[1]) == tokens_of(plain, REQUESTS[1])


def test_a_target_whose_experts_are_read_from_disk(tmp_path: Path) -> None:
    target = write_tiny_gemma4(tmp_path / "t.gguf", "experts", "Q8_0")
    assistant = write_tiny_assistant(tmp_path / "a.gguf", target)
    with opened(target, draft="none") as plain:
        n_bytes = plain.memory_plan.use.experts // 2
        expected = [tokens_of(plain, request) for request in REQUESTS]
    with opened(target, draft=[str(assistant)], expert_cache=n_bytes) as engine:
        assert [tokens_of(engine, request) for request in REQUESTS] == expected


def test_a_session_that_is_put_aside_and_taken_up_is_followed(pair: Pair, plain: Any) -> None:
    """More texts than places: some wait, and begin in a session that another one had."""
    prompts = [f"{PROMPT} {n} {random.Random(n).random()}" for n in range(7)]
    with opened(pair.target, draft=[str(pair.assistant)], parallel=2) as engine:
        found = [each.tokens for each in engine.generate_many(prompts, max_tokens=40, temperature=0.0)]
    assert found == [tokens_of(plain, REQUESTS[0], 40, prompt) for prompt in prompts]


def test_its_costs_are_measured_behind_tokens_of_the_target_which_is_empty_again(pair: Pair) -> None:
    with opened(pair.target, draft=[str(pair.assistant)]) as engine:
        session, head = engine.session, engine.speculator.drafters[0].session
        assert session.n_past == 0  # after the load, which measured too
        timed = TimedReader(session, head)
        curve = measure_costs(timed, 5.0)
        assert session.n_past == timed.n_past == 0
        assert curve.n_far == 192 and set(curve.far) <= set(curve.near) and {1, 2, 4, 8} <= set(curve.near)
        assert measure_costs(timed, 0.0).n_far == 0


def test_tokens_that_the_tokenizer_lacks_are_never_drafted(pair: Pair) -> None:
    """Of the last rows of a vocabulary, which only fill it up; also where the target samples."""
    with opened(pair.target, draft=[str(pair.assistant)]) as engine:
        head = engine.speculator.drafters[0]
        few = HeadDrafter(head.session, head._draft_vocab, 60, FixedCosts())
        ids = engine.tokenize(PROMPT)
        hidden = engine.session.forward(ids, hidden=True).hidden
        engine.session.commit(range(len(ids)))
        few.follow(engine.session)
        few.observe_features([*ids, 33], 0, hidden[0])
        for is_plain in (True, False):
            context = Context([*ids, 33], lambda logits, _: int(logits.argmax()), is_plain, is_plain=is_plain)
            context.acceptance = AcceptanceTable()
            context.acceptance.length_rule = ChainLengthRule([1.0] * 33, 0.001, 0.0, 12)
            tree = few.propose(context, 12)
            assert tree.tokens and max(tree.tokens) < 60
            assert np.isneginf(few._logits).all() or head.session.spec.clusters is None


def test_another_target_is_refused_by_what_differs(tmp_path: Path) -> None:
    target = write_tiny_gemma4(tmp_path / "t.gguf", "dense", "Q8_0")
    assistant = write_tiny_assistant(tmp_path / "a.gguf", target)
    llama = write_tiny_model(tmp_path / "llama.gguf", "llama", "Q8_0")
    wide = write_tiny_gemma4(tmp_path / "wide.gguf", "dense", "Q8_0", n_embd=128)
    few = write_tiny_gemma4(tmp_path / "few.gguf", "dense", "Q8_0", n_vocab=290)
    small = write_tiny_gemma4(tmp_path / "small.gguf", "small", "Q8_0")
    window = write_tiny_gemma4(tmp_path / "window.gguf", "dense", "Q8_0", window=20)
    turned = write_tiny_gemma4(tmp_path / "turned.gguf", "dense", "Q8_0", metadata={"gemma4.rope.freq_base": 1e4})
    for other, message in {
        llama: "of the architecture llama: it drafts for Gemma 4 only",
        wide: r"\(291 tokens, rows of 96\), but .*wide.gguf is tiny gemma4 Q8_0 \(291 tokens, rows of 128\)",
        few: r"\(290 tokens, rows of 96\): use the assistant of this model",
        small: "layer 3 attends to 1 heads of 64 numbers in layers that see everything, but .*, which has 2 heads of",
        window: "layer 0 attends to 2 heads of 32 numbers in layers that see a window of 9, but .* window of 20",
        turned: "which has 1 heads of 64 numbers in layers that see everything with another rotation",
    }.items():
        with pytest.raises(UnsupportedModel, match=f"a.gguf is an assistant of a Gemma 4 .*{message}"):
            edgeinfer.profile(other, draft=str(assistant))
        with pytest.warns(RuntimeWarning, match="without head: .*is an assistant of a Gemma 4"):
            opened(other, draft=str(assistant)).close()
    with pytest.raises(UnsupportedModel, match="a draft head, which drafts for a model"):
        edgeinfer.load(assistant)
