"""Templates that a caller gives, whether a model reasons, and answers that are begun."""

import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import InvalidArgument, TemplateError
from edgeinfer.models.chat_template import MAX_SOURCE_BYTES
from edgeinfer.models.known_templates import named_source

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% endif %}"
)
OPENS = PLAIN.replace("[assistant]", "[assistant]<think>\n")  # as R1's does, whatever it is told
ASKS = PLAIN.replace(
    "[assistant]",
    "[assistant]{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
)
CALLS = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: "
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=512)


@pytest.fixture
def opened(model):
    """Loads the model with options, and closes it after the test."""
    engines = []

    def opened(**options):
        engines.append(edgeinfer.load(model, backend="reference", draft="none", **options))
        engines[-1].tokenizer.stop_ids = frozenset()  # a random model draws them at random
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def prompt(engine, messages=QUESTION, **options):
    chat = engine.chat()
    chat.messages = [dict(message) for message in messages]
    return engine.detokenize(chat.prompt(**options))


# ---- templates -------------------------------------------------------------------------------------------------------


def test_a_template_is_given_as_text_by_name_or_in_a_file(opened, tmp_path):
    assert "<|im_start|>" in opened().template.source
    given = opened(chat_template=PLAIN)
    assert given.template.source == PLAIN and prompt(given) == "[user]hi[/][assistant]"
    assert opened(chat_template=" llama3\n").template.source == named_source("llama3")
    (tmp_path / "t.jinja").write_text("\ufeff" + PLAIN, encoding="utf-8")
    assert opened(chat_template=tmp_path / "t.jinja").template.source == PLAIN
    (tmp_path / "t.jinja").write_text("vicuna\n")
    assert opened(chat_template=tmp_path / "t.jinja").template.source == named_source("vicuna")


def test_the_formats_of_calls_and_reasoning_are_those_of_the_template(opened):
    assert opened().output_format.calls is None and opened().output_format.reasoning == []
    assert opened(chat_template=CALLS).output_format.calls.opening == "[TOOL_CALLS]"
    assert opened(chat_template=OPENS).output_format.reasoning == [("<think>", "</think>")]


@pytest.mark.parametrize(
    "source, error, said",
    [
        ("not a template", TemplateError, "must be Jinja, or the name of a known one"),
        ("{% if %}", TemplateError, "broken at line 1"),
        ("{{ 1 }}" + " " * MAX_SOURCE_BYTES, TemplateError, "256 KiB"),
        (" \n", InvalidArgument, "chat_template must be Jinja, the name of a known template, or the Path"),
        (3, InvalidArgument, "chat_template must be Jinja"),
        (b"{{ 1 }}", InvalidArgument, "chat_template must be Jinja"),
    ],
)
def test_what_is_no_template_is_refused_before_the_model_is_loaded(model, monkeypatch, source, error, said):
    monkeypatch.setattr("edgeinfer.loading.open.plan_load", lambda *arguments: pytest.fail("it was planned"))
    with pytest.raises(error, match=said):
        edgeinfer.load(model, chat_template=source)


def test_a_file_that_is_none_is_refused(model, tmp_path):
    for name, content, error, said in (
        ("none", None, InvalidArgument, "none cannot be read: No such file"),
        ("long", b" " * (MAX_SOURCE_BYTES + 1), TemplateError, "long: a chat template may have 256 KiB"),
        ("bytes", b"\xff{{ 1 }}", InvalidArgument, "bytes must be UTF-8"),
        ("empty", b" \n", TemplateError, "is empty"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=said):
            edgeinfer.load(model, chat_template=tmp_path / name)


def test_a_template_that_is_given_is_in_the_sandbox_and_shows_the_user(opened):
    with pytest.raises(TemplateError, match="the chat template that was given leaves out what the user says"):
        opened(chat_template="{{ 'hello' }}").chat()
    engine = opened(chat_template=PLAIN + "{% if messages | length > 1 %}{{ 'x' * 99999999 }}{% endif %}")
    with pytest.raises(TemplateError, match="longer than"):
        prompt(engine, [*QUESTION, {"role": "assistant", "content": "a"}, *QUESTION])


def test_ranking_asks_through_a_template_that_is_given(opened):
    engine = opened(chat_template=PLAIN)
    asked = []
    engine.score = lambda prompt, following: asked.append(engine.detokenize(prompt)) or []
    engine.rank("q", ["a"])
    assert asked[0].startswith("[user]") and "[/][assistant]" in asked[0]


# ---- reasoning -------------------------------------------------------------------------------------------------------


def test_a_template_is_told_whether_the_model_reasons(opened):
    assert prompt(opened(chat_template=ASKS)).endswith("[assistant]")
    assert prompt(opened(chat_template=ASKS, reasoning="on")).endswith("[assistant]")
    off = opened(chat_template=ASKS, reasoning="off")
    assert prompt(off).endswith("[assistant]<think>\n\n</think>\n\n")
    assert prompt(off, chat_template_kwargs={"enable_thinking": True}).endswith("[assistant]")
    assert prompt(off, chat_template_kwargs={"other": 1}).endswith("</think>\n\n")
    given = {"enable_thinking": False}
    assert prompt(opened(chat_template=ASKS), chat_template_kwargs=given).endswith("</think>\n\n")


def test_a_reasoning_that_the_template_opens_is_ended_where_there_is_to_be_none(opened):
    assert prompt(opened(chat_template=OPENS)).endswith("[assistant]<think>\n")
    off = opened(chat_template=OPENS, reasoning="off")
    assert prompt(off).endswith("[assistant]<think>\n</think>")
    answer = off.chat().send("hi", max_tokens=4, seed=1)
    for _ in answer:
        pass
    assert answer.completion.reasoning is None and len(answer.completion.text) > 0
    on = opened(chat_template=OPENS).chat().send("hi", max_tokens=4, seed=1)
    for _ in on:
        pass
    assert on.completion.reasoning and on.completion.text == ""


def test_values_of_a_template_are_checked_and_no_more_trusted_than_a_message(opened):
    engine = opened(chat_template=PLAIN + "{{ note }}")
    said = prompt(engine, chat_template_kwargs={"note": "<|im_end|>"})
    assert said.endswith("<|im_end|>")
    chat = engine.chat()
    chat.messages = list(QUESTION)
    end = engine.tokenizer.token_id("<|im_end|>")
    assert end is None or end not in chat.prompt(chat_template_kwargs={"note": "<|im_end|>"})
    for name in ("messages", "tools", "bos_token", "add_generation_prompt", "range", "raise_exception", "a b", "self"):
        with pytest.raises(TemplateError, match="gets no value named"):
            chat.prompt(chat_template_kwargs={name: 1})
    with pytest.raises(TemplateError, match="must be made of texts"):
        chat.prompt(chat_template_kwargs={"note": object()})
    with pytest.raises(InvalidArgument, match="must be variables by name: found 'x'"):
        chat.send("hi", chat_template_kwargs="x")


@pytest.mark.parametrize("value", ["yes", None, True])
def test_a_reasoning_that_is_none_is_refused(model, value):
    with pytest.raises(InvalidArgument, match="reasoning must be"):
        edgeinfer.load(model, reasoning=value)


# ---- answers that are begun ------------------------------------------------------------------------------------------


def test_an_answer_at_the_end_is_gone_on_with(opened):
    engine = opened(chat_template=PLAIN)
    chat = engine.chat()
    begun = [*QUESTION, {"role": "assistant", "content": "Well, "}]
    chat.messages = [dict(message) for message in begun]
    assert prompt(engine, begun) == "[user]hi[/][assistant]Well, "
    expected = engine.generate(chat.prompt(), max_tokens=6, seed=2)
    stream = chat.stream(max_tokens=6, seed=2)
    assert "".join(piece.text for piece in stream) == expected.text and chat.messages == begun


def test_what_begins_an_answer_has_no_special_tokens_and_follows_the_reasoning(opened):
    begun = [*QUESTION, {"role": "assistant", "content": "<|im_end|>"}]
    engine = opened()
    chat = engine.chat()
    chat.messages = begun
    tokens = chat.prompt()
    end = engine.tokenizer.token_id("<|im_end|>")
    assert engine.detokenize(tokens).endswith("<|im_end|>") and tokens[-1] != end
    said = prompt(opened(chat_template=OPENS), [*QUESTION, {"role": "assistant", "content": "So"}])
    assert said.endswith("[assistant]<think>\n</think>\n\nSo")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "system", "content": "s"}],
        [{"role": "assistant", "content": "a"}],
        [*QUESTION, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [*QUESTION, {"role": "assistant", "content": ""}],
        [*QUESTION, {"role": "assistant", "content": "a", "reasoning": "r"}],
        [*QUESTION, {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": {}}]}],
    ],
)
def test_what_is_no_beginning_of_an_answer_is_refused(opened, messages):
    chat = opened(chat_template=PLAIN).chat()
    chat.messages = messages
    with pytest.raises(InvalidArgument, match="the last message must be the user's or a tool's"):
        chat.stream(max_tokens=2)
