"""Texts of models with latent attention and with gates: those of plain decoding, whoever drafts, also from disk."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting import PROMPT, FixedCosts, FunctionDrafter, random_tree, tokens_of, with_drafters
from tiny_gated import write_tiny_gated
from tiny_heads import write_tiny_head
from tiny_latents import write_tiny_latents

import edgeinfer

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2)),
]
WRITERS: dict[str, Callable[[Path], Path]] = {
    "v3": lambda path: write_tiny_latents(path, "v3", "Q8_0"),
    "glm": lambda path: write_tiny_latents(path, "glm", "Q8_0", n_ctx_train=1024),
    "laguna": lambda path: write_tiny_gated(path, "laguna", "Q8_0", n_ctx_train=1024),
    "muse": lambda path: write_tiny_gated(path, "muse-glimmer", "Q8_0"),
}

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module", params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("latent") / "m.gguf")


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Any]:
    with edgeinfer.load(path, draft="none", n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        yield engine


@pytest.fixture(scope="module")
def drafters(path: Path, plain: Any) -> dict[str, Any]:
    """By name: those without a model, a draft model with latent attention, and a head."""
    model = write_tiny_latents(path.with_name("draft.gguf"), "lite", "Q8_0", n_layers=2, seed=3)
    text = [*plain.tokenize(PROMPT), *tokens_of(plain, REQUESTS[0])]
    head = write_tiny_head(path.with_name("head.gguf"), path, [text])
    return {"auto": "auto", "recycling": "recycling", "model": str(model), "head": [str(head)]}


@pytest.mark.parametrize("draft", ["auto", "recycling", "model", "head"])
def test_each_drafter_gives_the_tokens_of_plain_decoding(
    path: Path, plain: Any, drafters: dict[str, Any], draft: str
) -> None:
    with edgeinfer.load(path, draft=drafters[draft], n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        engine.speculator.costs = FixedCosts()
        for request in REQUESTS:
            for prompt in (PROMPT, PROMPT + " again"):
                assert tokens_of(engine, request, prompt=prompt) == tokens_of(plain, request, prompt=prompt)


def test_random_trees_change_no_token(path: Path, plain: Any) -> None:
    rng = random.Random(1)
    with edgeinfer.load(path, n_ctx=256) as engine:
        engine.tokenizer.stop_ids = frozenset()
        n_vocab = engine.tokenizer.n_vocab
        with_drafters(engine, FunctionDrafter(lambda context, limit: random_tree(n_vocab, rng, limit)))
        for request in REQUESTS:
            assert tokens_of(engine, request) == tokens_of(plain, request)


@pytest.mark.parametrize("name, cache_type", [("glm", "f16"), ("glm", "q8_0"), ("laguna", "f16")])
def test_what_is_read_from_disk_gives_the_text_of_what_is_computed(
    name: str, cache_type: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, prompt = WRITERS[name](tmp_path / "m.gguf"), random.Random(0).choices(range(3, 250), k=500)

    def ask(cache_disk: str | None) -> Any:
        options: dict[str, Any] = {"draft": "none", "cache_type": cache_type, "cache_disk": cache_disk}
        with edgeinfer.load(path, **options) as engine:
            completion = engine.generate(prompt, max_tokens=30, temperature=0.8, seed=4)
            assert engine.contexts is None or engine.contexts.flush(60)
        return completion

    whole = ask(None)
    assert ask("64MiB").tokens == whole.tokens
    again = ask("64MiB")
    assert again.usage.cached_tokens in (len(prompt) - 1, 384) and again.tokens == whole.tokens  # 384: with windows


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_the_block_of_glm_drafts_and_the_text_is_that_of_plain_decoding(
    tmp_path: Path, request_: dict[str, Any]
) -> None:
    path, found = WRITERS["glm"](tmp_path / "m.gguf"), []
    for draft in ("none", "mtp"):
        with edgeinfer.load(path, draft=draft, n_ctx=256) as engine:
            engine.tokenizer.stop_ids = frozenset()
            if engine.speculator is not None:
                assert engine.speculator.drafters[-1].name == "head"
                engine.speculator.costs = FixedCosts()
            found.append(engine.generate(PROMPT, max_tokens=48, **request_))
    assert found[0].tokens == found[1].tokens
    assert found[1].timings.speculation.by_drafter["head"].drafted > 10
