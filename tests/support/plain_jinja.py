"""jinja2 as transformers uses it on chat templates, and conversations to try templates on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

CONVERSATIONS: list[list[Message]] = [
    [],
    [{"role": "user", "content": 'Hi <b>there</b> "q" \'s é😀'}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  a  "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb {{ x }}"},
        {"role": "user", "content": "c<|im_end|>"},
    ],
    [{"role": "user", "content": "u"}, {"role": "user", "content": "v"}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": ""}],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": ["x", 2.5, None]}}}
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": '{"sun": 1}'},
    ],
]


class _Generation(Extension):
    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(lineno)

    def _write(self, caller: Any) -> Any:
        return caller()


def plainly_rendered(source: str, messages: Sequence[Message], add_generation_prompt: bool = True) -> str | None:
    """What transformers would write, by the way in which it sets jinja2 up; None where that fails."""

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = tojson
    functions = {"raise_exception": raise_exception, "strftime_now": datetime.datetime.now().strftime}
    environment.globals |= functions
    values = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
    try:
        return environment.from_string(source).render(**values, bos_token="<s>", eos_token="</s>")
    except Exception:
        return None
