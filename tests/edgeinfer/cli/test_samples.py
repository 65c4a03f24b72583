"""`edgeinfer generate --samples`: each sample as it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.cli.generate import MOST_SAMPLES
from edgeinfer.many import MOST_SAMPLES as MOST


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=4096)


@pytest.fixture
def run(model, monkeypatch):
    """Runs `edgeinfer generate` in this process on the tiny model."""
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)

    def run(*arguments, code=0):
        command = ["generate", "hello", "-m", str(model), "--drafter", "none", *map(str, arguments)]
        result = CliRunner().invoke(cli.main, command, prog_name="edgeinfer")
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


@pytest.fixture(scope="module")
def expected(model):
    """The texts of seeds 7 to 10."""
    with edgeinfer.load(model, draft="none") as engine:
        return {seed: engine.generate("hello", max_tokens=6, seed=seed).text for seed in range(7, 11)}


def test_the_most_samples_are_those_of_the_engine():
    assert MOST_SAMPLES == MOST


def test_samples_are_what_their_seeds_give_alone(run, expected):
    result = run("--samples", 4, "-s", 7, "-n", 6)
    headers = [line for line in result.stderr.splitlines() if " | seed " in line]
    seeds = [int(line.split(" | seed ")[1].split()[0]) for line in headers]
    assert sorted(seeds) == [7, 8, 9, 10] and headers[0].startswith("[1 of 4")
    shown = [text if text.endswith("\n") else text + "\n" for text in (expected[seed] for seed in seeds)]
    assert result.stdout_bytes.decode() == "\n".join(shown)


def test_samples_as_json_are_a_line_each(run, expected):
    records = [
        json.loads(line)
        for line in run("--samples", 4, "-s", 7, "-n", 6, "--json", "--logprobs", 1).stdout.splitlines()
    ]
    assert {each["seed"]: each["text"] for each in records} == expected
    assert all(len(each["logprobs"]) == each["usage"]["completion_tokens"] for each in records)


def test_the_first_that_end_are_enough(run):
    result = run("--samples", 6, "--first", 2, "-s", 7, "-n", 6, "--json", "-q")
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    "wrong", [["--samples", 0], ["--samples", 1025], ["--first", 1], ["--samples", 2, "--first", 3]], ids=str
)
def test_wrong_numbers_are_refused(run, wrong):
    run(*wrong, code=2)


def test_ctrl_c_ends_all_samples_and_keeps_what_was_printed(model):
    command = [
        sys.executable,
        "-m",
        "edgeinfer",
        "generate",
        "hello",
        "-m",
        model,
        "--drafter",
        "none",
        "--samples",
        500,
    ]
    command += ["-n", 100, "--json", "--loop-guard", 0]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said, said
    records = [json.loads(line) for line in [first, *rest.splitlines()]]
    assert 0 < len(records) < 500 and all(each["finish_reason"] != "interrupted" for each in records)
