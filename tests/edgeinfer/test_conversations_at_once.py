"""Conversations on one engine at once, from threads and from asyncio tasks."""

import asyncio
import threading

import pytest
from random_requests import in_threads
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import ContextOverflow, InvalidArgument

QUESTIONS = ("hello", "there is one more", "world")
SHORT = {"max_tokens": 12, "seed": 1}

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=512)
    with edgeinfer.load(model, backend="native", parallel=4, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()  # a random model draws them at random
        yield engine


def held(engine, system):
    """The messages of a conversation that runs alone."""
    chat = engine.chat(system=system)
    for question in QUESTIONS:
        list(chat.send(question, **SHORT))
    return chat.messages


def test_two_conversations_run_side_by_side(engine, monkeypatch):
    expected = [held(engine, system) for system in ("be brief", "be kind")]
    sizes, forward = [], engine.session.model.forward
    monkeypatch.setattr(engine.session.model, "forward", lambda batch: sizes.append(len(batch)) or forward(batch))
    chats = [engine.chat(system=system) for system in ("be brief", "be kind")]
    for question in QUESTIONS:
        answers = [chat.send(question, **SHORT) for chat in chats]
        while any([next(answer, None) for answer in answers]):
            pass
    assert [chat.messages for chat in chats] == expected
    assert max(sizes) == 2


def test_two_conversations_of_two_threads(engine):
    systems = ("be brief", "be kind")
    expected = [held(engine, system) for system in systems]
    begun = threading.Barrier(2)

    def converse(i):
        begun.wait(30)
        return held(engine, systems[i])

    assert in_threads(2, converse) == expected


def test_tasks_converse_side_by_side(engine):
    async def converse(system):
        chat = engine.chat(system=system)
        for question in QUESTIONS:
            completion = await chat.asend(question, **SHORT)
            assert chat.messages[-1]["content"] == completion.text
        return chat.messages

    async def both():
        return await asyncio.gather(converse("be brief"), converse("be kind"))

    assert asyncio.run(both()) == [held(engine, "be brief"), held(engine, "be kind")]


def test_pieces_of_an_answer_for_asyncio(engine):
    async def answer(chat):
        return [piece async for piece in chat.astream("hello", **SHORT)]

    chat = engine.chat()
    pieces = asyncio.run(answer(chat))
    assert pieces[-1].finish_reason == "length"
    assert chat.messages[-1]["content"] == "".join(piece.text for piece in pieces)


def test_a_task_that_is_cancelled_keeps_what_was_said(engine):
    chat, said = engine.chat(), []

    async def read():
        async for piece in chat.astream("hello", seed=1):
            said.append(piece.text)

    async def cancelled():
        task = asyncio.create_task(read())
        while len("".join(said)) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not engine.scheduler.texts
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.messages[1]["content"].startswith("".join(said))
    assert asyncio.run(chat.asend("more", **SHORT)).finish_reason == "length"


def test_an_answer_that_is_left_early_is_kept(engine):
    async def first_of(chat):
        pieces = chat.astream("hello", seed=1)
        async for piece in pieces:
            if piece.text:
                break
        await pieces.aclose()

    chat = engine.chat()
    asyncio.run(first_of(chat))
    assert len(chat.messages) == 2 and not engine.scheduler.texts


def test_cancel_ends_an_answer_that_another_thread_reads(engine):
    chat = engine.chat()
    answer = chat.send("hello", seed=1)
    next(answer)
    answer.cancel()
    assert list(answer)[-1].finish_reason == "interrupted"
    assert len(chat.messages) == 2 or not answer.completion.text


def test_what_is_refused_leaves_the_conversation_as_it_was(engine):
    chat = engine.chat()
    with pytest.raises(ContextOverflow):
        asyncio.run(chat.asend("word " * 2000))
    with pytest.raises(InvalidArgument, match="max_tokens"):
        asyncio.run(chat.asend("hello", max_tokens=-3))
    assert chat.messages == []


def test_an_answer_takes_all_options_of_a_stream(engine):
    chat = engine.chat()
    answer = chat.send("hello", timeout=60.0, priority=1, logprobs=1, **SHORT)
    pieces = list(answer)
    assert sum(len(piece.logprobs) for piece in pieces) == len(answer.completion.logprobs) == 12


def test_the_answer_to_messages_that_are_not_kept(engine):
    chat = engine.chat()
    with pytest.raises(InvalidArgument, match="last message"):
        chat.stream()
    chat.messages = [{"role": "user", "content": "hello"}]
    stream = chat.stream(**SHORT)
    assert "".join(piece.text for piece in stream) and len(chat.messages) == 1
    other = engine.chat()
    list(other.send("hello", **SHORT))
    assert other.messages[-1]["content"] == stream.completion.text
