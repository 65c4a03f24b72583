"""Texts of models with recurrent layers: those of plain decoding, whoever drafts and whatever was asked before."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting import PROMPT, FixedCosts, FunctionDrafter, random_tree, tokens_of, with_drafters
from recurrent_models import write_recurrent_model
from tiny_heads import write_tiny_head
from tiny_hybrids import write_tiny_hybrid

import edgeinfer

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2, 3)),
]
KINDS = ["qwen35", "lfm2moe", "nemotron_h_moe+latent", "falcon-h1"]

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent_model(tmp_path_factory.mktemp("hybrid") / "m.gguf", request.param, "Q8_0")


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Any]:
    with edgeinfer.load(path, draft="none", n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        yield engine


@pytest.fixture(scope="module")
def drafters(path: Path, plain: Any) -> dict[str, Any]:
    """By name: those without a model, a recurrent draft model with the same vocabulary, and a head."""
    model = write_tiny_hybrid(path.with_name("draft.gguf"), "qwen35", "Q8_0", kinds=["recurrent", "attention"], seed=3)
    text = [*plain.tokenize(PROMPT), *tokens_of(plain, REQUESTS[0])]
    head = write_tiny_head(path.with_name("head.gguf"), path, [text])
    named: dict[str, Any] = {name: name for name in ("auto", "suffix", "answers", "recycling")}
    return {**named, "model": str(model), "head": [str(head)]}


@pytest.mark.parametrize("draft", ["auto", "suffix", "answers", "recycling", "model", "head"])
def test_each_drafter_gives_the_tokens_of_plain_decoding(
    path: Path, plain: Any, drafters: dict[str, Any], draft: str
) -> None:
    with edgeinfer.load(path, draft=drafters[draft], n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        engine.speculator.costs = FixedCosts()
        for request in REQUESTS:
            for prompt in (PROMPT, PROMPT + " again", "something else"):
                assert tokens_of(engine, request, prompt=prompt) == tokens_of(plain, request, prompt=prompt)


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_change_no_token(path: Path, plain: Any, seed: int) -> None:
    rng = random.Random(seed)
    with edgeinfer.load(path, n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        n_vocab = engine.tokenizer.n_vocab
        with_drafters(engine, FunctionDrafter(lambda context, limit: random_tree(n_vocab, rng, limit)))
        for request in REQUESTS:
            assert tokens_of(engine, request) == tokens_of(plain, request)


def test_a_conversation_is_the_one_of_an_engine_that_reads_everything_anew(path: Path) -> None:
    def turns(fresh: bool) -> list[str]:
        texts, engine = [], edgeinfer.load(path, draft="none", n_ctx=512)
        chat = engine.chat()
        for question in ("a question of some words", "and another one", "the last"):
            if fresh:
                engine.session.truncate(0)
            answer = chat.send(question, max_tokens=12, temperature=0.7, seed=5)
            texts.append("".join(piece.text for piece in answer))
        engine.close()
        return texts

    assert turns(fresh=False) == turns(fresh=True)


def test_the_state_is_in_the_ledger(path: Path, plain: Any) -> None:
    items = {item.purpose: item for item in plain.memory.items}
    state = items["recurrent state"]
    assert state.taken is not None and 0 < state.taken <= state.planned
    assert items["KV cache"].planned > 0
    found = edgeinfer.profile(path, n_ctx=256, draft="none")
    assert found.ledger.of("recurrent state") == state.planned
