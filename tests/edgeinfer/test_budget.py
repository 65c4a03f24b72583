"""Loads within a budget: what is taken keeps to it, the text is the same, and what is proposed fits."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_experts import write_tiny_experts
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.cli import main
from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.loading import ledger as load_ledger
from edgeinfer.loading import plan as load_plan
from edgeinfer.loading.options import LoadOptions
from edgeinfer.memory.process import Process, resident_bytes
from edgeinfer.models.gguf import ModelFile

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    dense = write_tiny_model(folder / "dense.gguf", "llama", "Q8_0", n_ctx_train=1024)
    head = write_tiny_head(folder / "head.gguf", dense)
    experts = write_tiny_experts(folder / "experts.gguf", "qwen3moe", "Q8_0", n_experts=32)
    return [
        (dense, {"draft": str(head)}),
        (dense, {"draft": str(dense), "draft_device": "cpu"}),
        (experts, {"n_ctx": 512}),
    ]


def answer(path: Path, **options: Any) -> tuple[list[int], Any]:
    with edgeinfer.load(path, n_threads=1, **options) as engine:
        tokens = engine.tokenize("one and the other, hello world ") * 40
        completion = engine.generate(tokens[: engine.n_ctx - 30], max_tokens=30, temperature=0.8, seed=3)
        return list(completion.tokens), engine.memory


def least_of(path: Path, options: dict[str, Any]) -> int:
    """Bytes that a load needs at least beside the process, as its refusal says it."""
    with ModelFile.open(path) as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
        with pytest.raises(BudgetExceeded) as caught:
            load_plan.plan_load(file, LoadOptions(n_threads=1, budget=1, **options))
    needs = re.search(r"needs at least ([\d.]+) MiB", str(caught.value))
    assert needs is not None
    return round((float(needs[1]) + 0.1) * MIB)


@pytest.mark.filterwarnings("ignore:the budget is")
def test_what_is_taken_keeps_to_the_budget_with_the_same_text(models: list[tuple[Path, dict[str, Any]]]) -> None:
    rng, has_fewer_drafts = random.Random(1), []
    for path, options in models:
        tokens, memory = answer(path, **options)
        beside = memory.peak - memory.of("process") - memory.of("vocabulary")
        least = least_of(path, options)
        for share in (0.0, rng.random()):
            budget = resident_bytes() + 2 * MIB + least + round(share * max(0, beside - least))
            found, within = answer(path, budget=budget, **options)
            assert found == tokens
            assert within.peak <= budget and within.taken <= budget
            has_fewer_drafts.append(within.of("drafters") < memory.of("drafters"))
    assert any(has_fewer_drafts)  # what else there is to drop is in test_planner


def test_a_refusal_ends_with_its_exit_code_and_what_it_proposes_fits(models: list[tuple[Path, dict[str, Any]]]) -> None:
    path = models[0][0]
    budget = resident_bytes() + 4 * MIB + least_of(path, {"n_ctx": 512})
    flags = ["-m", str(path), "-n", "2", "-t", "1", "--drafter", "none", "hello"]

    def run(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["generate", *flags, *more], env={"EDGEINFER_BUDGET": str(budget)})
        return result.exit_code, result.stderr

    code, message = run("-c", "100000")
    assert code == 4 and "the budget is" in message and "too few" in message
    n_ctx = re.search(r"\(-c (\d+)\)", message)
    assert n_ctx is not None and 512 < int(n_ctx[1]) < 100000
    assert run("-c", n_ctx[1])[0] == 0
    assert run("-c", str(int(n_ctx[1]) + 40000))[0] == 4
    assert "no n_ctx fits" in run("--budget", "1000000")[1]


def test_what_finished_texts_leave_is_given_up_first(models: list[tuple[Path, dict[str, Any]]]) -> None:
    path = models[0][0]
    least = least_of(path, {"n_ctx": 512})
    options: dict[str, Any] = {"n_ctx": 512, "parallel": 2, "draft": "none", "n_threads": 1, "cache_ram": "64MiB"}
    with pytest.warns(RuntimeWarning, match=r"reduced: .* MiB rather than 64.0 MiB for what finished texts leave$"):
        engine = edgeinfer.load(path, budget=resident_bytes() + 40 * MIB + least, **options)
    plan = engine.memory_plan
    assert 0 < plan.settings.cache_ram_bytes < 64 * MIB and plan.n_sequences == 2 and plan.n_batch == 512
    engine.close()


def test_a_backend_that_maps_the_file_is_planned_with_all_of_it_while_it_loads(
    models: list[tuple[Path, dict[str, Any]]],
) -> None:
    with ModelFile.open(models[0][0]) as file:
        planned = load_plan.plan_model(file, LoadOptions(backend="reference", n_ctx=16))
        assert load_ledger._source_bytes(planned) == sum(info.n_bytes for info in file.tensors.values())
        native = load_plan.plan_model(file, LoadOptions(backend="native", n_ctx=16))
        assert load_ledger._source_bytes(native) == native.backend.source_bytes  # type: ignore[attr-defined]


def test_two_models_of_one_process_are_planned_within_one_limit(
    models: list[tuple[Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(40 << 20, 0))  # this one grows while tests run
    with ModelFile.open(models[0][0]) as file:
        options = LoadOptions(n_ctx=512, backend="native", budget="400MiB")
        first = load_plan.plan_without_drafters(file, options)
        ours = first.ledger.peak - first.ledger.of("process")
        both = load_plan.plan_without_drafters(file, replace(options, budget=first.limit.n_bytes - ours))
        assert load_plan.plan_beside(file, options, first).plan == both.model.plan
        tight = load_plan.plan_without_drafters(file, replace(options, budget=first.ledger.peak + (1 << 20)))
        with pytest.raises(BudgetExceeded, match="the budget is"):
            load_plan.plan_beside(file, options, tight)
