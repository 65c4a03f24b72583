"""What is said of a package that was run, and which of them are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer.common.errors import BackendUnavailable, ModelFileError
from edgeinfer.exporters.checks.runtime import GreedyRun, compare_logits, compare_tokens
from edgeinfer.exporters.checks.runtime_process import ask_runtime
from edgeinfer.exporters.divergence import distance


def greedy_run(n_answer: int = 3) -> GreedyRun:
    logits = np.zeros((3, 4), np.float32)
    logits[[0, 1, 2], [1, 2, 3]] = 5.0
    logits[1, 0] = 4.98
    return GreedyRun("a", [0], [1, 2, 3][:n_answer], [1, 2, 3], logits)


def test_equal_answers_and_ties_are_told_apart() -> None:
    assert compare_tokens(greedy_run(), [1, 2, 3], "R 1") == "3 of 3 greedy tokens equal the source in R 1"
    assert compare_tokens(greedy_run(), [1, 0, 0], "R 1").endswith(
        "1 of 3 greedy tokens equal the source in R 1, the next is 0.020 below"
    )
    assert compare_tokens(greedy_run(2), [1, 2], "R 1") == "2 of 2 greedy tokens equal the source in R 1"


@pytest.mark.parametrize("found", [[1, 3, 3], [1], [1, 2], []])
def test_another_answer_is_refused(found: list[int]) -> None:
    with pytest.raises(ModelFileError, match="gives another text than its source: . of 3"):
        compare_tokens(greedy_run(), found, "R 1")


def test_an_answer_that_goes_on_behind_the_end_is_refused() -> None:
    with pytest.raises(ModelFileError, match="2 of 2 greedy tokens equal"):
        compare_tokens(greedy_run(2), [1, 2, 0], "R 1")


def test_logits_are_compared_at_each_token() -> None:
    run = greedy_run()
    near = run.logits.copy()
    near[1, 0] = 5.01
    said, figures = compare_logits(run, near, "R 1")
    assert said.startswith("2 of 3 greedy tokens equal the source in R 1, KL divergence ")
    assert said.endswith(", the other at most 0.020 below in the logits")
    assert figures["n_equal_tokens"] == 2 and 0 < figures["kl_divergence"] < 1e-3
    assert figures["most_apart"] == pytest.approx(0.02, abs=1e-4)
    with pytest.raises(ModelFileError, match="at most 5.000 below"):
        compare_logits(run, run.logits[::-1], "R 1")
    with pytest.raises(ModelFileError, match="3 of 3 greedy tokens equal .*; nothing was written"):
        compare_logits(run, run.logits * 0.5, "R 1")
    with pytest.raises(ModelFileError, match="KL divergence nan"):
        compare_logits(run, np.full((3, 4), np.nan, np.float32), "R 1")


def test_the_divergence_is_that_of_the_definition(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 5, 7), dtype=np.float32)
    p, q = (np.exp(each) / np.exp(each).sum(axis=1, keepdims=True) for each in (a, b))
    assert distance(a, b).divergence == pytest.approx(float((p * np.log(p / q)).sum(axis=1).mean()), rel=1e-5)
    assert distance(a, a + 3).divergence == pytest.approx(0, abs=1e-6)


def test_a_runtime_that_crashes_or_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "asked_runtime.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module.write_text("def answer(question): return question")
    assert ask_runtime("asked_runtime", {"version": 1}, "R") == {"version": 1}
    with pytest.raises(BackendUnavailable, match="no R"):
        ask_runtime("asked_runtime", {"missing": "no R"}, "R")
    with pytest.raises(ModelFileError, match="R refuses the package: bad"):
        ask_runtime("asked_runtime", {"error": "bad"}, "R")
    module.write_text("import os\ndef answer(question): return os.write(1, b'\\xa1 ') and {'a': 1}")
    assert ask_runtime("asked_runtime", {}, "R") == {"a": 1}
    module.write_text("import os\ndef answer(question): os.abort()")
    with pytest.raises(ModelFileError, match="R ended with exit code -?6"):
        ask_runtime("asked_runtime", {}, "R")
