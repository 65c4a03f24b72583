"""The chat template in each place where checkpoints keep one."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.common.errors import ModelFileError
from edgeinfer.exporters.checkpoint import Folder
from edgeinfer.exporters.vocabulary.chat_templates import chat_templates, template_notes


def found(folder: Path, setting: Any = None) -> dict[str, Any]:
    return dict(chat_templates(Folder(folder), {"chat_template": setting}))


def test_the_newest_place_counts(tmp_path: Path) -> None:
    assert found(tmp_path) == {}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of processor"}))
    assert found(tmp_path) == {"tokenizer.chat_template": "of processor"}
    assert found(tmp_path, "of settings") == {"tokenizer.chat_template": "of settings"}
    (tmp_path / "chat_template.jinja").write_text("{# \u00e4 #}\r\n{{ file }}\n", newline="")
    assert found(tmp_path, "of settings") == {"tokenizer.chat_template": "{# \u00e4 #}\r\n{{ file }}\n"}


@pytest.mark.parametrize(
    "template, words",
    [
        ("{% for m in messages %}{{ m.content }}", "is broken at line 1: Unexpected end of template"),
        ("{{ messages[0].content | nosuch }}", "No filter named 'nosuch'"),
        ("{{ 1 / 0 }}", "the chat template fails: ZeroDivisionError"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ 'always this' }}", "leaves out what the user says"),
        ("no Jinja at all", "must be Jinja, or the name of a known one"),
        ("{{ messages[5].content }}", "the chat template fails"),
    ],
)
def test_a_template_that_fails_is_said(template: str, words: str) -> None:
    (note,) = template_notes({"tokenizer.chat_template": template})
    assert note.startswith("tokenizer.chat_template: ") and words in note and note.endswith("chats with it fail")


def test_a_template_that_does_not_fail_is_not_mentioned() -> None:
    good = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    keys = {"tokenizer.ggml.tokens": ["<s>"], "tokenizer.ggml.bos_token_id": 0, "tokenizer.chat_template": good}
    assert template_notes(keys) == template_notes({}) == []
    (note,) = template_notes({**keys, "tokenizer.chat_template.tool_use": "{% if %}"})
    assert note.startswith("tokenizer.chat_template.tool_use: ")


def test_more_templates_have_names(tmp_path: Path) -> None:
    wanted = {
        "tokenizer.chat_template": "yes",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    named = [{"name": "tool-use", "template": "tools"}, {"name": "default", "template": "yes"}]
    assert found(tmp_path, named) == wanted
    assert found(tmp_path, {"default": "yes", "tool_use": "tools"}) == wanted
    assert found(tmp_path, named[:1]) == {key: wanted[key] for key in list(wanted)[1:]}
    (tmp_path / "chat_template.jinja").write_text("yes")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "additional_chat_templates" / ".hidden.jinja").write_text("no")
    assert found(tmp_path) == wanted


@pytest.mark.parametrize("setting", [3, [3], [{"name": 1, "template": "x"}], {"default": None}, [{"name": "default"}]])
def test_what_is_no_template_is_an_error(setting: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="tokenizer_config.json: chat_template must be a text, or texts by name"):
        found(tmp_path, setting)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="chat_template.jinja: must be UTF-8"):
        found(tmp_path)
