"""Texts that people give to the command line: escapes in flags, byte order marks and encodings of files."""

import codecs
import json
import os

import pytest
from click.testing import CliRunner
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.chat import Conversation
from edgeinfer.cli.options import read_escapes
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.user_text import decoded, sample_of, without_mark
from edgeinfer.engine import Engine
from edgeinfer.exporters.calibration.texts import texts_of_file
from edgeinfer.models.gguf import ModelFile
from edgeinfer.training.prompts import read_prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=512)


@pytest.fixture
def run(model, monkeypatch, tmp_path):
    """Runs a command in this process on the tiny model."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)

    def run(command, *arguments, text=None, code=0):
        arguments = [command, "-m", str(model), "--backend", "reference", *map(str, arguments)]
        result = CliRunner().invoke(cli.main, arguments, input=text, prog_name="edgeinfer")
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


@pytest.mark.parametrize(
    "written, read",
    [
        (r"\n\n", "\n\n"),
        (r"a\tb\r", "a\tb\r"),
        (r"\"x\' \\n", "\"x' \\n"),
        (r"\x41\xc3\xA9\xe2\x82\xac", "Aé€"),
        (r"C:\new", "C:\new"),
        (r"C:\dir\file \d \xZZ \x4", r"C:\dir\file \d \xZZ \x4"),
        ("at the end \\", "at the end \\"),
        ("\u00e9\U0001f600\\n", "\u00e9\U0001f600\n"),
        (r"\xff!", "\ufffd!"),
        ("\udcff\\n\ud800", "\udcff\n\ud800"),  # an argument that is no UTF-8
        ("", ""),
    ],
)
def test_escapes_are_read_as_llama_cpp_reads_them(written, read):
    assert read_escapes(written) == read


@pytest.fixture
def asked(monkeypatch):
    """What the engine was asked for: (prompt, stop strings, parameters)."""
    requests = []
    stream = Engine.stream

    def noted(self, prompt, **options):
        requests.append((prompt, options.get("stop"), options))
        return stream(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", noted)
    return requests


def test_a_stop_flag_of_the_documentation_stops_at_an_empty_line(run, asked):
    flags = ("--stop", r"\n\n", "--stop", r"\"", "--dry-sequence-breaker", r"\n", "--dry-sequence-breaker", r"\x3a")
    run("generate", r"a\nb", "-n", "1", *flags)
    run("generate", "-p", r"a\nb", "-n", "1", "-e", *flags)
    run("generate", r"a\nb", "-n", "1", "--no-escape", *flags)
    run("generate", "-n", "1", *flags, "--no-escape", text=r"a\nb")
    run("generate", "-n", "1", *flags, text=r"a\nb")
    read, kept = ("\n\n", '"'), (r"\n\n", r"\"")
    assert [(prompt, stop) for prompt, stop, _ in asked] == [
        ("a\nb", read),
        ("a\nb", read),
        (r"a\nb", kept),
        (r"a\nb", kept),
        (r"a\nb", read),  # standard input is taken as it is
    ]
    assert asked[0][2]["dry_sequence_breakers"] == ("\n", ":")
    assert asked[2][2]["dry_sequence_breakers"] == (r"\n", r"\x3a")


@pytest.mark.parametrize("flags, kept", [((), False), (("--no-escape",), True)])
def test_a_chat_reads_escapes_of_its_message_and_system_message(run, model, monkeypatch, flags, kept):
    sent = []
    send = Conversation.send
    monkeypatch.setattr(
        Conversation, "send", lambda self, text, **more: sent.append((self.system, text)) or send(self, text, **more)
    )
    run("chat", r"a\tb", "-sys", r"be\nbrief", "-n", "1", *flags)
    assert sent == [(r"be\nbrief", r"a\tb") if kept else ("be\nbrief", "a\tb")]


def test_a_variable_switches_escapes_off(run, asked, monkeypatch):
    monkeypatch.setenv("EDGEINFER_ESCAPE", "0")
    run("generate", r"a\nb", "-n", "1")
    run("generate", r"a\nb", "-n", "1", "--escape")
    assert [prompt for prompt, _, _ in asked] == [r"a\nb", "a\nb"]


MARK = "\ufeff"


def test_a_byte_order_mark_is_no_part_of_a_text(run, asked, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(codecs.BOM_UTF8 + f"one{MARK} two\r\n".encode())
    run("generate", "-n", "1", "-f", file)
    run("generate", "-n", "1", text=codecs.BOM_UTF8 + b"three")
    assert [prompt for prompt, _, _ in asked] == [f"one{MARK} two\r\n", "three"]


def test_a_byte_order_mark_in_a_chat(run, monkeypatch):
    sent = []
    send = Conversation.send
    monkeypatch.setattr(Conversation, "send", lambda self, text, **more: sent.append(text) or send(self, text, **more))
    run("chat", "-n", "1", text=codecs.BOM_UTF8 + b"hello\n")
    run("chat", "why", "-n", "1", text=codecs.BOM_UTF8 + b"hello\n")
    assert sent == ["hello", "hello\n\nwhy"]


@pytest.mark.parametrize(
    "data, name",
    [
        ("Was ist das?".encode("utf-16"), "UTF-16"),
        ("Was ist das?".encode("utf-16-le"), "UTF-16"),
        ("Was ist das?".encode("utf-16-be"), "UTF-16"),
        ("Was ist das?".encode("utf-32"), "UTF-32"),
    ],
)
def test_other_encodings_are_refused_by_name(run, tmp_path, data, name):
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    for result in (run("generate", "-f", file, code=2), run("generate", text=data, code=2)):
        assert f"must be UTF-8 text: found {name}; save it as UTF-8" in result.stderr


def test_files_of_programs_have_no_mark_and_one_encoding(tmp_path, model):
    lines = '{"prompt": "a"}\n{"turns": ["b", "c"]}\n'
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(lines.encode())
    plain = read_prompts(file)
    file.write_bytes(lines.encode("utf-8-sig"))
    assert read_prompts(file) == plain and len(plain) == 2
    text = tmp_path / "calibration.txt"
    text.write_bytes(b"hello world, there is the one. " * 9)
    with ModelFile.open(model) as opened:
        tokens = texts_of_file(text, opened)
        text.write_bytes(codecs.BOM_UTF8 + text.read_bytes())
        assert texts_of_file(text, opened) == tokens
        text.write_text("hello world" * 9, encoding="utf-16")
        with pytest.raises(InvalidArgument, match=r"calibration.txt must be UTF-8 text: found UTF-16; save it"):
            texts_of_file(text, opened)
    file.write_text(lines, encoding="utf-16")
    with pytest.raises(InvalidArgument, match="found UTF-16"):
        read_prompts(file)


def test_a_saved_conversation_may_have_a_mark(tmp_path, model, run):
    import edgeinfer

    file = tmp_path / "talk.jsonl"
    with edgeinfer.load(model, backend="reference") as engine:
        chat = engine.chat(system="be brief")
        chat.send("hello", max_tokens=2, seed=1).close()
        chat.save(file)
        messages = chat.messages
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
        chat.clear()
        chat.load(file)
        assert chat.messages == messages
        file.write_text(file.read_text("utf-8-sig"), encoding="utf-16")
        with pytest.raises(InvalidArgument, match=r"talk.jsonl must be UTF-8 text: found UTF-16"):
            chat.load(file)
        assert chat.messages == messages


def test_bytes_that_only_look_odd_are_texts():
    for text in ("", "\0", "a\0b", "\0\0\0\0", "a\0" * 1 + "long text without zeros", "\u00e9\u4e2d"):
        assert decoded(text.encode(), "it") == text
    assert without_mark(codecs.BOM_UTF8 * 2, "it") == codecs.BOM_UTF8
    with pytest.raises(InvalidArgument, match="it must be UTF-8 text: 'utf-8' codec"):
        decoded(b"\xff", "it")


def test_a_sample_has_the_line_ends_of_a_text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(codecs.BOM_UTF8 + b"a\r\nb\rc\xff\n")
    assert sample_of(file) == "a\nb\nc\ufffd\n"


def test_negative_values_of_llama_cpp_are_flags_too(run):
    record = json.loads(run("generate", "a", "-n", "1", "--json", "--top-k", "-1", "-s", "-1").stdout)
    assert record["params"]["top_k"] == 0 and record["seed"] >= 0


def test_a_begin_token_that_is_there_twice_is_noted(tmp_path, run, model, monkeypatch):
    from edgeinfer.models.tokenizer import Tokenizer

    from_file = Tokenizer.from_file

    def adding(file):
        tokenizer = from_file(file)
        tokenizer.add_bos = True
        return tokenizer

    monkeypatch.setattr(Tokenizer, "from_file", staticmethod(adding))
    result = run("generate", "<|endoftext|>a", "-n", "1")
    assert "the text begins with <|endoftext|>, and the tokenizer of this model adds one" in result.stderr
    assert "RuntimeWarning" not in result.stderr and "begins with" not in run("generate", "a", "-n", "1").stderr
