"""Rewritten chat templates: contents as lists of parts give what the source makes of texts, here and in LiteRT-LM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parts import is_there, missing
from plain_jinja import plainly_rendered
from template_sources import FEATURES
from tiny_models import write_tiny_model

from edgeinfer.common.errors import TemplateError
from edgeinfer.exporters.litertlm import LitertlmTarget
from edgeinfer.exporters.litertlm.library import open_runtime
from edgeinfer.exporters.litertlm.template import rewritten_template
from edgeinfer.exporters.request import Request
from edgeinfer.models.chat_template import CHATML, ChatTemplate

SOURCES = {name: source for name, source in {**FEATURES, "ChatML": CHATML}.items() if name != "flags"}
TALKS = [
    [("user", "Hi <b>there</b> & \"q\" 'é'")],
    [("system", "Be brief.\n"), ("user", "  Two\nlines ")],
    [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb {{ x }}"), ("user", "c")],
]
Messages = list[dict[str, str]]


def messages_of(talk: list[tuple[str, str]]) -> Messages:
    return [{"role": role, "content": text} for role, text in talk]


def in_parts(messages: Messages) -> list[dict[str, object]]:
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def wanted(source: str, messages: Messages) -> str | None:
    """What the source makes of texts; None where it refuses them."""
    try:
        return ChatTemplate(source, "<s>", "</s>").render(messages)
    except TemplateError:
        return None


@pytest.mark.parametrize("name", SOURCES)
def test_parts_give_what_the_source_makes_of_texts(name: str) -> None:
    source = SOURCES[name]
    rewritten = rewritten_template(source, "<s>", "</s>")
    for talk in TALKS:
        messages = messages_of(talk)
        assert plainly_rendered(rewritten, in_parts(messages)) == wanted(source, messages)
        assert plainly_rendered(rewritten, messages) == wanted(source, messages)  # texts stay texts


@pytest.mark.parametrize(
    "source, named",
    [
        ("{% for m in messages %}{% continue %}{% endfor %}", "{% continue %}"),
        ("{{ messages[0].content.partition('a') }}", ".partition()"),
        ("{{ messages[0].content | striptags }}", "the filter striptags"),
        ("{% if messages is callable %}{% endif %}", "the test callable"),
        ("{% for m in messages recursive %}{% endfor %}", "a recursive loop"),
        ("{% if %}", "is broken"),
    ],
)
def test_what_has_no_other_words_is_refused_by_its_name(source: str, named: str) -> None:
    with pytest.raises(TemplateError, match=named.replace("(", r"\(").replace(")", r"\)")):
        rewritten_template(source, "", "")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """LiteRT-LM with a tiny model."""
    if not is_there("litert"):
        missing("litert", "ai-edge-litert and LiteRT-LM are not installed")
    folder: Path = tmp_path_factory.mktemp("engine")
    source, out = write_tiny_model(folder / "model.gguf", "llama", "F32"), folder / "model.litertlm"
    LitertlmTarget().write(Request(source, out, n_ctx=64, check=False), lambda share: None)
    runtime = open_runtime()
    engine = runtime.Engine(str(out), backend=runtime.Backend.CPU(thread_count=1), cache_dir=":nocache")
    yield engine
    engine.close()


@pytest.mark.parametrize("name", SOURCES)
def test_the_runtime_renders_conversations_as_the_source_does(name: str, engine: Any) -> None:
    source = SOURCES[name]
    rewritten = rewritten_template(source, "<s>", "</s>")
    for talk in TALKS:
        messages = messages_of(talk)
        conversation = engine.create_conversation(chat_template=rewritten, messages=messages[:-1])
        rendered = conversation.render_message_to_string(messages[-1])
        conversation.close()
        assert rendered == (wanted(source, messages) or "")
