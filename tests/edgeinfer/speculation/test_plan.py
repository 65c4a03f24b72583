"""Which drafters a plan has, and what it counts for them."""

import pytest
from drafting import PROMPT, FixedCosts, tokens_of

from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.loading import plan as load_plan
from edgeinfer.memory.process import Process
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.drafters.lookup import NgramLookup

pytestmark = pytest.mark.usefixtures("native")


def test_by_default_the_free_drafters_draft_and_are_in_the_plan(opened, model):
    engine = opened(model)
    assert [drafter.name for drafter in engine.speculator.drafters] == ["suffix", "answers", "recycling"]
    assert engine.memory_plan.use.drafters > 1_000_000
    assert opened(model, draft_max=0).speculator is None
    completion = engine.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert completion.timings.speculation.tokens == 39 and completion.timings.speculation.plain_seconds > 0


def test_a_draft_model_is_in_the_plan(opened, model, draft_model):
    with_model, without = opened(model, draft=str(draft_model)), opened(model)
    with ModelFile.open(draft_model) as file:
        n_threads, n_texts = with_model.device.n_threads, with_model.memory_plan.n_sequences
        plan = NativeBackend(for_drafts=True, resident=True).plan(
            file,
            read_spec(file),
            LoadSettings(
                with_model.n_ctx, n_batch=with_model.memory_plan.n_batch, n_threads=n_threads, parallel=n_texts
            ),
        )
    assert (
        with_model.memory_plan.use.drafters - without.memory_plan.use.drafters
        == plan.use.total + n_texts * NgramLookup.memory()
    )


@pytest.mark.parametrize("why", ["no file", "no model", "no room"])
def test_a_draft_model_that_cannot_be_used_is_left_out_with_the_reason(
    opened, plain, model, draft_model, tmp_path, monkeypatch, why
):
    path, expected, budget = draft_model, "", None
    if why == "no file":
        path, expected = tmp_path / "nothing.gguf", "nothing.gguf"
    elif why == "no model":
        path, expected = tmp_path / "text.gguf", "text.gguf"
        path.write_text("no model")
    else:
        monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
        budget, expected = (
            opened(model, parallel=1).memory.peak + 1000,
            f"reduced: no draft model \\({draft_model.name}\\)$",
        )
    with pytest.warns(RuntimeWarning, match=expected):
        engine = opened(model, draft=str(path), budget=budget, parallel=1)
    assert [drafter.name for drafter in engine.speculator.drafters] == ["suffix", "answers", "recycling"]
    assert tokens_of(engine, {"temperature": 0.0}) == tokens_of(plain, {"temperature": 0.0})


def test_answers_are_kept_in_a_file_where_that_is_asked_for(opened, plain, model, tmp_path):
    path, request = tmp_path / "answers.bin", {"temperature": 0.0}
    first = opened(model, draft=["answers"], draft_memory=path)
    text = tokens_of(first, request)
    first.close()
    engine = opened(model, draft=["answers"], draft_memory=str(path))
    engine.speculator.costs = FixedCosts()
    completion = engine.generate(PROMPT, max_tokens=48, **request)
    assert completion.tokens == text == tokens_of(plain, request)
    assert completion.timings.speculation.by_drafter["answers"].accepted > 20, "from the first process's answer"
    assert opened(model, draft=["answers"]).memory.of("drafters") == engine.memory.of("drafters")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"draft": "none"}, "answers are not kept in .*: nothing is to be drafted"),
        ({"draft_max": 0}, "answers are not kept in .*: nothing is to be drafted"),
        ({"draft": "suffix"}, "answers.bin is for them, and `draft` leaves them out"),
        ({"backend": "reference"}, "nothing is drafted: with the reference backend"),
    ],
)
def test_a_file_of_answers_that_nothing_drafts_from_is_told(opened, model, tmp_path, options, why):
    with pytest.warns(RuntimeWarning, match=why):
        opened(model, draft_memory=tmp_path / "answers.bin", **options)


@pytest.mark.parametrize("left", [0.5, 0.25, 0.0])
def test_smaller_draft_tables_draft_within_a_budget_and_give_the_same_text(opened, plain, model, monkeypatch, left):
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
    whole = opened(model, draft=["suffix", "recycling"], parallel=1).memory
    tables = whole.of("drafters")
    with pytest.warns(
        RuntimeWarning, match="draft tables of .* rather than" if left else "no suffix and recycling drafts"
    ):
        budget = whole.peak - round((1 - left) * tables)
        engine = opened(model, draft=["suffix", "recycling"], budget=budget, parallel=1)
    assert engine.memory.of("drafters") <= left * tables
    assert (engine.speculator is None) == (left == 0)
    assert tokens_of(engine, {"temperature": 0.0}) == tokens_of(plain, {"temperature": 0.0})
    if engine.speculator is not None:
        assert engine.speculator.held()["tables"] <= engine.memory.of("drafters")


def test_another_backend_drafts_nothing_and_says_so_where_that_was_asked_for(opened, model):
    assert opened(model, backend="reference").speculator is None
    with pytest.warns(RuntimeWarning, match="nothing is drafted"):
        opened(model, backend="reference", draft="suffix")
