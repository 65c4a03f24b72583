"""A small run of tests/benchmarks/check_constraints.py: with drafts, without, from new matchers, and jointly."""

import json
import sys
from pathlib import Path

import pytest
from constrained import PERSON, TREE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import check_constraints  # noqa: E402
from schemas import mixed_schemas  # noqa: E402

pytestmark = pytest.mark.usefixtures("grammar")

REFUSED = {"type": "object", "unevaluatedProperties": False}


@pytest.fixture
def folder(tmp_path):
    for name, schema in {"a/person": PERSON, "a/refused": REFUSED, "b/tree": TREE}.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(schema))
    return tmp_path


def checked(folder, model, capsys, monkeypatch, *options):
    """(exit code, record) of a run."""
    monkeypatch.setattr(sys, "argv", ["check_constraints.py", str(folder), "--model", str(model), *options])
    with pytest.raises(SystemExit) as ended:
        check_constraints.main()
    return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_answers_to_schemas_are_equal(folder, default_model, capsys, monkeypatch):
    code, record = checked(folder, default_model, capsys, monkeypatch, "--seeds", "2", "--tokens", "24")
    counts = record["counts"]
    assert code == 0 and record["schemas"] == 2 and counts["schemas refused"] == 1
    assert counts["drafts, compared"] == counts["joint, compared"] == 2 * (2 * 2 + 1)
    assert counts["drafts, accepted of constraint"] > 0 and counts["joint, accepted of constraint"] > 0


def test_an_answer_that_differs_is_told(folder, default_model, capsys, monkeypatch):
    answer = check_constraints.Asked.answer

    def other(self, engine, n_tokens):
        return answer(self, engine, n_tokens - (engine.scheduler.n_parallel > 1))

    monkeypatch.setattr(check_constraints.Asked, "answer", other)
    code, record = checked(folder, default_model, capsys, monkeypatch, "--seeds", "1", "--tokens", "4")
    assert code == 1 and record["differ"] == 6


def test_schemas_are_taken_of_each_folder_in_turn(folder):
    names = [name for name, _ in mixed_schemas(folder, 1, 6000)]
    assert sorted(names) == ["a/person.json", "a/refused.json", "b/tree.json"] and names[1] == "b/tree.json"
    assert len(list(mixed_schemas(folder, 1, 100))) == 1
