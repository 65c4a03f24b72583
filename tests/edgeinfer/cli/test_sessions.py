"""Conversations that have a name."""

import json
import os
import time

import pytest
from click.testing import CliRunner
from person import SLOW_MAIN, sitting_at
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.cli.sessions import Session, session_lines
from edgeinfer.common.errors import EdgeInferError, InvalidArgument


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=2048))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "edgeinfer" / "sessions"


@pytest.fixture
def run(model, folder):
    def run(*arguments, code=0):
        given = ["chat", "-m", model, "--backend", "reference", "-n", "3", "-s", "1", *arguments]
        result = CliRunner().invoke(cli.main, given, prog_name="edgeinfer")
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


def contents(path):
    return [json.loads(line)["content"] for line in path.read_text().splitlines()]


def test_a_session_goes_on_where_it_was(run, model, folder):
    run("--session", "trip", "-sys", "be brief", "hello")
    answer = run("--session", "trip", "and then?", "--json")
    messages = contents(folder / "trip.jsonl")
    assert messages[::2] == ["be brief", messages[2], messages[4]] and messages[1] == "hello"
    assert messages[3] == "and then?" and messages[4] == json.loads(answer.stdout)["text"]
    with edgeinfer.load(model, backend="reference") as engine:
        conversation = engine.chat("be brief")
        for question in ("hello", "and then?"):
            list(conversation.send(question, max_tokens=3, seed=1))
    assert [message["content"] for message in conversation.messages] == messages


def test_a_session_is_private_and_written_whole(run, folder, monkeypatch):
    old = os.umask(0)
    try:
        run("--session", "trip", "hello")
    finally:
        os.umask(old)
    assert (folder / "trip.jsonl").stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o077 == 0
    first = (folder / "trip.jsonl").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert "No space left" in run("--session", "trip", "again", code=1).stderr
    assert (folder / "trip.jsonl").read_bytes() == first
    assert {path.name for path in folder.iterdir()} == {"trip.jsonl", ".trip.lock"}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "-x", ".hidden", "a b", "x" * 61, "a\nb", "a\x1b[1m", "~"]
)
def test_a_name_that_no_session_may_have_is_refused(run, folder, name):
    refused = run("--session", name, "hello", code=2).stderr
    assert "the name of a session has 1 to 60 letters, digits" in refused and repr(name)[:40] in refused
    assert not folder.exists()


@pytest.mark.parametrize("name", ["a", "my-trip_2.0", "Größe", "漢字", "x" * 60])
def test_other_names_are_taken(folder, name):
    with Session(name):
        pass


@pytest.mark.parametrize(
    "damage", [b'{"role": "user", "content": "a"}\n{"ro', b"\xff\xfe", b"[]\n", b'{"role": "x"}\n']
)
def test_a_damaged_session_is_left_as_it_is(run, folder, damage):
    folder.mkdir(parents=True)
    (folder / "trip.jsonl").write_bytes(damage)
    refused = run("--session", "trip", "hello", code=2).stderr
    assert "the session trip cannot be read, and is left as it is: " in refused and "take another name" in refused
    assert (folder / "trip.jsonl").read_bytes() == damage


def test_one_session_is_open_once_so_that_no_turn_is_lost(run, folder):
    with Session("trip"):
        refused = run("--session", "trip", "hello", code=1).stderr
        assert f"the session trip is open in another chat (process {os.getpid()})" in refused
        run("--session", "other", "hello")
    run("--session", "trip", "hello")


def test_what_another_program_wrote_meanwhile_is_not_overwritten(model, folder):
    with edgeinfer.load(model, backend="reference") as engine, Session("trip") as session:
        conversation = engine.chat()
        conversation.system = "one"
        session.save(conversation)
        conversation.system = "two"
        session.save(conversation)
        (folder / "trip.jsonl").write_text("mine\n")
        with pytest.raises(EdgeInferError, match="was changed by another program and is not overwritten: /save FILE"):
            session.save(conversation)
        assert (folder / "trip.jsonl").read_text() == "mine\n"


def test_sessions_are_listed_the_newest_first(run, folder):
    assert "there are no sessions yet" in run("--list-sessions").stderr
    for number, name in enumerate(("first", "second")):
        run("--session", name, "hello")
        written = time.mktime((2001, 9, 9, 1, 46, 40 + number, 0, 0, -1))  # as the clocks here show it
        os.utime(folder / f"{name}.jsonl", (written, written))
    (folder / "notes.txt").write_text("no session")
    listed = run("--list-sessions").stdout.splitlines()
    assert [line.split()[:3] for line in listed] == [["second", "2", "messages"], ["first", "2", "messages"]]
    assert session_lines() == listed and "2001-09-09 01:46" in listed[0]


def test_listing_needs_no_model(folder):
    result = CliRunner().invoke(cli.main, ["chat", "-m", "/nowhere.gguf", "--list-sessions"])
    assert result.exit_code == 0


def test_without_a_home_there_are_no_sessions(run, monkeypatch):
    monkeypatch.setattr("edgeinfer.cli.sessions.state_folder", lambda: None)
    assert "set HOME or XDG_STATE_HOME" in run("--session", "trip", "hello", code=1).stderr
    with pytest.raises(InvalidArgument):
        Session("a/b")


def test_a_session_at_a_terminal_is_kept_after_each_turn(model, tmp_path):
    path = tmp_path / "edgeinfer" / "sessions" / "trip.jsonl"
    with sitting_at(model, tmp_path, "-n", "3", "--session", "trip", main=SLOW_MAIN) as person:
        assert "session trip begins" in person.see("Ctrl-D leaves")
        person.say("hello")
        person.see("tok/s")
        person.see_prompt()
        assert contents(path)[0] == "hello" and len(contents(path)) == 2
        person.type("/system be brief\r")
        person.see("is set")
        person.say("/sessions")
        person.see("trip     3 messages")
        person.see_prompt()
        assert contents(path)[0] == "be brief"
        person.type("/load other.jsonl\r")
        person.see("session trip (3 messages)")
        person.see_prompt()
        assert len(contents(path)) == 3
        person.type("/undo\r")
        person.see("dropped: hello")
        person.say("again")
        person.see("tok/s")
        person.see_prompt()
        person.process.kill()  # nothing of what was said is lost
        person.process.wait()
    assert contents(path)[:2] == ["be brief", "again"]
    with sitting_at(model, tmp_path, "-n", "3", "--session", "trip") as person:
        person.see("session trip goes on: 3 messages")
        person.say("/exit")
        assert person.leave() == 0
