"""Texts of Gemma 4: those of plain decoding, whoever drafts, through the engine and in a conversation."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting import PROMPT, FixedCosts, FunctionDrafter, random_tree, tokens_of, with_drafters
from tiny_gemma4 import GEMMA4_VARIANTS, write_tiny_gemma4
from tiny_heads import write_tiny_head

import edgeinfer

REQUESTS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 1}]

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module", params=GEMMA4_VARIANTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("gemma4") / "m.gguf", request.param, "Q8_0")


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Any]:
    with edgeinfer.load(path, draft="none", n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        yield engine


@pytest.mark.parametrize("draft", ["auto", "model", "head"])
def test_each_drafter_gives_the_tokens_of_plain_decoding(path: Path, plain: Any, draft: str) -> None:
    named: dict[str, Any] = {"auto": "auto"}
    if draft == "model":
        named["model"] = str(write_tiny_gemma4(path.with_name("draft.gguf"), "small", "Q8_0", seed=3))
    if draft == "head":
        text = [*plain.tokenize(PROMPT), *tokens_of(plain, REQUESTS[0])]
        named["head"] = [str(write_tiny_head(path.with_name("head.gguf"), path, [text]))]
    with edgeinfer.load(path, draft=named[draft], n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        engine.speculator.costs = FixedCosts()
        for request in REQUESTS:
            for prompt in (PROMPT, "something else"):
                assert tokens_of(engine, request, prompt=prompt) == tokens_of(plain, request, prompt=prompt)


@pytest.mark.parametrize("seed", range(2))
def test_random_trees_change_no_token(path: Path, plain: Any, seed: int) -> None:
    rng = random.Random(seed)
    with edgeinfer.load(path, n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        n_vocab = engine.tokenizer.n_vocab
        with_drafters(engine, FunctionDrafter(lambda context, limit: random_tree(n_vocab, rng, limit)))
        for request in REQUESTS:
            assert tokens_of(engine, request) == tokens_of(plain, request)


def test_a_profile_plans_what_a_load_takes(path: Path, plain: Any) -> None:
    found = edgeinfer.profile(path, n_ctx=256, draft="none")
    items = {item.purpose: item for item in plain.memory.items}
    for purpose in ("weights", "KV cache"):
        assert found.ledger.of(purpose) == items[purpose].planned
