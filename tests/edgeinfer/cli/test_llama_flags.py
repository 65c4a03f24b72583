"""Flags are llama.cpp's: what has its name means the same, and what means the same has all of its names."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from commands import commands
from llama_flags import OPTIONS
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.cli.renamed import RENAMED

# Options by the names of our parameters, with one of llama.cpp's names for what means the same there.
SAME = {
    "model": "--model",
    "hf_repo": "--hf-repo",
    "hf_file": "--hf-file",
    "n_threads": "--threads",
    "n_ctx": "--ctx-size",
    "parallel": "--parallel",
    "cache_ram": "--cache-ram",  # with a unit: theirs are MiB
    "n_batch": "--ubatch-size",  # -b, the logical batch, has no part here
    "cache_type_k": "--cache-type-k",
    "cache_type_v": "--cache-type-v",
    "model_draft": "--model-draft",
    "hf_repo_draft": "--hf-repo-draft",
    "draft_max": "--spec-draft-n-max",
    "prompt": "--prompt",
    "file": "--file",
    "system": "--system-prompt",
    "escape": "--escape",
    "predict": "--predict",
    "temperature": "--temp",
    "seed": "--seed",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repeat_penalty": "--repeat-penalty",
    "frequency_penalty": "--frequency-penalty",
    "presence_penalty": "--presence-penalty",
    "penalty_last_n": "--repeat-last-n",
    "dry_multiplier": "--dry-multiplier",
    "dry_base": "--dry-base",
    "dry_allowed_length": "--dry-allowed-length",
    "dry_penalty_last_n": "--dry-penalty-last-n",
    "dry_sequence_breakers": "--dry-sequence-breaker",
    "logit_bias": "--logit-bias",
    "json_schema": "--json-schema",
    "json_schema_file": "--json-schema-file",
    "grammar": "--grammar",
    "grammar_file": "--grammar-file",
    "max_tokens": "--predict",
    "context": "--ctx-size",
    "out": "--output",
    "host": "--host",
    "port": "--port",
    "api_key_file": "--api-key-file",
    "aliases": "--alias",
    "tags": "--tags",
    "slots": "--slots",
    "page": "--ui",
    "verbose": "--verbose",
    "chat_template": "--chat-template",
    "chat_template_file": "--chat-template-file",
    "reasoning": "--reasoning",
    "device": "--device",  # what computes, by our names of devices
    "epochs": "--epochs",
}
ALSO = {"--spec-draft-n-max": "--draft-max"}  # which llama.cpp took for it until lately
COMMANDS = commands()
GIVEN = [
    (command, parameter)
    for command, found in COMMANDS.items()
    for parameter in found.params
    if isinstance(parameter, click.Option)
]


def theirs(name: str) -> set[str]:
    """All names of an option of llama.cpp."""
    found = {each for names in OPTIONS if name in names for each in names}
    return found | (theirs(ALSO[name]) if name in ALSO else set())


def test_the_table_has_what_it_must() -> None:
    names = [name for option in OPTIONS for name in option]
    assert len(OPTIONS) > 300 and {"-m", "-ngl", "--top-nsigma", "-ctk", "--draft-min"} <= set(names)
    assert all(theirs(name) for name in SAME.values())


@pytest.mark.parametrize("command, option", GIVEN, ids=[f"{command} {option.name}" for command, option in GIVEN])
def test_what_has_a_name_of_theirs_means_the_same(command: str, option: click.Option) -> None:
    same = theirs(SAME[str(option.name)]) if option.name in SAME and option.name != "model" else set()
    if option.name == "model" and "-m" in option.opts:
        same = theirs("--model")
    known = {name for names in OPTIONS for name in names}
    named = {*option.opts, *option.secondary_opts}
    assert (named & known) <= same, f"{sorted((named & known) - same)} mean something else in llama.cpp"
    if same:
        assert same <= named, f"{sorted(same - named)} are names of it in llama.cpp"


def test_each_option_of_the_table_is_one_of_a_command() -> None:
    assert set(SAME) <= {option.name for _, option in GIVEN}


def test_an_old_name_is_no_name_and_is_answered_with_the_new_one() -> None:
    for command, renamed in RENAMED.items():
        there = {name for option in COMMANDS[command].params for name in (*option.opts, *option.secondary_opts)}
        assert not set(renamed) & there, command
        for old, became in renamed.items():
            result = CliRunner().invoke(cli.main, [command, "x", old])
            said = " ".join(result.stderr.split())
            assert result.exit_code == 2 and f"No such option '{old}': it {became}." in said, said
            for new in (word.strip(";,`") for word in became.split() if word.startswith("--")):
                every = {name for found in COMMANDS.values() for each in found.params for name in each.opts}
                every |= {name for found in COMMANDS.values() for each in found.params for name in each.secondary_opts}
                assert new in every, (old, new)


@pytest.mark.parametrize("flag", ["-ngl", "-cnv", "-nkvo", "-tb", "-st"])
def test_a_flag_of_theirs_that_is_not_here_is_no_value_of_a_shorter_one(flag: str) -> None:
    result = CliRunner().invoke(cli.main, ["chat", "hi", flag, "4"])
    assert result.exit_code == 2 and f"No such option '{flag}'" in result.stderr


# ---- Values ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf"))


def generate(model: str, *flags: str) -> Result:
    return CliRunner().invoke(cli.main, ["generate", "hello", "-m", model, "-n", "3", "--temp", "0", "--json", *flags])


def kv_cache(result: Result) -> int:
    assert result.exit_code == 0, result.stderr
    items = json.loads(result.stdout)["memory"]["items"]
    return next(int(item["planned"]) for item in items if item["purpose"] == "KV cache")


def test_keys_and_values_of_one_type_are_taken_and_others_refused(model: str) -> None:
    both = kv_cache(generate(model, "--cache-type", "q8_0"))
    assert both < kv_cache(generate(model)) == kv_cache(generate(model, "-ctk", "f16"))
    assert both == kv_cache(generate(model, "-ctk", "q8_0", "-ctv", "q8_0"))
    assert both == kv_cache(generate(model, "--cache-type", "q8_0", "--cache-type-k", "q8_0"))
    for flags in (["-ctk", "q8_0"], ["-ctv", "q8_0"], ["--cache-type", "f16", "-ctk", "q8_0", "-ctv", "q8_0"]):
        refused = generate(model, *flags)
        assert refused.exit_code == 2 and "have one type here" in refused.stderr, refused.stderr


def test_a_name_of_a_drafter_is_no_number_of_tokens_and_a_file_no_drafter(model: str, tmp_path: Path) -> None:
    for flag in ("--draft", "--draft-max"):
        refused = generate(model, flag, "none")
        assert refused.exit_code == 2 and "--drafter NAME chooses what drafts" in " ".join(refused.stderr.split())
    refused = generate(model, "--drafter", model)
    assert refused.exit_code == 2 and "-md names a file" in " ".join(refused.stderr.split())
    for flag in ("--draft", "--draft-max", "--draft-n", "--spec-draft-n-max"):
        assert generate(model, flag, "2").exit_code == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["chat", "hi", "--backend", "fpga-sim"], "`edgeinfer fpga simulate`"),
        (["export", "m.gguf", "--to", "fpga", "-o", "x"], "`edgeinfer fpga export SOURCE`"),
    ],
)
def test_what_moved_into_the_group_of_boards_is_said(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "old, new", [("EDGEINFER_DRAFT", "EDGEINFER_DRAFTER"), ("EDGEINFER_VERIFY", "EDGEINFER_CHECK_PACK")]
)
def test_an_old_variable_is_answered_with_the_new_one(
    old: str, new: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(old, "none")
    refused = generate(model)
    assert refused.exit_code == 2 and f"{old} is {new} now" in " ".join(refused.stderr.split())
    assert CliRunner().invoke(cli.main, ["inspect", model]).exit_code == 0  # which has no such option
