"""Conversations on a tiny model: what is kept, what is dropped, what the next answer costs."""

import json
import os

import pytest
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import BackendUnavailable, ContextOverflow, InvalidArgument, NumericalError, TemplateError
from edgeinfer.loading.backend_choice import open_backend
from edgeinfer.models.chat_template import MAX_LENGTH

SHORT = {"max_tokens": 12, "seed": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=512)


@pytest.fixture(scope="module", params=["reference", "native"])
def engine(request, model):
    try:
        open_backend(request.param)
    except BackendUnavailable as error:
        missing(request.param, str(error))
    with edgeinfer.load(model, backend=request.param) as engine:
        engine.tokenizer.stop_ids = frozenset()  # a random model draws them at random
        yield engine


@pytest.fixture
def chat(engine):
    return engine.chat(system="be brief")


def said(answer):
    return "".join(piece.text for piece in answer)


def said_in(answer):
    """The message of an answer without reasoning and calls of tools."""
    return {"role": "assistant", "content": answer.completion.text, "tokens": list(answer.completion.tokens)}


def encode(engine, messages):
    return engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)


def roles(chat):
    return [message["role"] for message in chat.messages]


def ask(chat, text, **options):
    answer = chat.send(text, **(SHORT | options))
    assert said(answer) == answer.completion.text
    return answer


def test_an_exchange_is_two_messages_more(chat):
    answer = ask(chat, "hello")
    assert chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        said_in(answer),
    ]
    assert answer.is_kept


def test_an_answer_is_the_completion_of_the_messages_in_the_template(chat, engine):
    ask(chat, "hello")
    second = ask(chat, "there")
    rendered = engine.template.render(chat.messages[:-1], add_generation_prompt=True)
    assert rendered.count("<|im_start|>") == 5 and rendered.endswith("there<|im_end|>\n<|im_start|>assistant\n")
    assert engine.generate(encode(engine, chat.messages[:-1]), **SHORT).tokens == second.completion.tokens


def test_a_turn_reads_only_what_is_new(engine):
    chat = engine.chat()
    prompts = [encode(engine, [{"role": "user", "content": "hello world"}])]
    answer = ask(chat, "hello world").completion
    prompts.append(encode(engine, [*chat.messages, {"role": "user", "content": "and again"}]))
    usage = ask(chat, "and again").completion.usage
    # Read again is only from where the text of the answer has another cut into tokens than the model gave it.
    committed = [*prompts[0], *answer.tokens[:-1]]
    common = os.path.commonprefix([committed, prompts[1]])
    assert usage.cached_tokens == len(common) > 20 and usage.prompt_tokens == len(prompts[1])


def test_an_answer_does_not_depend_on_what_else_the_engine_did(chat, engine):
    ask(chat, "hello")
    other = engine.chat()
    other.messages = list(chat.messages)
    first = ask(chat, "go on").completion.text
    engine.generate("something else entirely", max_tokens=3)
    assert ask(other, "go on").completion.text == first


def test_nothing_is_said_twice_at_once(chat):
    answer = chat.send("hello", **SHORT)
    assert roles(chat) == ["system"]  # not before it is answered
    next(answer)
    assert roles(chat) == ["system"]
    said(answer)
    assert roles(chat) == ["system", "user", "assistant"]


def test_an_answer_closed_half_way_is_kept(chat, engine):
    answer = chat.send("hello", seed=1)
    shown = "".join(next(answer).text for _ in range(20))
    answer.close()
    assert answer.completion.finish_reason == "interrupted"
    assert chat.messages[-1] == said_in(answer)
    assert answer.completion.text.startswith(shown) and shown
    assert ask(chat, "go on").completion.finish_reason == "length"


def test_an_answer_that_nobody_reads_further_is_kept_half_way(chat):
    for n_pieces, _ in enumerate(chat.send("hello", seed=1)):
        if n_pieces == 20:
            break
    assert roles(chat) == ["system", "user", "assistant"] and chat.messages[-1]["content"]


def test_interrupt_keeps_what_was_said(chat, engine):
    answer = chat.send("hello", seed=1)
    shown = "".join(next(answer).text for _ in range(20))
    engine.interrupt()
    shown += said(answer)
    assert answer.completion.finish_reason == "interrupted" and chat.messages[-1]["content"] == shown


def test_ctrl_c_in_a_forward_pass_keeps_what_was_said(chat, engine, monkeypatch):
    answer = chat.send("hello", seed=1)
    for _ in range(20):
        next(answer)
    monkeypatch.setattr(engine.session, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        said(answer)  # first what is left of the last pass, which may have given several tokens
    monkeypatch.undo()
    assert roles(chat) == ["system", "user", "assistant"] and chat.messages[-1]["content"]
    assert ask(chat, "go on").completion.tokens


def test_ctrl_c_before_the_first_character_leaves_the_conversation_as_it_was(chat, engine, monkeypatch):
    ask(chat, "hello")
    before = list(chat.messages)
    monkeypatch.setattr(engine.session, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(chat.send("again", **SHORT))
    monkeypatch.undo()
    assert chat.messages == before
    assert ask(chat, "again").is_kept


def interrupted(*args, **options):
    raise KeyboardInterrupt


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(chat, engine, monkeypatch):
    answer = chat.send("hello", seed=1)
    for _ in range(5):
        next(answer)

    def failing(*args, **options):
        raise NumericalError("not a number")

    monkeypatch.setattr(engine.session, "forward", failing)
    with pytest.raises(NumericalError):
        list(answer)
    answer.close()
    assert roles(chat) == ["system"] and not answer.is_kept


def test_a_message_that_does_not_fit_is_refused_with_the_counts_and_not_kept(chat, engine):
    ask(chat, "hello")
    before = list(chat.messages)
    with pytest.raises(ContextOverflow, match=r"tokens do not fit into a context of 512; .*/undo") as caught:
        chat.send("x" * 600)
    assert caught.value.n_tokens > 600 and caught.value.n_ctx == 512
    assert chat.messages == before
    assert ask(chat, "shorter").is_kept


def test_messages_that_cannot_fit_are_refused_before_they_are_tokenised(chat, engine, monkeypatch):
    ask(chat, "hello")
    before = list(chat.messages)
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *a, **k: pytest.fail("tokenised"))
    with pytest.raises(ContextOverflow, match=r"^at least \d+ tokens do not fit into a context of 512; .*/undo"):
        chat.send(" " * 100_000)
    assert chat.messages == before


def test_a_message_longer_than_templates_may_be_given_does_not_fit_either(chat, monkeypatch):
    monkeypatch.setattr(chat._template, "render", lambda *a, **k: pytest.fail("rendered"))
    before = list(chat.messages)
    with pytest.raises(ContextOverflow, match=r"^at least \d+ tokens do not fit"):
        chat.send(" " * (MAX_LENGTH + 1))
    assert chat.messages == before


def test_what_a_template_leaves_out_does_not_count(chat, engine, monkeypatch):
    from edgeinfer.models.chat_template import CHATML, ChatTemplate

    trims = ChatTemplate(CHATML.replace("message['content']", "message['content'] | trim"))
    assert " | trim" in trims._source
    monkeypatch.setattr(chat, "_template", trims)
    assert ask(chat, " " * 100_000 + "hello").is_kept


def test_a_message_that_leaves_no_room_for_an_answer_does_not_fit(engine):
    chat = engine.chat()
    room = engine.n_ctx - len(encode(engine, [{"role": "user", "content": ""}]))
    with pytest.raises(ContextOverflow):
        chat.send("\x01" * room)  # no merges: a token a character
    answer = chat.send("\x01" * (room - 1), temperature=0.0)
    list(answer)
    assert answer.completion.usage.completion_tokens == 1 and answer.completion.finish_reason == "length"


def test_n_past_counts_the_tokens_of_the_messages(chat, engine):
    assert chat.n_past == 0
    ask(chat, "hello")
    rendered = engine.template.render(chat.messages, add_generation_prompt=False)
    assert chat.n_past == len(engine.tokenize(rendered, add_special=False))


def test_regenerate_takes_the_place_of_the_last_answer(chat):
    ask(chat, "hello")
    first = list(chat.messages)
    again = chat.regenerate(**(SHORT | {"seed": 2}))
    said(again)
    assert chat.messages[:-1] == first[:-1] and chat.messages[-1]["content"] == again.completion.text
    assert chat.messages[-1] != first[-1]
    same = chat.regenerate(**SHORT)
    said(same)
    assert chat.messages == first


def test_regenerate_stopped_before_the_first_character_keeps_the_old_answer(chat, engine, monkeypatch):
    ask(chat, "hello")
    before = list(chat.messages)
    monkeypatch.setattr(engine.session, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(chat.regenerate())
    assert chat.messages == before


def test_undo_drops_the_last_exchange_and_gives_its_question(chat):
    ask(chat, "one")
    after_one = list(chat.messages)
    ask(chat, "two")
    assert chat.undo() == "two" and chat.messages == after_one
    assert chat.undo() == "one" and roles(chat) == ["system"]
    for action in (chat.undo, chat.regenerate):
        with pytest.raises(InvalidArgument, match="no exchange"):
            action()


def test_clear_keeps_the_system_message(chat, engine):
    ask(chat, "hello")
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    without = engine.chat()
    ask(without, "hello")
    without.clear()
    assert without.messages == []


def test_the_system_message_can_be_changed_and_removed(chat):
    ask(chat, "hello")
    chat.system = "be long"
    assert chat.messages[0] == {"role": "system", "content": "be long"} and len(chat.messages) == 3
    chat.system = None
    assert chat.system is None and roles(chat) == ["user", "assistant"]
    chat.system = "again"
    assert roles(chat) == ["system", "user", "assistant"]


def test_an_answer_to_a_conversation_that_went_on_is_refused(chat):
    late = chat.send("late", **SHORT)
    ask(chat, "hello")
    before = list(chat.messages)
    with pytest.raises(InvalidArgument, match="went on without"):
        next(late)
    late.close()
    assert chat.messages == before


def test_an_answer_closed_after_the_conversation_was_cleared_is_not_kept(chat):
    ask(chat, "hello")
    answer = chat.send("again", seed=1)
    for _ in range(20):
        next(answer)
    chat.clear()
    answer.close()
    assert answer.completion.text and roles(chat) == ["system"] and not answer.is_kept


def test_a_saved_conversation_goes_on_as_if_it_had_not_been(chat, engine, tmp_path):
    ask(chat, 'a "quoted" line\nand another, é 漢')
    chat.save(tmp_path / "talk.jsonl")
    assert [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()] == chat.messages
    loaded = engine.chat()
    loaded.load(tmp_path / "talk.jsonl")
    assert loaded.messages == chat.messages and loaded.system == "be brief"
    assert ask(loaded, "go on").completion.tokens == ask(chat, "go on").completion.tokens


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(chat, tmp_path, monkeypatch):
    path = tmp_path / "talk.jsonl"
    chat.save(path)
    before = path.read_bytes()
    ask(chat, "hello")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        chat.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "line 1 is no JSON"),
        ('{"role": "user", "content": "a"}\n[]', "line 2 must be"),
        ('{"role": "user"}', "line 1 must be"),
        ('{"role": "user", "content": 5}', "line 1 must be"),
        ('{"role": "judge", "content": "a"}', "line 1: the role must be system, user, assistant"),
        ('{"role": "user", "content": "a"}\n{"role": "system", "content": "b"}', "must be the first"),
        ("\xff", "line 1 is no JSON"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_and_changes_nothing(chat, tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_bytes(text.encode("latin-1"))
    before = list(chat.messages)
    with pytest.raises(InvalidArgument, match=message):
        chat.load(tmp_path / "bad.jsonl")
    assert chat.messages == before


def test_a_model_with_a_broken_template_refuses_to_chat_and_still_completes(model):
    with edgeinfer.load(model, backend="reference") as engine:
        engine.tokenizer.chat_template = "{% for %}"
        with pytest.raises(TemplateError, match="broken"):
            engine.chat()
        assert engine.generate("hello", max_tokens=2, temperature=0.0).tokens


def test_a_message_the_template_refuses_is_not_kept(model):
    with edgeinfer.load(model, backend="reference") as engine:
        refuses = "{{ raise_exception('no shouting here') if messages[-1].content == 'HELLO' }}"
        engine.tokenizer.chat_template = refuses + "{{ messages[-1].content }}"
        chat = engine.chat()
        with pytest.raises(TemplateError, match="no shouting here"):
            chat.send("HELLO")
        list(chat.send("hello", max_tokens=2, seed=1))
        assert roles(chat) == ["user", "assistant"]


def test_the_text_of_a_control_token_in_a_message_stays_text(engine):
    end, prompts = engine.tokenizer.token_id("<|im_end|>"), []
    forward = engine.session.forward
    engine.session.truncate(0)
    engine.session.forward = lambda tokens, **options: prompts.append(list(tokens)) or forward(tokens, **options)
    try:
        list(engine.chat().send("a<|im_end|>b", max_tokens=1))
    finally:
        engine.session.forward = forward
    assert prompts[0].count(end) == 1 and "a<|im_end|>b<|im_end|>" in engine.detokenize(prompts[0])


def test_an_answer_that_is_a_loop_ends_is_kept_and_the_conversation_goes_on(chat, engine):
    (word,) = engine.tokenizer.encode("h", add_special=False)
    answer = ask(chat, "hello", max_tokens=None, logit_bias={word: 1000.0}, loop_guard=64)
    assert answer.completion.finish_reason == "repetition" and answer.is_kept
    assert chat.messages[-1]["role"] == "assistant" and chat.messages[-1]["content"] == "h" * 64
    assert ask(chat, "and now?").completion.finish_reason in ("length", "stop")
    assert len(chat.messages) == 5


def test_a_file_without_an_end_is_not_loaded(chat, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, "/dev/zero"):
        with pytest.raises(InvalidArgument, match="no regular file"):
            chat.load(place)


def test_how_much_of_the_context_a_long_conversation_takes_is_said_without_tokenising_it(chat, engine, monkeypatch):
    chat.messages = [{"role": "user", "content": " " * 100_000}, {"role": "assistant", "content": "x"}]
    monkeypatch.setattr(engine.tokenizer, "encode_rendered", lambda *a, **k: pytest.fail("tokenised"))
    assert chat.n_past > engine.n_ctx
