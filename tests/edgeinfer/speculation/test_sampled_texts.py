"""Texts with and without drafts are equal, for each drafter, at each temperature, with all that changes logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting import PROMPT, FixedCosts, tokens_of
from tiny_heads import write_tiny_head

import edgeinfer
from edgeinfer.engine import Engine

pytestmark = pytest.mark.usefixtures("native")

TEMPERATURES = (0.0, 0.2, 0.8, 1.5)
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {"min_p": 0.0, "top_k": 0},
    "min-p": {"min_p": 0.3},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6, "penalty_last_n": 24},
    "DRY": {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": ["one"]},
    "biases": {"logit_bias": {104: 4.0, 111: 4.0, 260: False, 270: -1.5}},
}
CHANGES["all of them"] = {name: value for change in list(CHANGES.values())[1:] for name, value in change.items()}
N_TOKENS = 24


@pytest.fixture(scope="module")
def texts(model: Path) -> dict[tuple[float, str], tuple[int, ...]]:
    """What the model writes without drafts, by temperature and change."""
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        return {
            (temperature, name): tuple(tokens_of(engine, change | {"temperature": temperature, "seed": 7}, N_TOKENS))
            for temperature in TEMPERATURES
            for name, change in CHANGES.items()
        }


@pytest.fixture(scope="module")
def drafts(
    model: Path, draft_model: Path, texts: dict[tuple[float, str], tuple[int, ...]], tmp_path_factory: Any
) -> dict[str, list[str]]:
    """What to draft with, by name; the head is right on what the model writes greedily."""
    with edgeinfer.load(model, draft="none") as engine:
        text = [*engine.tokenize(PROMPT), *texts[0.0, "nothing"]]
    head = write_tiny_head(tmp_path_factory.mktemp("head") / "head.gguf", model, [text])
    files = {"model": draft_model, "head": head}
    return {name: [name] for name in ("suffix", "recycling", "answers")} | {n: [str(f)] for n, f in files.items()}


@pytest.fixture(scope="module")
def drafting(model: Path, drafts: dict[str, list[str]]) -> Iterator[Callable[[str], Engine]]:
    """Engines by the name of their drafter."""
    engines: dict[str, Engine] = {}

    def of(name: str) -> Engine:
        if name not in engines:
            engine = engines[name] = edgeinfer.load(model, draft=drafts[name])
            engine.tokenizer.stop_ids = frozenset()
            assert engine.speculator is not None
            engine.speculator.costs = FixedCosts(lambda n: 10.0 + 0.01 * n if n <= 9 else 1e4)
        return engines[name]

    yield of
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("drafter", ["suffix", "recycling", "answers", "model", "head"])
def test_drafts_change_no_token(
    drafting: Callable[[str], Engine],
    texts: dict[tuple[float, str], tuple[int, ...]],
    drafter: str,
    temperature: float,
) -> None:
    """Each answer is drawn twice: what copies earlier text is right then."""
    engine, accepted, drafted = drafting(drafter), 0, 0
    for name, change in CHANGES.items():
        for _ in range(2):
            answer = engine.generate(PROMPT, max_tokens=N_TOKENS, temperature=temperature, seed=7, **change)
            assert tuple(answer.tokens) == texts[temperature, name], name
            of = answer.timings.speculation
            assert of is not None and of.dropped == {}
            accepted += sum(depth.accepted for depth in of.by_depth)
            drafted += sum(depth.drafted for depth in of.by_depth)
    assert 5 <= accepted < drafted


def test_the_texts_that_are_compared_differ(texts: dict[tuple[float, str], tuple[int, ...]]) -> None:
    assert len(set(texts.values())) > 18 and len(texts) == 24
