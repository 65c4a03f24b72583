"""Splitting what a model emits in a chat into reasoning, answer and tool calls.

Models mark these parts differently: with tags around the reasoning (<think>, [THINK]) and around tool calls, or with
channels (gpt-oss). `OutputFormat` finds a model's marks in its template and vocabulary, once; an `OutputParser` then
splits one answer, token by token.

A mark that the vocabulary has as a special token counts only as that token: a model that spells "<think>" in ordinary
tokens writes about it. In the text that the parser sees, each special token is one lone surrogate, which no decoded
UTF-8 contains; the marks are written in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from edgeinfer.errors import TemplateError
from edgeinfer.models.provenance import is_trusted, joined, plain, trusted
from edgeinfer.models.tokenizer import Tokenizer

# Around the reasoning. The last two are phrases: they count where the template has both.
_REASONING_TAGS = (
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
# Around the answer, directly behind the reasoning or first of all; no part of it.
_ANSWER_TAGS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
)
# Around calls of tools; "": up to the end.
_TOOL_TAGS = (
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
_CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_CODES = re.compile("([\ud800-\udfff])")
_LINE_ENDS = "\r\n"
_FIRST_CODE, _N_CODES = 0xD800, 2048  # the surrogates
_MAX_HEADER = 256  # characters before <|message|>; what is longer is no header
_TAIL = 64  # tokens at the end of a prompt in which the reasoning may be opened

Kind: TypeAlias = Literal["mark", "reasoning", "answer", "tool call", "break"]
"""Of a segment of the output; a break separates two texts of a kind, and was not emitted."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model.

    text: as emitted, between the marks.  name, arguments: parsed from it if it is JSON, else None.
    """

    text: str
    name: str | None = None
    arguments: dict[str, Any] | None = None


# ---- The format of a model ------------------------------------------------------------------------------------------


class OutputFormat:
    """How a model marks the parts of its output.

    uses_channels: as gpt-oss does.  looks_for_marks: whether the chat template expects an earlier answer with its
    marks, as it was emitted, to take the reasoning out by itself.
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
        self.uses_channels = all(mark in source for mark in _CHANNEL_MARKS[1:3]) or special.issuperset(_CHANNEL_MARKS)
        reasoning = [] if self.uses_channels else [tags for tags in _REASONING_TAGS if _has(tags, source, special)]
        answers = [tags for tags in _ANSWER_TAGS if reasoning and (tags[0] in source or tags[0] in special)]
        tools = [] if self.uses_channels else [tags for tags in _TOOL_TAGS if tags[0] in source]
        self.reasoning, self.answers, self.tools = map(self._coded_tags, (reasoning, answers, tools))
        self.channels = [self.coded_text(mark) for mark in _CHANNEL_MARKS] if self.uses_channels else []
        self._mark_codes = set(self._id_of)
        for id in sorted(tokenizer.protected(source)):  # the others are found in any text
            if len(self._code_of) < _N_CODES:
                self._code(id)
        self.looks_for_marks = render is not None and bool(reasoning) and _looks_for_marks(reasoning, render)
        turns = "" if render is None else self.coded_text(_turns(render))
        self._turn_codes = set(filter(self.is_special, turns)) - self._mark_codes

    def parser(self, opened: str = "") -> OutputParser:
        """A parser for one answer; opened: the end of the prompt that belongs to it, see `opened_by`."""
        machine: _Machine = _Channels(self, opened) if self.uses_channels else _Tags(self, opened)
        return OutputParser(self, machine, opened)

    def answer(self, prompt: Sequence[int], tokens: Iterable[int]) -> str:
        """What tokens behind a prompt say, without reasoning and calls of tools."""
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
            channel = tail.find(self.channels[1], start) if start >= 0 else -1
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
        reader = _TokenReader(self)
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
        """The text as people get it: control tokens stand for no text."""
        return self.text(_CODES.sub(lambda code: self._unless_control(code.group()), coded))

    def _unless_control(self, code: str) -> str:
        return "" if code in self._id_of and self.tokenizer.is_control(self._id_of[code]) else code

    def is_hidden(self, char: str) -> bool:
        """Whether a character is white space or a control token, so that nothing is said with it."""
        return char.isspace() or (char in self._id_of and self.tokenizer.is_control(self._id_of[char]))

    def is_special(self, char: str) -> bool:
        """Whether a character stands for a special token."""
        return char in self._id_of

    def _name(self, code: str) -> str:
        return self.tokenizer.name(self._id_of[code])


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


class _TokenReader:
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


# ---- The parser ------------------------------------------------------------------------------------------------------


class OutputParser:
    """Splits an answer while it is made.

    reasoning: None where the model gave none, not even an empty one. Texts are trusted (see
    edgeinfer.models.provenance) where the model emitted a special token.
    """

    def __init__(self, format: OutputFormat, machine: _Machine, opened: str) -> None:
        self.opened = opened
        self._format = format
        self._machine = machine
        self._reader = _TokenReader(format)

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

    def _feed(self, coded: str, is_last: bool) -> tuple[str, str, list[_Segment]]:
        start = len(self._machine.segments)
        self._machine.feed(coded, is_last)
        new = self._machine.segments[start:]
        if not new:
            return "", "", new
        return plain(self._of("reasoning", new)), plain(self._of("answer", new)), new

    def _of(self, kind: Kind, segments: Sequence[_Segment]) -> str:
        return joined([self._format.shown(segment.coded) for segment in segments if segment.shown_in == kind])

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

    def emitted(self, n_answer: int) -> str:
        """All of it as it was emitted behind what the prompt had opened, marks included; the answer cut to n_answer."""
        parts: list[str] = [trusted(self.opened)]
        for kind, coded in ((segment.kind, segment.coded) for segment in self._machine.segments):
            if kind == "answer":
                part = self._format.shown(coded)[:n_answer]
                n_answer -= len(part)
                parts.append(part)
            elif kind != "break":
                parts.append(self._format.emitted(coded))
        # Cut within its reasoning: a template finds what to take out only by the mark at the end.
        return joined([*parts, self._format.text(self._machine.unclosed)])


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: Kind
    coded: str
    shown_in: Kind  # where it belongs for people; a break belongs to one of the texts


class _Machine:
    """Splits an answer that comes in parts, and holds back what might become a mark."""

    def __init__(self, format: OutputFormat) -> None:
        self.segments: list[_Segment] = []
        self.tool_calls: list[ToolCall] = []
        self.has_reasoning = False
        self._format = format
        self._rest = ""  # not decided yet
        self._is_last = False
        self._step: Callable[[], bool]  # takes from the rest; gives whether there is more to do

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning."""
        raise NotImplementedError

    @property
    def unclosed(self) -> str:
        """The mark that ends the reasoning, while that goes on and has one."""
        return ""

    def open(self, text: str) -> None:
        """Begin with what the prompt has opened."""
        self.feed(self._format.coded_text(text), False)
        self.segments = []

    def feed(self, coded: str, is_last: bool) -> None:
        self._rest += coded
        self._is_last = is_last
        while self._step():
            pass

    def _take(self, kind: Kind, length: int) -> None:
        """Make the beginning of the rest a segment."""
        self._give(kind, self._rest[:length])
        self._rest = self._rest[length:]

    def _give(self, kind: Kind, coded: str) -> None:
        if coded:
            self.segments.append(_Segment(kind, coded, kind))

    def _break(self, kind: Kind) -> None:
        """An empty line, if there is text of that kind before."""
        if any(segment.kind == kind for segment in self.segments):
            self.segments.append(_Segment("break", "\n\n", kind))

    def _text_before(self, marks: Iterable[str]) -> tuple[int, str]:
        """Where the first mark in the rest begins, and which; without one, where what might become one begins."""
        known = [mark for mark in marks if mark]
        found = [(start, -len(mark), mark) for mark in known if (start := self._rest.find(mark)) >= 0]
        if found:
            start, _, mark = min(found)
            return start, mark
        doubtful = 0 if self._is_last else max((_overlap(self._rest, mark) for mark in known), default=0)
        return len(self._rest) - doubtful, ""

    def _may_begin(self, text: str, marks: Iterable[str]) -> bool:
        """Whether more text may make this the beginning of a mark."""
        return not self._is_last and any(mark.startswith(text) for mark in marks)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins a mark and is not all of it."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


class _Tags(_Machine):
    """Reasoning between tags, at the beginning of an answer only; calls of tools between tags anywhere in it.

    Ends of lines right behind and before a tag of the reasoning belong to neither text.
    """

    def __init__(self, format: OutputFormat, opened: str) -> None:
        super().__init__(format)
        self._closing = ""  # of the part that is open
        self._answer_closing = ""
        self._tool_opening = ""
        self._skips_line_ends = False
        self._step = self._begin if format.reasoning or format.answers else self._answer
        if opened:
            self.open(opened)

    @property
    def is_reasoning(self) -> bool:
        """See _Machine."""
        return self._step == self._reason

    @property
    def unclosed(self) -> str:
        """See _Machine."""
        return self._closing if self.is_reasoning else ""

    def _begin(self) -> bool:
        """Before the answer: only white space so far, or a part with reasoning and an end tag."""
        lead = 0
        while lead < len(self._rest) and self._format.is_hidden(self._rest[lead]) and not self._may_be_mark(lead):
            lead += 1
        body = self._rest[lead:]
        for opening, closing in self._format.reasoning:
            if body.startswith(opening):
                self._take("mark", lead + len(opening))
                self._break("reasoning")
                self._closing, self._skips_line_ends, self.has_reasoning = closing, True, True
                self._step = self._reason
                return True
            if body.startswith(closing):  # of a part that the prompt has opened unseen
                self._take("mark", lead + len(closing))
                self._skips_line_ends = True
                return True
        for opening, closing in self._format.answers:
            if body.startswith(opening):
                self._take("mark", lead + len(opening))
                self._answer_closing = closing
                return self._begin_answer()
        if self._may_begin(body, self._marks()):
            return False
        return self._begin_answer()

    def _marks(self) -> list[str]:
        return [mark for pair in self._format.reasoning for mark in pair] + [pair[0] for pair in self._format.answers]

    def _may_be_mark(self, start: int) -> bool:
        rest = self._rest[start:]
        return any(rest.startswith(mark) for mark in self._marks()) or self._may_begin(rest, self._marks())

    def _begin_answer(self) -> bool:
        if self._skips_line_ends or self._answer_closing:
            if self._skip_line_ends():
                return False
        self._skips_line_ends = False
        self._step = self._answer
        return True

    def _skip_line_ends(self) -> bool:
        """Take the ends of lines off the rest; gives whether more of them may come."""
        self._take("mark", len(self._rest) - len(self._rest.lstrip(_LINE_ENDS)))
        return not self._rest and not self._is_last

    def _reason(self) -> bool:
        if self._skips_line_ends and self._skip_line_ends():
            return False
        self._skips_line_ends = False
        end, mark = self._text_before([self._closing])
        self._take("reasoning", len(self._rest[:end].rstrip(_LINE_ENDS)))
        if mark:
            self._take("mark", self._rest.index(mark) + len(mark))
            self._skips_line_ends = True
            self._step = self._begin
            return True
        if self._is_last:
            self._take("mark", len(self._rest))
        return False

    def _answer(self) -> bool:
        if self._skips_line_ends and self._skip_line_ends():
            return False
        self._skips_line_ends = False
        end, mark = self._text_before([self._answer_closing, *(opening for opening, _ in self._format.tools)])
        self._take("answer", end)
        if not mark:
            return False
        if mark == self._answer_closing:
            self._take("mark", len(mark))
            self._answer_closing = ""
            return True
        self._tool_opening, self._closing = mark, dict(self._format.tools)[mark]
        self._step = self._call
        return True

    def _call(self) -> bool:
        """Within the tags of a call: nothing is decided before its end."""
        start = len(self._tool_opening)
        end = self._rest.find(self._closing, start) if self._closing else -1
        if end < 0 and not self._is_last:
            return False
        length = len(self._rest) if end < 0 else end + len(self._closing)
        text = plain(self._format.text(self._rest[start : end if end >= 0 else length]))
        calls = read_calls(text)
        if not calls and any(map(self._format.is_special, self._tool_opening)):
            calls = [ToolCall(text)]
        self.tool_calls += calls
        self._take("tool call" if calls else "answer", length)
        self._skips_line_ends = bool(calls)
        self._step = self._answer
        return True


class _Channels(_Machine):
    """gpt-oss: messages with a header that names a channel, and for a call of a tool whom it is for.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    The prompt ends behind the first "assistant".
    """

    def __init__(self, format: OutputFormat, opened: str) -> None:
        super().__init__(format)
        self._start, self._channel, self._message, *self._ends = format.channels
        self._is_first = True
        self._kind: Kind = "answer"
        self._recipient = ""
        self._step = self._header
        if opened:
            self.open(opened)

    @property
    def is_reasoning(self) -> bool:
        """See _Machine."""
        return self._step == self._body and self._kind == "reasoning"

    def _header(self) -> bool:
        end, mark = self._text_before([self._message])
        if mark:
            self._open_body(self._format.text(self._rest[:end]))
            self._take("mark", end + len(mark))
            return True
        if (self._is_first and not self._is_header(self._rest.lstrip(" "))) or len(self._rest) > _MAX_HEADER:
            self._kind, self._recipient, self._step = "answer", "", self._body
            return True
        if self._is_last:
            self._take("mark", len(self._rest))
        return False

    def _is_header(self, text: str) -> bool:
        """Whether the first header may go on so; a model that marks nothing answers at once."""
        marks = (self._channel, self._message, "to=")
        is_begun = text.startswith(marks) or any(map(self._format.is_special, text[:1]))
        return is_begun or self._may_begin(text, marks)

    def _open_body(self, header: str) -> None:
        recipient = re.search(r"to=([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w*)", header)
        self._recipient = recipient.group(1) if recipient else ""
        self._kind = "answer"
        if self._recipient not in ("", "user", "assistant"):
            self._kind = "tool call"
        elif channel and channel.group(1) == "analysis":
            self._kind, self.has_reasoning = "reasoning", True
        if self._kind != "tool call":
            self._break(self._kind)
        self._is_first = False
        self._step = self._body

    def _body(self) -> bool:
        end, mark = self._text_before([self._start, *self._ends])
        if self._kind == "tool call":
            if not mark and not self._is_last:
                return False
            self._add_call(plain(self._format.text(self._rest[:end])))
        self._take(self._kind, end)
        if not mark:
            return False
        if mark != self._start:
            self._take("mark", len(mark))
        self._is_first = False
        self._step = self._between
        return True

    def _between(self) -> bool:
        """Behind the end of a message: the next one, or text without a header."""
        body = self._rest.lstrip()
        if body.startswith(self._start):
            self._take("mark", len(self._rest) - len(body) + len(self._start))
            self._step = self._header
            return True
        if body.startswith(self._channel):  # the start is left out
            self._step = self._header
            return True
        if not body or self._may_begin(body, [self._start, self._channel]):
            self._take("mark", len(self._rest) if self._is_last else 0)
            return False
        self._kind, self._recipient, self._step = "answer", "", self._body
        self._break("answer")
        return True

    def _add_call(self, text: str) -> None:
        arguments = _object(_read_json(text))
        self.tool_calls.append(ToolCall(text, self._recipient.removeprefix("functions."), arguments))


# ---- Calls of tools --------------------------------------------------------------------------------------------------

_CALL_ENDS = re.compile("<[|｜]tool[_▁]call[_▁]end[|｜]>")


def read_calls(text: str) -> list[ToolCall]:
    """The calls in what a model wrote between the tags: JSON, or names with JSON behind them; none if it is neither."""
    value = _read_json(text)
    if isinstance(value, list):
        calls = [_call(each, json.dumps(each, ensure_ascii=False)) for each in value]
    elif value is not None:
        calls = [_call(value, text)]
    else:
        calls = [_named_call(part) for part in _CALL_ENDS.split(text) if part.strip()]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(value: Any, text: str) -> ToolCall | None:
    """A call from its JSON. Models name the parts differently."""
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((value[key] for key in ("name", "tool_name") if isinstance(value.get(key), str)), None)
    given: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    arguments = _object(_read_json(given) if isinstance(given, str) else given)
    return None if name is None or arguments is None else ToolCall(text, name, arguments)


def _named_call(text: str) -> ToolCall | None:
    """A call from its name with JSON behind it; between them may be tags."""
    head, brace, body = text.partition("{")
    inside, end, _ = body.rpartition("}")
    arguments = _object(_read_json(brace + inside + end))
    names = [name for name in re.findall(r"[\w.-]+", re.sub("<[^<>]*>", " ", head)) if name != "function"]
    if arguments is None or not names:
        return None
    return ToolCall(text, names[0].removeprefix("functions."), arguments)


def _read_json(text: str) -> Any:
    """The value, None if it is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def calls_for_template(calls: Sequence[Mapping[str, Any]], as_text: bool) -> list[dict[str, Any]]:
    """Calls in OpenAI's form. as_text: arguments as JSON, which some templates want in place of the object."""
    return [
        {
            "id": f"call{number:05}",  # Mistral's templates want nine characters
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": json.dumps(call["arguments"], ensure_ascii=False) if as_text else call["arguments"],
            },
        }
        for number, call in enumerate(calls)
    ]
