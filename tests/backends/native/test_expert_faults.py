"""Reads of experts that fail, end early or take long: what comes is right, or an error; nothing hangs."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_runs import FaultRun, FaultRuns
from faults import SUPPORT, compile_faults, environment_of

SECONDS = 120


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_faults(tmp_path_factory.mktemp("faults"))


def tried(folder: Path, environment: dict[str, str], kind: str, seed: int = 0) -> dict[str, Any]:
    command = [sys.executable, str(SUPPORT / "try_experts.py"), str(folder), kind, str(seed)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("kind", ["packed", "split"])
def test_a_read_error_is_said_and_the_next_pass_reads_again(library: Path, tmp_path: Path, kind: str) -> None:
    found = tried(tmp_path, environment_of(library, "experts", "eio:5:37"), kind)
    assert found["right"] > 100
    assert 2 < len(found["errors"]) < 40
    for error in found["errors"]:
        assert "Input/output error" in error
        assert "expert" in error and "at byte" in error and str(tmp_path) in error


@pytest.mark.parametrize("faults", ["short:2:2", "short:1:3,slow:7:11", "late:3:4"])
@pytest.mark.parametrize("kind", ["packed", "unpacked"])
def test_what_is_read_in_pieces_is_whole_in_the_end(library: Path, tmp_path: Path, kind: str, faults: str) -> None:
    found = tried(tmp_path, environment_of(library, "experts", faults), kind)
    assert found["errors"] == []


def test_a_file_that_ends_too_early_is_an_error(library: Path, tmp_path: Path) -> None:
    found = tried(tmp_path, environment_of(library, "experts", "end:2:1"), "packed")
    assert found["right"] == 0
    assert len(found["errors"]) == 40
    assert all(" only 0 of " in error for error in found["errors"])


@pytest.mark.parametrize("faults", ["", "eio:9:71,short:2:2"])  # how many are right is up to the readers
@pytest.mark.parametrize("kind", ["packed", "split"])
def test_where_the_page_cache_cannot_be_avoided(library: Path, tmp_path: Path, kind: str, faults: str) -> None:
    found = tried(tmp_path, environment_of(library, "experts", faults, past_the_cache=False), kind, seed=1)
    assert not found["is_direct"]
    assert found["right"] > 100
    assert bool(found["errors"]) == bool(faults)


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    return FaultRuns(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("number", range(3))
def test_one_read_error_ends_one_text(runs: FaultRuns, number: int) -> None:
    reads = "eio:100:0"  # the packed model is loaded with fewer
    run = FaultRun(runs.models[number], 1 << 20, 1 + number % 2, reads, past_the_cache=True, can_fail=True)
    outcome = runs.outcome(run)
    assert outcome.wrong == ""
    assert (outcome.n_right, len(outcome.errors)) == (3, 1)


@pytest.mark.parametrize("seed", range(6))  # tests/benchmarks/check_faults.py runs more
def test_texts_are_right_or_end_with_an_error(runs: FaultRuns, seed: int) -> None:
    run = runs.random_run(random.Random(seed))
    assert (run, runs.outcome(run).wrong) == (run, "")
