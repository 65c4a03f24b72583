"""The block of a model's own file that drafts: the texts are those of plain decoding, and it is often right."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting import PROMPT, FixedCosts, tokens_of
from fitted_blocks import write_fitted_hybrid
from recurrent_models import write_recurrent_model
from tiny_hybrids import write_tiny_hybrid

import edgeinfer
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.loading import plan as load_plan
from edgeinfer.memory.process import Process

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2, 3)),
]

pytestmark = pytest.mark.usefixtures("native")


def opened(path: Path, **options: Any) -> Any:
    engine = edgeinfer.load(path, n_ctx=256, **options)
    engine.tokenizer.stop_ids = frozenset()
    if engine.speculator is not None:
        engine.speculator.costs = FixedCosts()
    return engine


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe", "nemotron_h_moe+latent"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    with opened(write_recurrent_model(path, request.param, n_nextn=1), draft="none") as engine:
        text = [*engine.tokenize(PROMPT), *tokens_of(engine, REQUESTS[0])]
    return write_fitted_hybrid(path, [text], request.param)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Any]:
    with opened(path, draft="none") as engine:
        yield engine


def test_by_default_it_drafts_beside_the_others(path: Path) -> None:
    with opened(path) as engine:
        assert [drafter.name for drafter in engine.speculator.drafters] == ["suffix", "answers", "recycling", "head"]
    with opened(path, draft="suffix") as engine:
        assert [drafter.name for drafter in engine.speculator.drafters] == ["suffix"]
    with opened(path, draft=["mtp"]) as engine:
        assert [drafter.name for drafter in engine.speculator.drafters] == ["head"]


@pytest.mark.parametrize("draft", ["auto", "mtp", ["mtp"]], ids=str)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_tokens_are_those_of_plain_decoding(path: Path, plain: Any, draft: Any, n_threads: int) -> None:
    with opened(path, draft=draft, n_threads=n_threads) as engine:
        for request in REQUESTS:
            for prompt in (PROMPT, PROMPT + " again", "something else"):
                assert tokens_of(engine, request, prompt=prompt) == tokens_of(plain, request, prompt=prompt)


def test_it_is_right_where_it_was_fitted(path: Path) -> None:
    with opened(path, draft=["mtp"]) as engine:
        found = engine.generate(PROMPT, max_tokens=48, temperature=0.0)
        drafted = found.timings.speculation.by_drafter["head"]
        assert drafted.accepted > 25
        assert found.timings.tokens_per_step > 2


def test_a_model_without_it_loses_nothing_and_is_told_where_it_was_named(tmp_path: Path) -> None:
    path = write_tiny_hybrid(tmp_path / "m.gguf", "qwen35")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(path) as engine:
            assert [drafter.name for drafter in engine.speculator.drafters] == ["suffix", "answers", "recycling"]
    with pytest.warns(RuntimeWarning, match=r"without mtp: .*m.gguf: the model has no block that drafts"):
        opened(path, draft="mtp").close()
    with pytest.raises(UnsupportedModel, match="mtp cannot draft for this model: .* no block that drafts"):
        edgeinfer.profile(path, draft="mtp")


def test_the_experts_of_a_block_are_in_memory_as_planned_whatever_the_model_s_are(tmp_path: Path) -> None:
    """A cache of a quarter of the model's experts, and all of the block's."""
    path = write_tiny_hybrid(tmp_path / "m.gguf", "qwen35moe", "Q8_0", n_nextn=1)
    with opened(path, draft="none") as plain:
        of_layer = plain.memory_plan.use.experts // 4
        expected = [tokens_of(plain, request) for request in REQUESTS]
    with opened(path, draft="mtp", expert_cache=of_layer) as engine:
        assert [tokens_of(engine, request) for request in REQUESTS] == expected
        parts = {item.detail: item for item in engine.memory.items if item.purpose == "drafters"}
    with opened(path, draft="mtp") as engine:
        assert {item.detail: item.planned for item in engine.memory.items if item.purpose == "drafters"}["weights"] == (
            parts["weights"].planned
        )
    assert parts["weights"].planned > of_layer and parts["weights"].taken == parts["weights"].planned


def test_a_block_with_experts_is_left_out_where_there_is_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, request = write_tiny_hybrid(tmp_path / "m.gguf", "qwen35moe", n_nextn=1), REQUESTS[1]
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
    with opened(path, draft="none", parallel=1) as engine:
        budget, expected = engine.memory.peak + 1000, tokens_of(engine, request)
    with pytest.warns(RuntimeWarning, match=r"reduced: no draft head \(m.gguf\)$"):
        engine = opened(path, draft=["mtp"], budget=budget, parallel=1)
    with engine:
        assert tokens_of(engine, request) == expected


def test_its_memory_is_in_the_plan(path: Path) -> None:
    def planned(draft: Any) -> int:
        with opened(path, draft=draft) as engine:
            items = [item for item in engine.memory.items if item.purpose == "drafters"]
            assert all(item.taken is not None and item.taken <= item.planned for item in items)
            total = sum(item.planned for item in items)
        assert total == edgeinfer.profile(path, n_ctx=256, draft=draft).ledger.of("drafters")
        return total

    assert planned("auto") > planned(["suffix", "answers", "recycling"]) + 1e5


def test_several_texts_at_once_are_what_they_are_alone(path: Path, plain: Any) -> None:
    prompts = [f"{PROMPT} {n}" for n in range(5)]
    with opened(path, parallel=3) as engine:
        found = [each.tokens for each in engine.generate_many(prompts, max_tokens=24, temperature=0.0)]
    assert found == [plain.generate(prompt, max_tokens=24, temperature=0.0).tokens for prompt in prompts]
