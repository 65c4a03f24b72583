"""Splitting what a model emits in a chat into reasoning, answer and tool calls.

Models mark these parts differently: with tags around the reasoning (<think>, [THINK]) and around tool calls, or as
messages with headers that name a channel (gpt-oss) or whom they are for (Muse Glimmer). `OutputFormat` finds a model's
marks in its template and vocabulary, once; an `OutputParser` then splits one answer, token by token.

A mark that the vocabulary has as a special token counts only as that token: a model that spells "<think>" in ordinary
tokens writes about it. In the text that the parser sees, each special token is one lone surrogate, which no decoded
UTF-8 contains; the marks are written in the same way.

The reasoning is what the model emits before its answer: a block that comes later, a mark without its other half and the
marks of calls that the template does not know stay in the text as they are written, whatever type of token they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.call_formats import ATEM, HARMONY, call_format_of
from edgeinfer.models.output_machines import ChannelsMachine, Kind, OutputMachine, Segment, TagsMachine
from edgeinfer.models.provenance import is_trusted, joined, plain, trusted
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.models.tool_calls import CallReader, ToolCall, call_id, calls_for_template, read_calls

__all__ = [
    "OutputFormat",
    "OutputParser",
    "ToolCall",
    "call_id",
    "calls_for_template",
    "read_calls",
    "reasoning_fields",
]

# Around the reasoning. The last two are phrases: they count where the template has both.
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("Here is my thought process:", "Here is my response:"),
)
# Around the answer, directly after the reasoning or first of all; no part of it.
ANSWER_TAGS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
)
# Around calls of tools; "": up to the end.
TOOL_TAGS = (
    ("<tool_call>", "</tool_call>"),
    ("<tool_calls>", "</tool_calls>"),
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<|tool_call>", "<tool_call|>"),
    ("<|tool_call|>", ""),
    ("<|python_tag|>", ""),
    ("[TOOL_CALLS]", ""),
)
# Of messages with headers: their beginning, the channel, the end of the header, and ends of messages.
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
RECIPIENT_MARKS = ("<|start|>", "", "<|message|>", "<|eom|>", "<|eot|>")

# Marks in the tables above, and those that other models have within or beside them ([ARGS], <|tool_call_begin|>).
_PART_MARK = re.compile(
    "tool|call|think|thought|reason|inner_|channel|constrain|response|solution|answer|function|action|python|argument"
    r"|\bargs\b",
    re.IGNORECASE,
)

_CODES = re.compile("([\ud800-\udfff])")
_FIRST_CODE, _N_CODES = 0xD800, 2048  # the surrogates
_TAIL = 64  # tokens at the end of a prompt in which the reasoning may be opened


class OutputFormat:
    """How a model marks the parts of its output.

    uses_channels: as gpt-oss and Muse Glimmer do.  calls: how it writes calls of tools, None where that is not known.
    looks_for_marks: whether the chat template expects an earlier answer with its marks, as it was emitted, to take the
    reasoning out by itself.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, render: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    ) -> None:
        """source: of the chat template.  render: the template, asked what it makes of an earlier answer."""
        self.tokenizer = tokenizer
        self._code_of: dict[int, str] = {}
        self._id_of: dict[str, int] = {}
        self._special = dict(zip(tokenizer.special_texts, tokenizer.special_ids, strict=True))  # longest first
        special = set(self._special)
        marks = _channel_marks(source, special)
        self.uses_channels = bool(marks)
        reasoning = [] if self.uses_channels else [tags for tags in REASONING_TAGS if _has(tags, source, special)]
        answers = [tags for tags in ANSWER_TAGS if reasoning and (tags[0] in source or tags[0] in special)]
        tools = [] if self.uses_channels else [tags for tags in TOOL_TAGS if tags[0] in source]
        self.reasoning, self.answers, self.tools = map(self._coded_tags, (reasoning, answers, tools))
        named = HARMONY if marks == CHANNEL_MARKS else ATEM
        self.calls = named if self.uses_channels else call_format_of(source, special)
        self.channels = [self.coded_text(mark) for mark in marks]
        self._mark_codes = set(self._id_of)
        for id in sorted(tokenizer.protected(source)):  # the others are found in any text
            if len(self._code_of) < _N_CODES:
                self._code(id)
        self.looks_for_marks = render is not None and bool(reasoning) and _looks_for_marks(reasoning, render)
        turns = "" if render is None else self.coded_text(_turns(render))
        self._turn_codes = set(filter(self.is_special, turns)) - self._mark_codes
        self._hidden = set(filter(self._says_nothing, self._id_of))

    def parser(self, opened: str = "", calls: CallReader | None = None) -> OutputParser:
        """A parser for one answer; opened: the end of the prompt that belongs to it, see `opened_by`.

        calls: reads calls where the model was given tools; what it cannot read is part of the answer. None reads what
        the template marks as calls.
        """
        kind = ChannelsMachine if self.uses_channels else TagsMachine
        return OutputParser(self, kind(self, opened, calls), opened, calls)

    def answer(self, prompt: Sequence[int], tokens: Iterable[int]) -> str:
        """What tokens after a prompt say, without reasoning and calls of tools."""
        parser = self.parser(self.opened_by(prompt, "", str))
        for token in tokens:
            parser.push(token)
        parser.flush()
        return parser.answer

    def opened_by(self, prompt: Sequence[int], message: str, generation_prompt: Callable[[], str]) -> str:
        """The end of a prompt with which the template has begun the answer's reasoning ("<think>\\n"), or "".

        message: the last one, which may end so itself.  generation_prompt: the text that the template adds to begin an
        answer, asked for only then.
        """
        tail = self.coded_tokens(prompt[-_TAIL:])
        if self.uses_channels:
            start = tail.rfind(self.channels[0])
            channel = tail.find(self.channels[1] or " to=", start) if start >= 0 else -1
            begun = self.text(tail[channel:]) if channel >= 0 else ""
        else:
            starts = [(tail.rfind(opening), opening) for opening, _ in self.reasoning]
            start, opening = max(starts, default=(-1, ""))
            is_open = start >= 0 and not tail[start + len(opening) :].strip()
            begun = self.text(tail[start:]) if is_open else ""
        if not begun:
            return ""
        may_be_message = message.rstrip().endswith(begun.rstrip()) and not is_trusted(begun.rstrip())
        return "" if may_be_message and not generation_prompt().endswith(begun) else begun

    def closing_of(self, opened: str) -> str:
        """The mark that ends a reasoning which the prompt has opened so, "" where it is a channel."""
        coded = self.coded_text(opened)
        return next((self.text(closing) for opening, closing in self.reasoning if coded.startswith(opening)), "")

    def may_open(self, opened: str) -> bool:
        """Whether the template could have written this at the end of a prompt: no special tokens but marks."""
        return set(filter(self.is_special, self.coded_text(opened))) <= self._mark_codes

    # ---- Special tokens as single characters ------------------------------------------------------------------------

    def _coded_tags(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(self.coded_text(opening), self.coded_text(closing)) for opening, closing in pairs]

    def _code(self, id: int) -> str:
        if id not in self._code_of:
            self._code_of[id] = chr(_FIRST_CODE + len(self._code_of))
            self._id_of[self._code_of[id]] = id
        return self._code_of[id]

    def code_of(self, id: int) -> str | None:
        """The character that stands for a special token, None for an ordinary one."""
        return self._code_of.get(id)

    def coded_text(self, text: str) -> str:
        """A text that the template wrote: what looks like a special token is one."""
        for special, id in self._special.items():
            if special in text:
                text = text.replace(special, self._code(id))
        return text

    def coded_tokens(self, tokens: Iterable[int]) -> str:
        """The text of tokens, special ones as characters."""
        reader = TokenReader(self)
        return "".join([reader.push(token) for token in tokens]) + reader.flush()

    def text(self, coded: str) -> str:
        """The text with special tokens as they are written, trusted there and nowhere else."""
        if not _CODES.search(coded):
            return coded
        return joined([trusted(self._name(part)) if part in self._id_of else part for part in _CODES.split(coded)])

    def emitted(self, coded: str) -> str:
        """The text with special tokens as they are written, but for those that would begin or end a turn."""
        return self.text("".join([char for char in coded if char not in self._turn_codes]))

    def shown(self, coded: str) -> str:
        """The text as people get it: control tokens stand for no text, but for marks of parts, which nothing took."""
        return self.text("".join([char for char in coded if char not in self._hidden]))

    def _says_nothing(self, code: str) -> bool:
        """Whether it is a control token, and no mark of a part: only of a turn or a text, or for something else."""
        id = self._id_of[code]
        is_mark = code not in self._turn_codes and _PART_MARK.search(self._name(code)) is not None
        return self.tokenizer.is_control(id) and (self.tokenizer.is_frame(id) or not is_mark)

    def is_hidden(self, char: str) -> bool:
        """Whether a character is white space or a control token that stands for no text, so that nothing is said."""
        return char.isspace() or char in self._hidden

    def is_special(self, char: str) -> bool:
        """Whether a character stands for a special token."""
        return char in self._id_of

    def ids_of(self, marks: Iterable[str]) -> tuple[int, ...]:
        """The special tokens among marks; those that are spelt have none."""
        return tuple([self._id_of[mark] for mark in marks if mark in self._id_of])

    def _name(self, code: str) -> str:
        return self.tokenizer.name(self._id_of[code])


def _channel_marks(source: str, special: set[str]) -> tuple[str, ...]:
    """The marks of messages with headers; none where a model has no such messages."""
    if all(mark in source for mark in CHANNEL_MARKS[1:3]) or special.issuperset(CHANNEL_MARKS):
        return CHANNEL_MARKS
    has_recipients = all(mark in source for mark in (*RECIPIENT_MARKS, ATEM.opening))
    return RECIPIENT_MARKS if has_recipients else ()


def _has(pair: tuple[str, str], source: str, special: set[str]) -> bool:
    """Whether a model marks its reasoning so, by its template or its vocabulary."""
    opening, closing = pair
    if " " in opening:
        return opening in source and closing in source
    return opening in source or closing in source or {opening, closing} <= special


def _looks_for_marks(pairs: Iterable[tuple[str, str]], render: Callable[[Sequence[Mapping[str, Any]]], str]) -> bool:
    """Tests what a template does with an earlier answer. If it refuses all forms, it gets the answer only."""
    question, following = {"role": "user", "content": "q1"}, {"role": "user", "content": "q2"}

    def rendered(**answer: str) -> list[str]:
        messages = [question, {"role": "assistant", **answer}]
        return [render(messages), render([*messages, following])]

    try:
        alone = rendered(content="a1")
        if alone != rendered(content="a1", **reasoning_fields("r1")):
            return False  # it takes the reasoning from a field of its own
        for opening, closing in pairs:
            emitted = f"{opening}\nr1\n{closing}\n\na1"
            whole = rendered(content=emitted)
            if any("a1" in one and emitted not in other for one, other in zip(alone, whole, strict=True)):
                return True
    except TemplateError:
        pass
    return False


def _turns(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    """Messages as a template writes them, "" where it refuses them."""
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    try:
        return render(messages)
    except TemplateError:
        return ""


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """The reasoning of an earlier answer, under the names by which templates know it."""
    return {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}


class TokenReader:
    """Tokens to text, never half a character, with special tokens as characters of their own."""

    def __init__(self, format: OutputFormat) -> None:
        self._format = format
        self._stream = format.tokenizer.stream(skip_special=True)

    def push(self, token: int) -> str:
        code = self._format.code_of(token)
        if code is None:
            return self._stream.push(token)
        if self._format.tokenizer.is_control(token):
            return self._stream.push(token) + code  # gives no text, and leaves half a character waiting
        return self._stream.flush() + code

    def flush(self) -> str:
        return self._stream.flush()


class OutputParser:
    """Splits an answer while it is made.

    reasoning: None where the model gave none, not even an empty one. Texts are trusted (see
    edgeinfer.models.provenance) where the model emitted a special token.
    """

    def __init__(
        self, format: OutputFormat, machine: OutputMachine, opened: str, calls: CallReader | None = None
    ) -> None:
        self.opened = opened
        self._calls = calls
        self._format = format
        self._machine = machine
        self._reader = TokenReader(format)

    def push(self, token: int) -> tuple[str, str, str]:
        """What a token adds to the reasoning and to the answer, and its name if it is special and not shown.

        The names of those within the reasoning are left out: no stop string is looked for there.
        """
        was_reasoning = self._machine.is_reasoning
        reasoning, answer, new = self._feed(self._reader.push(token), False)
        code = self._format.code_of(token)
        if code is None or (was_reasoning and self._machine.is_reasoning):
            return reasoning, answer, ""
        is_shown = not self._format.is_hidden(code) and any(
            code in segment.coded for segment in new if segment.kind in ("reasoning", "answer")
        )
        return reasoning, answer, "" if is_shown else self._format.tokenizer.name(token)

    def flush(self) -> tuple[str, str]:
        """What was held back, when no more will come."""
        reasoning, answer, _ = self._feed(self._reader.flush(), True)
        return reasoning, answer

    def _feed(self, coded: str, is_last: bool) -> tuple[str, str, list[Segment]]:
        start = len(self._machine.segments)
        self._machine.feed(coded, is_last)
        new = self._machine.segments[start:]
        if not new:
            return "", "", new
        return plain(self._of("reasoning", new)), plain(self._of("answer", new)), new

    def _of(self, kind: Kind, segments: Sequence[Segment]) -> str:
        return joined([self._format.shown(segment.coded) for segment in segments if segment.shown_in == kind])

    def anew(self) -> OutputParser:
        """A parser as this one was before the first token."""
        return self._format.parser(self.opened, self._calls)

    @property
    def call_error(self) -> str | None:
        """Why a call of a tool is part of the answer instead, None where none is."""
        return self._machine.call_error

    @property
    def precedes_answer(self) -> bool:
        """Whether the next token surely comes before the answer: reasoning, or the header of a channel."""
        return self._machine.precedes_answer

    @property
    def next_ids(self) -> tuple[int, ...]:
        """The special tokens one of which comes next in a well-formed output; none where anything may come."""
        return self._format.ids_of(self._machine.next_marks)

    @property
    def next_text(self) -> str:
        """The text that comes next in a well-formed output; "" where anything may come."""
        return self._machine.next_text

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """The special tokens that begin the reasoning where an answer begins with them."""
        return self._format.ids_of([opening[:1] for opening, _ in self._format.reasoning])

    @property
    def reasoning(self) -> str | None:
        """All of it so far."""
        return self._of("reasoning", self._machine.segments) if self._machine.has_reasoning else None

    @property
    def answer(self) -> str:
        """All of it so far."""
        return self._of("answer", self._machine.segments)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Those that have ended."""
        return tuple(self._machine.tool_calls)

    def emitted(self, n_answer: int, with_calls: bool = True) -> str:
        """All of it as it was emitted after what the prompt had opened, marks included; the answer cut to n_answer.

        with_calls: False leaves calls of tools out.
        """
        parts: list[str] = [trusted(self.opened)]
        for kind, coded in ((segment.kind, segment.coded) for segment in self._machine.segments):
            if kind == "answer":
                part = self._format.shown(coded)[:n_answer]
                n_answer -= len(part)
                parts.append(part)
            elif kind != "break" and (with_calls or kind != "tool call"):
                parts.append(self._format.emitted(coded))
        # Cut within its reasoning: a template finds what to take out only by the mark at the end.
        return joined([*parts, self._format.text(self._machine.unclosed)])
