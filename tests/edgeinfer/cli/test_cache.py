"""Contexts on disk on the command line: --cache-disk, `edgeinfer cache`, `edgeinfer chat --resume`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from person import MAIN, sitting_at
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.context_cache import cache

pytestmark = pytest.mark.usefixtures("native")

TEXT = "some text that is long enough to fill a segment or two of the cache, " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=1024))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "cache" / "edgeinfer" / "contexts"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ends waits until all contexts are written: that thread gives way to all that the machine does."""
    monkeypatch.setattr(cache, "_CLOSING_SECONDS", 100.0)
    monkeypatch.setattr(cache.ContextCache.flush, "__defaults__", (100.0,))


def run(*arguments: str, code: int = 0, text: str | None = None) -> Result:
    result = CliRunner().invoke(cli.main, list(arguments), prog_name="edgeinfer", input=text)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture
def ask(model: str) -> Callable[..., dict[str, object]]:
    def ask(command: str, *arguments: str) -> dict[str, object]:
        given = ["-m", model, "-n", "4", "--temp", "0", "--json", *arguments]
        found: dict[str, object] = json.loads(run(command, *given).stdout)
        return found

    return ask


def cached(answer: dict[str, object]) -> int:
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return int(usage["cached_tokens"])


def test_a_chat_keeps_contexts_and_the_others_only_if_told(ask: Callable[..., dict[str, object]], folder: Path) -> None:
    first, again = ask("chat", TEXT), ask("chat", TEXT)
    assert cached(first) == 0 and cached(again) >= 128 and first["text"] == again["text"]
    before = len(list(folder.iterdir()))
    assert cached(ask("chat", "--cache-disk", "0", TEXT)) == 0
    assert cached(ask("generate", TEXT)) == cached(ask("generate", TEXT)) == 0
    assert len(list(folder.iterdir())) == before
    ask("generate", "--cache-disk", "1GiB", TEXT)
    assert cached(ask("generate", "--cache-disk", "1GiB", TEXT)) >= 128


def test_the_variable_counts_for_both(
    ask: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE_DISK", "0")
    ask("chat", TEXT)
    assert not folder.exists()
    monkeypatch.setenv("EDGEINFER_CACHE_DISK", "100MB")
    ask("generate", TEXT)
    assert cached(ask("generate", TEXT)) >= 128


@pytest.mark.parametrize("size", ["-1", "many", "10%", ""])
def test_no_size(model: str, size: str) -> None:
    assert "cache_disk" in run("generate", "-m", model, "--cache-disk", size, "hello", code=2).stderr


def test_what_cannot_be_kept_is_said_if_it_was_asked_for(model: str) -> None:
    given = ["chat", "-m", model, "-n", "2", "--backend", "reference"]
    assert "contexts are not kept on disk" in run(*given, "--cache-disk", "1GiB", "hello").stderr
    assert "contexts" not in run(*given, "hello").stderr


def test_contexts_are_listed_and_cleared(ask: Callable[..., dict[str, object]], folder: Path) -> None:
    assert "there are no contexts in" in run("cache").stderr and run("cache").stdout == ""
    assert "there are no contexts in" in run("cache", "--clear").stderr
    ask("chat", TEXT)
    lines = run("cache").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "CACHE", "TOKENS", "SIZE", "LAST", "USED"] and len(lines) == 2
    found = json.loads(run("cache", "--json").stdout)
    (row,) = found["contexts"]
    assert row["model"] in lines[1] and row["cache_type"] == "f16" and row["tokens"] > 128
    files = [each for each in folder.iterdir() if not each.name.startswith(".")]
    assert found["n_bytes"] == row["n_bytes"] == sum(each.stat().st_size for each in files)
    (folder / "strange").write_bytes(b"\x1b[31m")
    assert "?" in run("cache").stdout
    assert "removed: " in run("cache", "--clear").stderr
    assert [each.name for each in folder.iterdir()] == [".lock"]
    assert cached(ask("chat", TEXT)) == 0


def test_a_folder_that_is_no_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    assert "Expected a folder" in run("cache", code=1).stderr


def test_resume_goes_on_with_the_last_session(ask: Callable[..., dict[str, object]], model: str) -> None:
    assert "no conversation yet" in run("chat", "-m", model, "--resume", "hello", code=1).stderr
    assert "leave one out" in run("chat", "-m", model, "--resume", "--session", "a", "hello", code=2).stderr
    ask("chat", "--session", "one", "hello")
    ask("chat", "--session", "two", TEXT)
    resumed = ask("chat", "--resume", "and then?")
    assert cached(resumed) >= 128
    named = Path(os.environ["XDG_STATE_HOME"]) / "edgeinfer" / "sessions" / "two.jsonl"
    messages = [json.loads(line) for line in named.read_text().splitlines()]
    assert [message["content"] for message in messages if message["role"] == "user"] == [TEXT, "and then?"]
    ask("chat", "one answer for a program is no conversation")
    ask("chat", "--resume", "third")
    assert named.read_text().count("\n") == 6


def test_a_conversation_without_a_name_is_kept_for_resume(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "edgeinfer" / "sessions" / ".last.jsonl"
    for arguments, said in ((["--no-history"], False), ([], True), ([], True)):
        with sitting_at(model, tmp_path, "-n", "3", "-s", "1", *arguments, main=MAIN) as person:
            person.see("Ctrl-D leaves")
            person.say("hello")
            person.see("tok/s")
            person.see_prompt()
            person.type("\x04")
        assert kept.exists() == said
    assert kept.read_text().count("\n") == 2, "each conversation takes the place of the one before"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with sitting_at(model, tmp_path, "-n", "3", "-s", "1", "--resume", main=MAIN) as person:
        assert "the last conversation goes on: 2 messages" in person.see("Ctrl-D leaves")
        person.say("again")
        person.see("tok/s")
        person.see_prompt()
    assert kept.read_text().count("\n") == 4
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run("chat", "--list-sessions").stdout == ""
