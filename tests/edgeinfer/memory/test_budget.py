"""The ledger: its sums, and what a process takes against what was planned before it loaded a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.memory.budget import Item, ledger
from edgeinfer.memory.process import peak_bytes, resident_bytes

LEDGER = ledger([Item("process", 50), Item("weights", 100), Item("drafters", 7, detail="rows"), Item("window", 0)], 9)


def test_the_plan_is_the_sum_and_loading_comes_on_top():
    assert (LEDGER.planned, LEDGER.peak) == (157, 166)
    assert LEDGER.of("weights") == 100 and LEDGER.of("drafters") == 7 and LEDGER.of("experts") == 0
    assert [item.name for item in LEDGER.items] == ["process", "weights", "drafters (rows)"]  # nothing of no bytes


def test_what_no_item_holds_is_the_process_itself():
    found = LEDGER.with_taken({"weights": 90, "drafters (rows)": 5}, 160, 163)
    assert [item.taken for item in found.items] == [65, 90, 5]
    assert (found.taken, found.peak_taken, found.planned) == (160, 163, 157)
    assert LEDGER.taken is None and LEDGER.items[1].taken is None


def test_json_has_every_item():
    record = json.loads(json.dumps(LEDGER.with_taken({}, 160, None).as_json()))
    assert record["peak"] == 166 and record["taken"] == 160 and record["peak_taken"] is None
    assert {item["purpose"]: item["planned"] for item in record["items"]}["weights"] == 100


def test_a_process_is_measured_and_one_that_ended_has_nothing():
    assert 1 << 20 < resident_bytes() <= peak_bytes()
    assert resident_bytes(2**22 + 1) == 0


# Fills the cache twice, so that every table has what it will ever have of such texts.
PROGRAM = """
import json, sys, edgeinfer
n_texts = int(sys.argv[3])
with edgeinfer.load(sys.argv[1], n_ctx=512, n_threads=2, draft=sys.argv[2], parallel=n_texts) as engine:
    planned = engine.memory
    for _ in range(2):
        prompts = [[5 + i * text % 200 for i in range(480)] for text in range(1, n_texts + 1)]
        list(engine.generate_many(prompts, max_tokens=32, temperature=0.0))
    engine.generate("some words", max_tokens=100, seed=1)
    print(json.dumps(engine.memory.as_json()))
"""


@pytest.mark.parametrize("draft", ["none", "auto"])
@pytest.mark.parametrize("n_texts", [1, 4, 8])
def test_a_process_takes_what_was_planned_and_no_more(draft: str, n_texts: int, tmp_path: Path) -> None:
    if not peak_bytes():
        pytest.skip("this system does not tell how much memory a process took at most")
    model = write_tiny_model(tmp_path / "model.gguf", n_layers=4, n_ff=1024, n_ctx_train=512)
    command = [sys.executable, "-c", PROGRAM, str(model), draft, str(n_texts)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(result.stdout)
    least = 0.93 if n_texts == 1 else 0.9  # beside a model as small as this one, what each text may take weighs much
    assert least * found["peak"] < found["peak_taken"] <= found["peak"]
    planned = {(item["purpose"], item["detail"]): item["planned"] for item in found["items"]}
    purposes = {"process", "vocabulary", "weights", "KV cache", "activations", "threads", "sampling"}
    assert purposes <= {purpose for purpose, _ in planned} and min(planned.values()) > 0
    assert (("drafters", "tables") in planned) == (draft == "auto")


@pytest.mark.parametrize("draft, n_rows", [("none", 1), ("auto", 8)])
def test_logits_count_by_the_vocabulary_and_the_rows_of_a_pass(draft: str, n_rows: int, tmp_path: Path) -> None:
    n_more = 4096
    small, large = (
        write_tiny_model(tmp_path / f"{n_vocab}.gguf", n_ctx_train=64, n_vocab=n_vocab)
        for n_vocab in (291, 291 + n_more)
    )
    planned = []
    for model in (small, large):
        with edgeinfer.load(model, n_ctx=64, draft=draft) as engine:
            planned += [item.planned for item in engine.memory.items if item.purpose == "sampling"]
    assert planned[1] - planned[0] >= n_rows * 4 * n_more
