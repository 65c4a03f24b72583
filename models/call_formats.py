"""How models write calls of tools: one description of each format, from which what reads it and what allows it follow.

    begin  head NAME middle ARGUMENTS tail  separator head NAME middle ARGUMENTS tail ...  end

`edgeinfer.tools.grammar` makes of it what may follow, `edgeinfer.tools.reading` what was said.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Arguments: TypeAlias = Literal["json", "parameters", "python", "quoted"]
"""How arguments are written: as a JSON object; each between tags, texts without quotes; a=1, b="x" as Python does;
a:1,b:QxQ with quotes of their own."""

DIGITS = "\0"  # in a head or middle: a number that the model counts up
NAME = "\1"  # in a header: the name of the tool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of calls. Marks are written by their names, whether the vocabulary has them as tokens or not."""

    name: str
    opening: str  # what begins calls for who reads; "": there are no calls but bare ones
    closing: str  # what ends them, "": the next opening or the end
    head: str
    middle: str
    tail: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    arguments: Arguments = "json"
    parameter: tuple[str, str, str] = ("", "", "")  # before the name, between name and value, after the value
    quote: str = ""
    is_single: bool = False  # an answer has one call
    bare: str = ""  # what the arguments are called in a call that is all of an answer, "" where none may be
    has_channels: bool = False  # the call is a message of a channel, as gpt-oss writes it
    header: str = ""  # before the head: whom the message is for, where that is no part of the head


def _array(name: str, opening: str, closing: str, **more: str) -> CallFormat:
    """Calls as one JSON array."""
    call = {"head": '{"name": "', "middle": '", "arguments": ', "tail": "}", "separator": ", ", **more}
    return CallFormat(name, opening, closing, **{"begin": f"{opening}[", "end": f"]{closing}", **call})  # type: ignore[arg-type]


def _tagged(name: str, opening: str, closing: str, middle: str, parameter: tuple[str, str, str]) -> CallFormat:
    """Calls with a name and with each argument between tags."""
    inner = "</function>\n" if middle.startswith(">") else ""
    head = f"{opening}\n<function=" if inner else opening
    return CallFormat(
        name, opening, closing, head, middle, inner + closing, separator="\n", arguments="parameters",
        parameter=parameter,
    )  # fmt: skip


HERMES = CallFormat(
    "hermes", "<tool_call>", "</tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>",
    separator="\n", bare="arguments",
)  # fmt: skip
GENERIC = replace(HERMES, name="generic")
LLAMA = CallFormat("llama", "", "", '{"name": "', '", "parameters": ', "}", is_single=True, bare="parameters")
HARMONY = CallFormat(
    "harmony", "<|channel|>", "<|call|>", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>",
    "<|call|>", is_single=True, has_channels=True,
)  # fmt: skip
ATEM = CallFormat(
    "atem", "<atem:function_calls>", "</atem:function_calls>", '<atem:function_calls>\n<atem:invoke name="', '">\n',
    "</atem:invoke>\n</atem:function_calls>", separator="<|eom|><|start|>assistant", arguments="parameters",
    parameter=('<atem:parameter name="', '">', "</atem:parameter>\n"), has_channels=True,
    header=f" to={NAME}<|message|>",
)  # fmt: skip
XML = _tagged("xml", "<tool_call>", "</tool_call>", ">\n", ("<parameter=", ">\n", "\n</parameter>\n"))
SEED = _tagged("seed", "<seed:tool_call>", "</seed:tool_call>", ">\n", ("<parameter=", ">", "</parameter>\n"))
GLM = _tagged("glm", "<tool_call>", "</tool_call>", "\n", ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"))
GLM_SHORT = replace(
    GLM, name="glm, one line", middle="", separator="", parameter=("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
)
MINIMAX = CallFormat(
    "minimax", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">\n', "</invoke>\n",
    begin="<minimax:tool_call>\n", end="</minimax:tool_call>", arguments="parameters",
    parameter=('<parameter name="', '">', "</parameter>\n"),
)  # fmt: skip
MISTRAL = _array("mistral", "[TOOL_CALLS]", "")
MISTRAL_NAMED = CallFormat("mistral, named", "[TOOL_CALLS]", "", "[TOOL_CALLS]", "[ARGS]", "")
GRANITE = _array("granite", "<|tool_call|>", "")
NEMOTRON = _array("nemotron", "<TOOLCALL>", "</TOOLCALL>")
FALCON = _array("falcon", "<tool_call>", "</tool_call>", begin="<tool_call>\n[", end="]\n</tool_call>")
APRIEL = _array("apriel", "<tool_calls>", "</tool_calls>")
COHERE = _array(
    "cohere", "<|START_ACTION|>", "<|END_ACTION|>", begin="<|START_ACTION|>[\n    ", separator=",\n    ",
    head=f'{{"tool_call_id": "{DIGITS}", "tool_name": "', middle='", "parameters": ', end="\n]<|END_ACTION|>",
)  # fmt: skip
LFM2 = CallFormat(
    "lfm2", "<|tool_call_start|>", "<|tool_call_end|>", "", "(", ")", "<|tool_call_start|>[", ", ",
    "]<|tool_call_end|>", "python",
)  # fmt: skip
GEMMA = CallFormat(
    "gemma",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_call>call:",
    "{",
    "}<tool_call|>",
    arguments="quoted",
    quote='<|"|>',
)
FUNCTION_GEMMA = CallFormat(
    "functiongemma", "<start_function_call>", "<end_function_call>", "<start_function_call>call:", "{",
    "}<end_function_call>", arguments="quoted", quote="<escape>",
)  # fmt: skip
KIMI = CallFormat(
    "kimi", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>functions.",
    f":{DIGITS}<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "",
    "<|tool_calls_section_end|>",
)  # fmt: skip
DEEPSEEK = CallFormat(
    "deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n", "\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>",
)  # fmt: skip
DEEPSEEK_SHORT = replace(
    DEEPSEEK, name="deepseek, one line", head="<｜tool▁call▁begin｜>", middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>", separator="",
)  # fmt: skip

# Each with what a template has to name and what it must not; the first that fits is the model's.
_RULES: tuple[tuple[CallFormat, tuple[str, ...], tuple[str, ...]], ...] = (
    (SEED, ("<seed:tool_call>", "<function="), ()),
    (MINIMAX, ("<minimax:tool_call>", "<invoke name="), ()),
    (XML, ("<tool_call>", "<function=", "<parameter="), ()),
    (GLM, ("<tool_call>", "</arg_key>\n<arg_value>"), ()),
    (GLM, ("<tool_call>", '</arg_key>\\n"', '"<arg_value>"'), ()),  # Laguna XS: pieces of texts
    (GLM_SHORT, ("<tool_call>", "<arg_key>"), ()),
    (NEMOTRON, ("<TOOLCALL>",), ()),
    (APRIEL, ("<tool_calls>[",), ()),
    (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]"), ()),
    (MISTRAL, ("[TOOL_CALLS]",), ()),
    (GRANITE, ("<|tool_call|>",), ("<tool_call>",)),
    (FUNCTION_GEMMA, ("<start_function_call>", "<escape>"), ()),
    (GEMMA, ("<|tool_call>", "call:"), ()),
    (KIMI, ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), ()),
    (DEEPSEEK, ("<｜tool▁calls▁begin｜>", "```json"), ()),
    (DEEPSEEK_SHORT, ("<｜tool▁calls▁begin｜>",), ()),
    (COHERE, ("<|START_ACTION|>", "tool_name"), ()),
    (FALCON, ("<tool_call>\n[", '"arguments"'), ("<tool_calls>",)),
    (FALCON, (r"<tool_call>\n[", '"arguments"'), ("<tool_calls>",)),
    (HERMES, ("<tool_call>", '"arguments"'), ("<tool_calls>",)),
    (HERMES, ("<tool_call>", "'arguments'"), ("<tool_calls>",)),
    (LFM2, ("<|tool_call_start|>",), ()),
    (LLAMA, ("ipython", '"parameters"'), ()),
)


def call_format_of(source: str, special: Collection[str]) -> CallFormat | None:
    """The format of a model by its template and the special tokens of its vocabulary; None for one not known.

    Those with channels are not among them: they follow from the marks of the channels.
    """
    for format, needed, unwanted in _RULES:
        if all(mark in source for mark in needed) and not any(mark in source for mark in unwanted):
            return format
    return LFM2 if "tools" in source and LFM2.opening in special else None
