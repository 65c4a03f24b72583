"""Tiny models that write calls of tools in each format, as their templates and vocabularies make them."""

from __future__ import annotations

import re
from pathlib import Path

from gguf import TokenType
from tiny_models import write_tiny_model

from edgeinfer.models import call_formats
from edgeinfer.models.call_formats import CallFormat

# Hermes, Qwen 2.5: tools in the system message, calls between tags, results in a message of their own.
TOOL_TEMPLATE = """{%- for t in tools or [] -%}{{ 'TOOL ' + (t | tojson) + '\\n' }}{%- endfor -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] -%}
    {{ '<tool_call>' }}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
    {{- '</tool_call>' + call.id }}
{%- endfor -%}
{%- if m.role == 'tool' -%}{{ '|' + m.name + '|' + m.tool_call_id }}{%- endif -%}
{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
FORMATS = {
    each.name: each
    for each in vars(call_formats).values()
    if isinstance(each, CallFormat) and each is not call_formats.GENERIC
}
# What a template of a format says of it, in the words by which it is known.
_SAID = {
    **{format.name: needed for format, needed, _ in reversed(call_formats._RULES)},
    "lfm2": ("tools", "<|tool_call_start|>"),
    "harmony": ("<|channel|>", "<|message|>"),
    "atem": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<atem:function_calls>"),
}
_MARK = re.compile(
    r"<\|[^<>\s]*\|>|<｜[^<>]*｜>|</?[a-z_:]*(?:call|CALL|key|value|escape)[a-zA-Z_:]*>|\[[A-Z_]+\]|<[|\"]+>"
)
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_RECIPIENTS = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<atem:function_calls>", "</atem:function_calls>")
_MARKS = {"harmony": _HARMONY, "atem": _RECIPIENTS}
_TURNS = (
    "{%- for t in tools or [] -%}{{ t.function.name }} {%- endfor -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_CHANNELS = (
    "{%- for t in tools or [] -%}{{ t.function.name }} {%- endfor -%}"
    "{%- for m in messages -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
)


def write_call_model(path: Path, name: str, has_tokens: bool, **options: object) -> Path:
    """A model whose template asks for calls in a format.  has_tokens: the marks are tokens of its vocabulary."""
    if name == "generic":
        return write_tiny_model(path, n_ctx_train=4096, **options)  # type: ignore[arg-type]
    format = FORMATS[name]
    whole = "".join((format.begin, format.head, format.middle, format.tail, format.end, format.quote))
    marks = _MARKS.get(name) or sorted({*_MARK.findall(whole), *_MARK.findall("".join(format.parameter))})
    said = "{# " + " ".join(_SAID[name]).replace("#}", "") + " #}"
    return write_tiny_model(
        path,
        template=(_CHANNELS if format.has_channels else _TURNS) + said,
        special=dict.fromkeys(marks, TokenType.CONTROL) if has_tokens else {},
        n_ctx_train=4096,
        **options,  # type: ignore[arg-type]
    )
