"""Speculation where the target, and what drafts for it, hold windows of a text that is much longer."""

from pathlib import Path

import pytest
from drafting import FixedCosts
from tiny_models import write_tiny_model

import edgeinfer

REQUESTS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
PROMPT = "hello world, there is the one, there is the one and hello. " * 12

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "gemma2.gguf", "gemma2", "F32", n_ctx_train=2048)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same floats in another type: it mostly agrees with the model."""
    return write_tiny_model(tmp_path_factory.mktemp("draft") / "draft.gguf", "gemma2", "Q8_0", n_ctx_train=2048)


@pytest.mark.parametrize("draft", ["auto", "FILE"])
def test_long_texts_are_those_of_full_caches_without_drafts(draft: str, model: Path, draft_model: Path) -> None:
    drafts = str(draft_model) if draft == "FILE" else draft
    with (
        edgeinfer.load(model, n_ctx=2048, n_batch=2048, draft="none", parallel=1) as whole,
        edgeinfer.load(model, n_ctx=2048, n_batch=16, draft=drafts, draft_device="cpu", parallel=1) as engine,
    ):
        for each in (whole, engine):
            each.tokenizer.stop_ids = frozenset()
        assert engine.memory_plan.use.kv_cache < 0.6 * whole.memory_plan.use.kv_cache
        assert engine.speculator is not None
        engine.speculator.costs = FixedCosts()
        for prompt in (PROMPT, PROMPT + " again", "something else " + PROMPT, PROMPT[:300]):
            for request in REQUESTS:
                expected = whole.generate(prompt, max_tokens=80, **request)
                assert len(expected.tokens) == 80
                assert engine.generate(prompt, max_tokens=80, **request).tokens == expected.tokens
        assert engine.session.memory().kv_cache <= engine.memory_plan.use.kv_cache
