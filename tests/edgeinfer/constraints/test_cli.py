"""The flags of what an answer may be."""

import json

import pytest
from click.testing import CliRunner
from constrained import PERSON, check_answer

from edgeinfer import cli

pytestmark = pytest.mark.usefixtures("grammar", "native")


@pytest.fixture
def run(model, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(command, *arguments, code=0):
        arguments = [command, "hello", "-m", str(model), "--seed", "3", "-n", "200", *map(str, arguments)]
        result = CliRunner().invoke(cli.main, arguments, prog_name="edgeinfer")
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_schema_comes_from_the_command_line_or_a_file(run, tmp_path, command):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(PERSON))
    inline, read = run(command, "-j", path.read_text()), run(command, "-jf", path)
    assert inline.stdout == read.stdout
    check_answer({"schema": PERSON}, inline.stdout)
    record = json.loads(run(command, "--json-schema-file", path, "--json").stdout)
    assert record["parsed"] == json.loads(record["text"]) and record["parse_error"] is None


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_other_forms(run, tmp_path, command):
    path = tmp_path / "grammar"
    path.write_text('root ::= "a" "b"+ "!"\n')
    assert run(command, "--grammar-file", path).stdout.strip("\n").startswith("ab")
    assert run(command, "--grammar", 'start: "only"').stdout == "only\n"
    assert run(command, "--regex", r"\d{3}").stdout.strip().isdecimal()
    assert run(command, "--choices", "left", "--choices", "right").stdout in ("left\n", "right\n")


def test_a_cut_answer_says_that_it_has_no_value(run):
    result = run("generate", "-j", json.dumps(PERSON), "-n", "5")
    assert "not complete" in result.stderr
    record = json.loads(run("generate", "-j", json.dumps(PERSON), "-n", "5", "--json").stdout)
    assert record["parsed"] is None and "not complete" in record["parse_error"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--regex", "a", "--choices", "b"], "--regex and --choices"),
        (["-j", "{"], "no JSON"),
        (["-j", '{"not": {}}'], "#/not"),
        (["--regex", "[a"], "unclosed"),
        (["-jf", "/nowhere.json"], "does not exist"),
    ],
)
def test_what_is_wrong_is_a_usage_error(run, arguments, told):
    assert told in run("generate", *arguments, code=2).stderr


def test_each_answer_of_a_chat_is_constrained(model, monkeypatch, tmp_path):
    from edgeinfer.cli import repl

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    typed = iter(["one", "/regen", "two"])

    class Lines:
        def prompt(self, _):
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

    monkeypatch.setattr(repl, "line_editor", lambda *_: Lines())
    monkeypatch.setattr("edgeinfer.cli.chat.read_input", lambda beside_prompt: None)
    arguments = ["chat", "-m", str(model), "--choices", "left", "--choices", "right", "-q"]
    result = CliRunner().invoke(cli.main, arguments, prog_name="edgeinfer")
    assert result.exit_code == 0, (result.stderr, result.exception)
    answers = result.stdout.split()
    assert len(answers) == 3 and set(answers) <= {"left", "right"}
