"""Answers of a model whose experts cannot be read, or not always: they end with an error, and the next one is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults import SUPPORT, compile_faults, environment_of
from tiny_experts import write_tiny_experts

import edgeinfer
from edgeinfer.common.errors import ExpertReadError, InvalidArgument

SECONDS = 120


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_experts(tmp_path / "model.gguf", "qwen3moe", "Q8_0", n_experts=32)


def answers(model: Path, reads: str, n: int, cache: str = "cache") -> list[dict[str, str]]:
    """cache: the folder of what earlier loads of the model have noted."""
    environment = environment_of(compile_faults(model.parent), model.name, reads)
    environment["XDG_CACHE_HOME"] = str(model.parent / cache)
    command = [sys.executable, str(SUPPORT / "try_answers.py"), str(model), "25%", str(n)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_an_answer_that_a_read_error_ended_is_followed_by_whole_ones(model: Path) -> None:
    (whole,) = answers(model, "", 1)
    # The first read tries out the page cache. Where no load has noted what is used most, the second one is needed.
    for number, cache in ((1, "cache"), (2, "no notes"), (20, "cache"), (60, "cache")):
        found = answers(model, f"eio:{number}:0", 3, cache)
        ended = [answer for answer in found if "error" in answer]
        assert ended or cache == "cache"
        assert len(ended) <= 1 and found[-1] == whole
        assert [answer for answer in found if answer not in ended] == [whole] * (3 - len(ended))
        for answer in ended:
            assert whole["text"].startswith(answer["before"])
            assert "model.gguf: tensor blk." in answer["error"] and "Input/output error" in answer["error"]


def test_a_stream_that_an_error_ended_has_no_completion_and_says_so(model: Path) -> None:
    with edgeinfer.load(model, expert_cache="25%", n_ctx=64, draft="none") as engine:
        stream = engine.stream("ab", max_tokens=40, temperature=0.0, loop_guard=0)
        next(stream)
        os.truncate(model, 4096)
        with pytest.raises(ExpertReadError, match=r"model\.gguf: tensor blk\.\d.*load it again"):
            list(stream)
        assert stream.failed
        with pytest.raises(InvalidArgument, match="an error ended it"):
            _ = stream.completion
        with pytest.raises(ExpertReadError, match="load it again"):
            engine.generate("cd", max_tokens=4)
        assert not engine.interrupt()  # nothing runs
