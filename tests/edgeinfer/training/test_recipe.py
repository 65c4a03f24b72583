"""The file of `edgeinfer distill --config`: its keys, and what is said of wrong ones. Needs no torch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from commands import commands

from edgeinfer.cli import main
from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.training.recipe import Recipe, read_recipe

FLAGS = {"tokens": "--tokens"}


def test_what_a_file_lacks_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('# a comment\nsteps_from = 1\ngate_type = "q8_0"\nlearning_rate = 2e-3\n')
    assert read_recipe(path, FLAGS) == Recipe(steps_from=1.0, gate_type="q8_0", learning_rate=0.002)
    path.write_text("")
    assert read_recipe(path, FLAGS) == read_recipe(None, FLAGS) == Recipe()


@pytest.mark.parametrize(
    "text, said",
    [
        ("step = 2", "there is no key 'step': did you mean steps?"),
        ("zzz = 2", "there is no key 'zzz': there are answers, greedy_share, "),
        ("tokens = 2", "there is no key 'tokens': it is an option of the command line, --tokens"),
        ('steps = "two"', "steps must be an integer in 1..8: found 'two'"),
        ("steps = 2.0", "steps must be an integer in 1..8: found 2.0"),
        ("steps = true", "steps must be an integer in 1..8: found True"),
        ("steps = 9", "steps must be an integer in 1..8: found 9"),
        ('decay = "0.5"', "decay must be a number in 0..1: found '0.5'"),
        ("decay = 1.5", "decay must be a number in 0..1: found 1.5"),
        ("learning_rate = 0", "learning_rate must be a number in 1e-12..1e+09: found 0"),
        ('optimizer = "sgd"', "optimizer must be muon or adamw: found 'sgd'"),
        ("taps = [1, 2]", "taps must be a text (str): found [1, 2]"),
        ('gate_type = "q4_k"', "gate_type must be f16, q8_0 or q4_0: found 'q4_k'"),
        ("steps", "must be TOML, a line NAME = VALUE for each key: "),
        ("[head]\nsteps = 2", "there is no key 'head'"),
    ],
)
def test_a_wrong_key_and_a_wrong_value_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as raised:
        read_recipe(path, FLAGS)
    assert str(raised.value).startswith(f"{path}: ") and said in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EdgeInferError, match="cannot be read: Is a directory"):
        read_recipe(tmp_path, FLAGS)
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="must be TOML"):
        read_recipe(tmp_path / "a.toml", FLAGS)


def test_the_command_reads_it_before_any_work_and_has_no_flag_of_a_key(tmp_path: Path) -> None:
    options = {name for each in commands()["distill"].params for name in each.opts if isinstance(each, click.Option)}
    assert not {f"--{field.name.replace('_', '-')}" for field in fields(Recipe)} & options and len(options) < 50
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}')
    (tmp_path / "a.toml").write_text("epochs = 2")
    files = {"--prompts": "p.jsonl", "-o": "h.gguf", "--config": "a.toml"}
    arguments = [each for flag, name in files.items() for each in (flag, str(tmp_path / name))]
    result = CliRunner().invoke(main, ["distill", "m.gguf", *arguments])
    assert result.exit_code == 2 and "it is an option of the command line, --epochs" in " ".join(result.stderr.split())
