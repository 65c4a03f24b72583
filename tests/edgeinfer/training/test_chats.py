"""Saved conversations as texts to train on."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.engine import Engine
from edgeinfer.message import Message
from edgeinfer.training.author import encode
from edgeinfer.training.chats import read_chats, texts_of_chat, write_chats
from edgeinfer.training.corpus import Corpus

LONG = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with edgeinfer.load(write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf"), draft="none") as opened:
        yield opened


def message(role: str, content: str, **more: object) -> Message:
    return {"role": role, "content": content, **more}  # type: ignore[typeddict-item, return-value]


def save(path: Path, messages: Sequence[Message]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in messages))


def talk(number: int) -> list[Message]:
    return [message("user", f"question {number}"), message("assistant", f"{LONG} {number}")]


def test_each_answer_follows_what_the_template_gives_before_it(engine: Engine) -> None:
    tokens = engine.tokenize(LONG, add_special=False)[:-1]  # other ones than the text would be cut into
    messages = [
        *(message("system", "be short"), message("user", "hello"), message("assistant", LONG)),
        *(message("user", "again"), message("assistant", LONG, tokens=tokens)),
        *(message("user", "and"), message("assistant", "no")),  # too short to learn from
    ]
    first, second = texts_of_chat(engine, messages, 1024)
    end = engine.tokenizer.eos_id
    assert end in engine.tokenizer.stop_ids
    for text, n_before, answer in ((first, 2, engine.tokenize(LONG, add_special=False)), (second, 4, tokens)):
        prompt = encode(engine, messages[:n_before])
        assert text.tokens.tolist() == [*prompt, *answer, end] and text.n_prompt == len(prompt)
    (cut,) = texts_of_chat(engine, messages[:3], first.n_prompt + 9)
    assert cut.tokens.tolist() == first.tokens.tolist()[: first.n_prompt + 9]
    assert texts_of_chat(engine, messages[:3], first.n_prompt + 7) == []
    assert texts_of_chat(engine, [message("assistant", LONG), message("user", "hello")], 1024) == []


def test_a_conversation_counts_once_whatever_its_file_is_called(engine: Engine, tmp_path: Path) -> None:
    for name, number in (("b/1", 1), ("a", 2), ("c", 1)):
        save(tmp_path / f"{name}.jsonl", talk(number))
    save(tmp_path / "d.jsonl", [message("user", "nobody answered")])
    (tmp_path / "e.txt").write_text("no conversation")
    found = [chat[1]["content"][-1] for chat in read_chats(tmp_path, engine)]
    assert sorted(found) == ["1", "2"]
    (tmp_path / "a.jsonl").rename(tmp_path / "z.jsonl")
    assert [chat[1]["content"][-1] for chat in read_chats(tmp_path, engine)] == found


def test_what_cannot_be_trained_on_is_named(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="at least two conversations with answers.*found none"):
        read_chats(tmp_path, engine)
    save(tmp_path / "a.jsonl", talk(1))
    with pytest.raises(InvalidArgument, match="found 1"):
        read_chats(tmp_path, engine)
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(InvalidArgument, match=r"b\.jsonl, line 1"):
        read_chats(tmp_path, engine)


def test_whole_conversations_are_held_out(engine: Engine, tmp_path: Path) -> None:
    for number in range(40):
        save(tmp_path / "chats" / f"{number}.jsonl", [*talk(number), *talk(number + 100)])
    write_chats(tmp_path / "work", engine, tmp_path / "chats", "mark", 512, 48)
    parts = [Corpus(tmp_path / "work", part) for part in ("held", "train")]
    counts = [sum(len(part.texts(number)) for number in range(part.n_shards)) for part in parts]
    assert counts == [2, 78]  # a share of 3 % of 40 conversations, which have two answers each
    save(tmp_path / "chats" / "new.jsonl", talk(77))
    with pytest.raises(InvalidArgument, match="other settings"):
        write_chats(tmp_path / "work", engine, tmp_path / "chats", "mark", 512, 48)
