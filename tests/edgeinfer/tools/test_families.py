"""Chats with tools of model families: templates with the structure of theirs, what their models emit, what goes back.

With EDGEINFER_TEMPLATES=llama.cpp/models/templates the families' own templates are tested in the same way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from gguf import TokenType
from scripted import Script, emitted
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.constraints.constraint import Constraints
from edgeinfer.models.call_formats import GENERIC
from edgeinfer.tools.asking import asked_for
from edgeinfer.tools.options import ToolUse, tool_of
from edgeinfer.tools.reading import FormatReader
from edgeinfer.tools.template import TemplateTools

TURNS = """{%- for m in messages -%}{{ START }}
{%- if m.role == 'assistant' -%}{{ THOUGHT }}{%- endif -%}{{ m.content }}
{%- for call in m.tool_calls or [] -%}{%- set f = call.function -%}CALL{%- endfor -%}
{{ END }}{%- endfor -%}"""
LISTED = "{%- if tools -%}{{ 'TOOLS' }}{%- for t in tools -%}{{ t | tojson }}{%- endfor -%}{%- endif -%}"
IM_START, IM_END = "'<|im_start|>' + m.role + '\\n'", "'<|im_end|>\\n'"
FIELD = "('<think>\\n' + m.reasoning_content + '\\n</think>\\n') if m.reasoning_content else ''"
AS_TEXT = "{{ v if v is string else v | tojson }}"


def template(start: str, end: str, call: str, prompt: str, thought: str = "''", tools: str = LISTED) -> str:
    """A template of turns.  start, end, thought: expressions.  call: what a call f is.  prompt: what begins answers."""
    turns = TURNS.replace("START", start).replace("END", end).replace("THOUGHT", thought).replace("CALL", call)
    return f"{tools}{turns}{{%- if add_generation_prompt -%}}{{{{ {prompt} }}}}{{%- endif -%}}"


@dataclass(frozen=True)
class Family:
    """A family of models: how it is told of tools, and what it emits.

    opened: the reasoning that its prompt begins.  output: an answer with reasoning and a call of look with at="é", n=2.
    call: as it goes back.  own: names of its templates in llama.cpp.
    """

    format: str
    template: str
    output: str
    call: str
    opened: str = ""
    reasoning: str | None = "hm"
    tokens: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


JSON_CALL = '{"name": "look", "arguments": {"at": "é", "n": 2}}'
HERMES = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
XML = (
    "<tool_call>\n<function=look>\n<parameter=at>\né\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_CALL = (
    "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for k, v in f.arguments | items -%}"
    "{{ '<parameter=' + k + '>\\n' }}" + AS_TEXT + "{{ '\\n</parameter>\\n' }}{%- endfor -%}"
    "{{ '</function>\\n</tool_call>' }}"
)
ONE_LINE = (
    "<tool_call>look<arg_key>at</arg_key><arg_value>é</arg_value>"
    "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
)
ONE_LINE_CALL = (
    "{{ '<tool_call>' + f.name }}{%- for k, v in f.arguments | items -%}<arg_key>{{ k }}</arg_key><arg_value>"
    + AS_TEXT
    + "</arg_value>{%- endfor -%}</tool_call>"
)
LINES = (
    "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>é</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>"
)
LINES_CALL = (
    "{{ '<tool_call>' + f.name + '\\n' }}{%- for k, v in f.arguments | items -%}"
    '{{ "<arg_key>" ~ k ~ "</arg_key>\\n" -}}{{ "<arg_value>" }}' + AS_TEXT + "{{ '</arg_value>\\n' }}"
    "{%- endfor -%}{{ '</tool_call>' }}"
)
GEMMA = '<|tool_call>call:look{at:<|"|>é<|"|>,n:2}<tool_call|>'
GEMMA_CALL = (
    "{{ '<|tool_call>call:' + f.name + '{' }}{%- for k, v in f.arguments | items -%}{{ ',' if not loop.first }}{{ k }}:"
    "{%- if v is string -%}{{ '<|\"|>' + v + '<|\"|>' }}{%- else -%}{{ v }}{%- endif -%}{%- endfor -%}"
    "{{ '}<tool_call|>' }}"
)
GEMMA_TURN = "'<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'"
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="at">é</atem:parameter>\n'
    '<atem:parameter name="n">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
ATEM_CALL = (
    "{{ '<|start|>assistant to=' + f.name + '<|message|><atem:function_calls>\\n<atem:invoke name=\"' + f.name "
    "+ '\">\\n' }}{%- for k, v in f.arguments | items -%}{{ '<atem:parameter name=\"' + k + '\">' }}"
    + AS_TEXT
    + "{{ '</atem:parameter>\\n' }}{%- endfor -%}{{ '</atem:invoke>\\n</atem:function_calls>' }}"
    "{{ '<|eot|>' if loop.last else '<|eom|>' }}"
)
ATEM_TURN = """{%- for m in messages -%}
{%- if m.role != 'assistant' -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>' }}{%- else -%}
{%- if m.reasoning_content -%}
{{- '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}{%- set f = call.function -%}CALL{%- else -%}
{{ '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' }}{%- endfor -%}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""
FALCON = f"<tool_call>\n[{JSON_CALL}]\n</tool_call>"

FAMILIES = {
    "gemma 4": Family(
        "gemma",
        template(
            GEMMA_TURN,
            "'<turn|>\\n'",
            GEMMA_CALL,
            "'<|turn>model\\n'",
            "('<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>') if m.reasoning_content else ''",
        ),
        f"<|channel>thought\nhm\n<channel|>{GEMMA}",
        GEMMA,
        tokens=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>"),
        own=("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    ),
    "granite 4": Family(
        "hermes",
        template(
            "'<|start_of_role|>' + m.role + '<|end_of_role|>'",
            "'<|end_of_text|>\\n'",
            '{{ \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}{{- f.arguments | tojson }}'
            "{{ '}\\n</tool_call>' }}",
            "'<|start_of_role|>assistant<|end_of_role|>'",
        ),
        HERMES,
        HERMES,
        reasoning=None,
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<tool_call>", "</tool_call>"),
        own=("ibm-granite-granite-4.0", "ibm-granite-granite-4.1"),
    ),
    "nemotron 3": Family(
        "xml",
        template(IM_START, IM_END, XML_CALL, "'<|im_start|>assistant\\n<think>\\n'", FIELD),
        f"hm\n</think>\n{XML}",
        XML,
        opened="<think>\n",
        tokens=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        own=("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
    ),
    "nemotron nano 2": Family(
        "nemotron",
        template(
            "'<SPECIAL_11>' + m.role + '\\n'",
            "'\\n<SPECIAL_12>\\n'",
            '{{ \'<TOOLCALL>[{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
            "{{ '}]</TOOLCALL>' }}",
            "'<SPECIAL_11>Assistant\\n<think>\\n'",
        ),
        f"hm\n</think>\n<TOOLCALL>[{JSON_CALL}]</TOOLCALL>",
        f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>",
        opened="<think>\n",
        tokens=("<SPECIAL_11>", "<SPECIAL_12>", "<think>", "</think>"),
        own=("NVIDIA-Nemotron-Nano-v2",),
    ),
    "falcon-h1": Family(
        "falcon",
        template(
            IM_START,
            IM_END,
            '{{ \'<tool_call>\\n[{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
            "{{ '}]\\n</tool_call>' }}",
            "'<|im_start|>assistant\\n'",
        ),
        FALCON,
        FALCON,
        reasoning=None,
    ),
    "glm 4.7 flash": Family(
        "glm, one line",
        template(
            "'<|' + m.role + '|>'",
            "''",
            ONE_LINE_CALL,
            "'<|assistant|><think>'",
            "('<think>' + m.reasoning_content + '</think>') if m.reasoning_content else '</think>'",
        ),
        f"hm</think>{ONE_LINE}",
        ONE_LINE,
        opened="<think>",
        tokens=("<|user|>", "<|assistant|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        own=("GLM-4.7-Flash",),
    ),
    "laguna s": Family(
        "glm, one line",
        template(
            "'<' + m.role + '>'",
            "'</' + m.role + '>\\n'",
            ONE_LINE_CALL,
            "'<assistant><think>'",
            "'<think>' + (m.reasoning_content or '') + '</think>'",
        ),
        f"hm</think>{ONE_LINE}",
        ONE_LINE,
        opened="<think>",
        tokens=("<think>", "</think>", "<tool_call>", "</tool_call>", "</assistant>"),
        own=("poolside-Laguna-S-2.1",),
    ),
    "laguna xs": Family(
        "glm",
        template(
            "'<' + m.role + '>\\n'",
            "'\\n</' + m.role + '>\\n'",
            LINES_CALL,
            "'<assistant>\\n</think>'",
            "'</think>'",
        ),
        LINES,
        LINES,
        reasoning=None,
        tokens=("<think>", "</think>", "<tool_call>", "</tool_call>", "</assistant>"),
        own=("poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    ),
    "muse glimmer": Family(
        "atem",
        LISTED + ATEM_TURN.replace("CALL", ATEM_CALL),
        f" to=self<|message|>hm<|eom|><|start|>assistant to=look<|message|>{ATEM}",
        f"<|start|>assistant to=look<|message|>{ATEM}",
        tokens=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        own=("muse-glimmer",),
    ),
}


def look(at: str, n: int) -> str:
    """Look at something."""
    return f"{at} {n}"


def checked(engine, script, family):
    """Ask with a tool, split what the family's models emit, and give it back; the prompt that the template makes."""
    template, format = engine.template, engine.output_format
    tools = TemplateTools(template, format.calls)
    assert tools.is_native and tools.format.name == family.format and tools.call_forms[0] == "object"
    assert tools.takes_results
    use = ToolUse((tool_of(look),), "auto")
    messages = [{"role": "user", "content": "q"}]
    prompt = template.encode(engine.tokenizer, messages, tools=tools.declarations(use))
    assert "Look at something." in engine.detokenize(prompt)
    opened = format.opened_by(prompt, "q", lambda: family.opened)
    assert opened == family.opened
    tokens = emitted(engine.tokenizer, family.output)
    check_grammar(engine, tools.format, prompt, opened, tokens)

    parser = format.parser(opened, FormatReader(tools.format, use.tools))
    texts = [text for token in tokens for text in parser.push(token)[:2]] + list(parser.flush())
    assert parser.call_error is None and "".join(texts) == (family.reasoning or "")
    assert (parser.reasoning, parser.answer) == (family.reasoning, "")
    assert [(call.name, call.arguments) for call in parser.tool_calls] == [("look", {"at": "é", "n": 2})]

    call = {"name": "look", "arguments": {"at": "é", "n": 2}, "id": "abcdefgh1"}
    answer = {"role": "assistant", "content": "", "reasoning": family.reasoning or "", "tool_calls": [call]}
    result = {"role": "tool", "content": "seventeen", "name": "look", "tool_call_id": "abcdefgh1"}
    script.emit("")
    chat = engine.chat()
    chat.messages = [*messages, answer, result]
    for _ in chat.stream(tools=[look]):
        pass
    return engine.detokenize(script.prompts[-1])


def check_grammar(engine, format, prompt, opened, tokens):
    """The text of an answer may come, where the model is free to call and where it has to."""
    is_spelt = not (opened or format.has_channels or engine.output_format.parser().opening_ids)
    for choice in ("auto", "required"):
        if choice == "required" and is_spelt and engine.output_format.reasoning:
            continue  # reasoning that no token marks does not come before a call that has to come
        use = ToolUse((tool_of(look),), choice)
        wanted = asked_for(engine, format, use, bool(opened), {})["grammar"]
        reader = FormatReader(format, use.tools)
        output = None if wanted.includes_reasoning else engine.output_format.parser(opened, reader)
        state = Constraints(engine.tokenizer).read(wanted).state(wanted, len(prompt), output)
        mask = state.mask_at(prompt + allowed_tokens(engine, state, prompt, tokens))
        assert any(map(mask.allows, engine.tokenizer.stop_ids))


def allowed_tokens(engine, state, prompt, tokens):
    """The text of tokens in tokens that a constraint allows: what alone may come has to come in its longest ones."""
    tokenizer = engine.tokenizer
    pieces = {id: tokenizer.token_bytes(id) for id in range(tokenizer.n_vocab) if id not in tokenizer.special_ids}
    taken, rest = [], [id for id in tokens if id not in tokenizer.stop_ids]
    text = b""  # of ordinary tokens that is to be taken next
    while rest or text:
        while rest and rest[0] in pieces:
            text += pieces[rest.pop(0)]
        mask = state.mask_at(prompt + taken)
        fits = [id for id in pieces if pieces[id] and text.startswith(pieces[id]) and mask.allows(id)] if text else []
        best = max(fits, key=lambda id: len(pieces[id])) if text and fits else None if text else rest.pop(0)
        assert best is not None and mask.allows(best), (engine.detokenize(taken), text)
        text = text.removeprefix(pieces[best]) if text else text
        taken.append(best)
    return taken


@pytest.mark.usefixtures("grammar")
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_told_of_tools_and_its_calls_are_read_and_go_back(name, has_tokens, tmp_path, monkeypatch):
    family = FAMILIES[name]
    special = dict.fromkeys(family.tokens, TokenType.USER_DEFINED) if has_tokens else {}
    path = write_tiny_model(tmp_path / "tiny.gguf", template=family.template, special=special, n_ctx_train=4096)
    with edgeinfer.load(path, backend="reference", draft="none") as engine:
        sent = checked(engine, Script(engine, monkeypatch), family)
    assert family.call in sent and "seventeen" in sent


@pytest.mark.usefixtures("grammar")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_wanted_comes_in_the_format_of_the_family(name, native, tmp_path):
    family = FAMILIES[name]
    special = dict.fromkeys(family.tokens, TokenType.USER_DEFINED)
    path = write_tiny_model(tmp_path / "tiny.gguf", template=family.template, special=special, n_ctx_train=4096)
    tool = {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["é", "x y"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["at", "n"],
        },
    }
    with edgeinfer.load(path, draft="none") as engine:
        ends = [*engine.tokenizer.stop_ids, *map(engine.tokenizer.token_id, ("</think>", "<|eom|>", "<channel|>"))]
        bias = {id: 30.0 for id in ends if id is not None}  # of the reasoning, and of the call
        bias[ord("l")] = 30.0  # to look, not to self
        answer = engine.chat().send(
            "q", tools=[tool], tool_choice="look", max_tokens=400, temperature=1.0, seed=5, logit_bias=bias
        )
        for _ in answer:
            pass
    completion = answer.completion
    assert completion.finish_reason == "stop" and completion.call_error is None and completion.text == ""
    [call] = completion.tool_calls
    assert call.arguments["at"] in ("é", "x y") and call.arguments["n"] in range(1, 10)


# DeepSeek-V2-Lite: it knows no tools and no roles but three.
V2_LITE = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'user' -%}{{ 'User: ' + m.content + '\\n\\n' }}"
    "{%- elif m.role == 'assistant' -%}{{ 'Assistant: ' + m.content + eos_token }}"
    "{%- elif m.role == 'system' -%}{{ m.content + '\\n\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"
)


@pytest.mark.usefixtures("grammar")
def test_a_family_without_tools_is_told_of_them_in_the_system_message(tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path / "tiny.gguf", template=V2_LITE, n_ctx_train=4096)
    with edgeinfer.load(path, backend="reference", draft="none") as engine:
        assert not TemplateTools(engine.template, engine.output_format.calls).is_native
        script = Script(engine, monkeypatch)
        chat = engine.chat()
        script.emit("")
        for _ in chat.send("q", tools=[look]):
            pass
        prompt = engine.detokenize(script.prompts[-1])
        assert "Look at something." in prompt and prompt.endswith("User: q\n\nAssistant:")
        parser = engine.output_format.parser("", FormatReader(GENERIC, [tool_of(look)]))
        for token in emitted(engine.tokenizer, f"I look.\n{HERMES}"):
            parser.push(token)
        parser.flush()
    assert [call.arguments for call in parser.tool_calls] == [{"at": "é", "n": 2}] and parser.answer == "I look.\n"


OWN = [(name, own) for name, family in FAMILIES.items() for own in family.own]


@pytest.mark.usefixtures("grammar")
@pytest.mark.parametrize("name, own", OWN, ids=[own for _, own in OWN])
def test_the_own_template_of_a_family_does_so_too(name, own, tmp_path, monkeypatch):
    folder = os.environ.get("EDGEINFER_TEMPLATES")
    if folder is None:
        pytest.skip("EDGEINFER_TEMPLATES is not set: EDGEINFER_TEMPLATES=llama.cpp/models/templates pytest FILE")
    family = FAMILIES[name]
    source = (Path(folder) / f"{own}.jinja").read_text(encoding="utf-8")
    special = dict.fromkeys(family.tokens, TokenType.USER_DEFINED)
    path = write_tiny_model(tmp_path / "tiny.gguf", template=source, special=special, n_ctx_train=16384)
    with edgeinfer.load(path, backend="reference", draft="none", n_ctx=16384) as engine:
        sent = checked(engine, Script(engine, monkeypatch), family)
    assert family.call in sent and "seventeen" in sent
