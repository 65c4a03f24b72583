"""State machines that split an answer at its marks: tags around its parts, or channels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from edgeinfer.common.overriding import override
from edgeinfer.models.provenance import plain
from edgeinfer.models.tool_calls import CallReader, ToolCall, call_to, read_calls

if TYPE_CHECKING:
    from edgeinfer.models.reasoning import OutputFormat

_LINE_ENDS = "\r\n"
_BARE_CALL = '{"name"'  # how calls begin that are all of an answer, without white space
_BARE_CALLS = (_BARE_CALL, f"[{_BARE_CALL}", f"```json{_BARE_CALL}", f"```json[{_BARE_CALL}")
_BARE_LENGTH = 64  # characters within which it begins so
_CUT = "a call of a tool was not complete when the answer ended: it is in the text"
_UNREADABLE = "a call of a tool cannot be read: it is in the text"
_RECIPIENT = " to="  # in a header, before the name of whom a message is for
_MAX_HEADER = 256  # characters before <|message|>; what is longer is no header

Kind: TypeAlias = Literal["mark", "reasoning", "answer", "tool call", "break"]
"""Of a segment of the output; a break separates two texts of a kind, and was not emitted."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of an answer that belongs to one of its parts."""

    kind: Kind
    coded: str
    shown_in: Kind  # where it belongs for people; a break belongs to one of the texts


class OutputMachine:
    """Splits an answer that comes in parts, and holds back what might become a mark."""

    def __init__(self, format: OutputFormat) -> None:
        self.segments: list[Segment] = []
        self.tool_calls: list[ToolCall] = []
        self.has_reasoning = False
        self.call_error: str | None = None  # why a call of a tool is part of the answer instead
        self._format = format
        self._rest = ""  # not decided yet
        self._is_last = False
        self._step: Callable[[], bool]  # takes from the rest; gives whether there is more to do

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning."""
        raise NotImplementedError

    @property
    def precedes_answer(self) -> bool:
        """Whether what comes next surely comes before the answer: reasoning, or a header."""
        return self.is_reasoning

    @property
    def next_marks(self) -> tuple[str, ...]:
        """The marks one of which comes next in a well-formed output; none where anything may come."""
        return ()

    @property
    def next_text(self) -> str:
        """The text that comes next in a well-formed output; "" where anything may come."""
        return ""

    @property
    def unclosed(self) -> str:
        """The mark that ends the reasoning, while that goes on and has one."""
        return ""

    def open(self, text: str) -> None:
        """Begin with what the prompt has opened."""
        self.feed(self._format.coded_text(text), False)
        self.segments = []

    def feed(self, coded: str, is_last: bool) -> None:
        """Take more of the answer; is_last: no more will come."""
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
            self.segments.append(Segment(kind, coded, kind))

    def _break(self, kind: Kind) -> None:
        """An empty line, if there is text of that kind before."""
        if any(segment.kind == kind for segment in self.segments):
            self.segments.append(Segment("break", "\n\n", kind))

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


class TagsMachine(OutputMachine):
    """Reasoning between tags, at the beginning of an answer only; calls of tools between tags anywhere in it.

    Ends of lines right after and before a tag of the reasoning belong to neither text.
    """

    def __init__(self, format: OutputFormat, opened: str, reader: CallReader | None = None) -> None:
        super().__init__(format)
        self._reader = reader
        self._tools = dict(format.tools)
        if reader is not None and reader.opening:
            self._tools[format.coded_text(reader.opening)] = format.coded_text(reader.closing)
        self._may_be_call = reader is not None and reader.takes_bare
        self._closing = ""  # of the part that is open
        self._answer_closing = ""
        self._tool_opening = ""
        self._n_searched = 0  # of the rest, for the end of a call
        self._skips_line_ends = False
        self._step: Callable[[], bool] = self._begin if format.reasoning or format.answers else self._answer
        if opened:
            self.open(opened)

    @property
    @override
    def is_reasoning(self) -> bool:
        return self._step == self._reason

    @property
    @override
    def precedes_answer(self) -> bool:
        return self.is_reasoning or bool(self.next_text)

    @property
    @override
    def next_text(self) -> str:
        """The rest of a mark of reasoning whose first character is a special token, which was emitted."""
        for opening, _ in self._format.reasoning if self._step == self._begin else ():
            begun = self._rest[self._rest.find(opening[0]) :] if self._format.is_special(opening[0]) else ""
            if begun and opening.startswith(begun):
                return opening.removeprefix(begun)
        return ""

    @property
    @override
    def unclosed(self) -> str:
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
        if self._may_be_call and not self._decide_on_call():
            return False
        end, mark = self._text_before([self._answer_closing, *self._tools])
        self._take("answer", end)
        if not mark:
            return False
        if mark == self._answer_closing:
            self._take("mark", len(mark))
            self._answer_closing = ""
            return True
        self._tool_opening, self._closing = mark, self._tools[mark]
        self._step = self._call
        return True

    def _call(self) -> bool:
        """Within the tags of a call: nothing is decided before its end."""
        found = self._end_of_call()
        if found is None:
            return False
        end, calls = found
        length = len(self._rest) if end < 0 else end + len(self._closing)
        if not calls and self._reader is None and any(map(self._format.is_special, self._tool_opening)):
            calls = [ToolCall(self._call_text(end))]
        self.tool_calls += calls
        self._take("tool call" if calls else "answer", length)
        if not calls and self._reader is not None:
            self.call_error = _CUT
        self._skips_line_ends = bool(calls)
        self._n_searched = 0
        self._step = self._answer
        return True

    def _end_of_call(self) -> tuple[int, list[ToolCall]] | None:
        """Where the call ends in the rest, -1 for at its end, and what it says; None where more has to come.

        A text in its arguments may spell what ends it: where there are tools, it ends where it can be read.
        """
        start = max(len(self._tool_opening), self._n_searched)
        while (end := self._rest.find(self._closing or self._tool_opening, start)) >= 0:
            text = self._call_text(end)
            calls = read_calls(text) if self._reader is None else self._reader.read(text)
            if calls or self._reader is None:
                return end, calls
            self._n_searched = start = end + 1
        if not self._is_last:
            return None
        if self._reader is None or not self._closing:
            text = self._call_text(-1)
            return -1, read_calls(text) if self._reader is None else self._reader.read(text)
        return -1, []  # without what ends it, it is not whole, whatever it says so far

    def _call_text(self, end: int) -> str:
        """What stands between the tags of a call."""
        return plain(self._format.text(self._rest[len(self._tool_opening) : end if end >= 0 else len(self._rest)]))

    def _decide_on_call(self) -> bool:
        """Whether the answer, which may be nothing but calls, has become one or surely is none."""
        begun = "".join(self._rest[:_BARE_LENGTH].split())
        is_begun = begun.startswith(_BARE_CALLS)
        if is_begun or (not self._is_last and any(call.startswith(begun) for call in _BARE_CALLS)):
            calls = self._bare_calls() if is_begun else []
            if not calls and not self._is_last:
                return False
            if calls:
                self.tool_calls += calls
                self._take("tool call", len(self._rest))
                self._skips_line_ends = True
                return True  # another one may follow
            self.call_error = _CUT if self._rest.strip() else self.call_error
        self._may_be_call = False
        return True

    def _bare_calls(self) -> list[ToolCall]:
        """The calls that the rest is; none where they have not ended."""
        text = self._rest.strip()
        ending = {"`": "```", "[": "]"}.get(text[:1], "}")
        if not text.endswith(ending) or self._reader is None:
            return []
        return self._reader.read_bare(plain(self._format.text(text.strip("`").removeprefix("json").strip())))


class ChannelsMachine(OutputMachine):
    """gpt-oss: messages with a header that names a channel, and for a call of a tool whom it is for.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    The prompt ends after the first "assistant". Muse Glimmer has no channels but says whom each message is for:

    <|start|>assistant to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>
    """

    def __init__(self, format: OutputFormat, opened: str, reader: CallReader | None = None) -> None:
        super().__init__(format)
        self._reader = reader
        self._start, self._channel, self._message, *self._ends = format.channels
        self._is_first = True
        self._kind: Kind = "answer"
        self._recipient = ""
        self._step = self._header
        if opened:
            self.open(opened)

    @property
    @override
    def is_reasoning(self) -> bool:
        return self._step == self._body and self._kind == "reasoning"

    @property
    @override
    def precedes_answer(self) -> bool:
        is_answer = self._step == self._body and self._kind == "answer"
        return not is_answer and self._format.is_special(self._channel or self._message)

    @property
    @override
    def next_marks(self) -> tuple[str, ...]:
        if self._step == self._between:
            return (self._start,)
        return (self._channel,) if self._channel and self._begins_header() and not self._rest else ()

    @property
    @override
    def next_text(self) -> str:
        is_open = self._begins_header() and not self._channel and _RECIPIENT.startswith(self._rest)
        return _RECIPIENT.removeprefix(self._rest) if is_open else ""

    def _begins_header(self) -> bool:
        return self._step == self._header and self._is_first

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
        marks = tuple(filter(None, (self._channel, self._message, _RECIPIENT.lstrip())))
        is_begun = text.startswith(marks) or any(map(self._format.is_special, text[:1]))
        return is_begun or self._may_begin(text, marks)

    def _open_body(self, header: str) -> None:
        recipient = re.search(r"to=([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w*)", header)
        self._recipient = recipient.group(1) if recipient else ""
        self._kind = "answer"
        is_thought = bool(channel and channel.group(1) == "analysis") if self._channel else self._recipient == "self"
        if is_thought and self._recipient in ("", "user", "assistant", "self"):
            self._kind, self.has_reasoning = "reasoning", True
        elif self._recipient not in ("", "user", "assistant"):
            self._kind = "tool call"
        if self._kind != "tool call":
            self._break(self._kind)
        self._is_first = False
        self._step = self._body

    def _body(self) -> bool:
        end, mark = self._text_before([self._start, *self._ends])
        if self._kind == "tool call":
            if not mark and not self._is_last:
                return False
            calls = self._calls(plain(self._format.text(self._rest[:end])))
            if self._reader is not None and None in (call.arguments for call in calls):
                self._kind = "answer"
                self.call_error = _UNREADABLE if mark else _CUT
                self._give("answer", f"{self._recipient} ")
            else:
                self.tool_calls += calls
        self._take(self._kind, end)
        if not mark:
            return False
        if mark != self._start:
            self._take("mark", len(mark))
        self._is_first = False
        self._step = self._between
        return True

    def _calls(self, body: str) -> list[ToolCall]:
        """The calls of a message to a tool; one without arguments where it cannot be read."""
        calls: list[ToolCall] = []
        if not self._channel and self._reader is not None:
            text = body.strip().removeprefix(self._reader.opening).removesuffix(self._reader.closing)
            calls = self._reader.read(text)
        elif not self._channel:
            calls = read_calls(body)
        return calls or [call_to(self._recipient, body)]

    def _between(self) -> bool:
        """After the end of a message: the next one, or text without a header."""
        body = self._rest.lstrip()
        if body.startswith(self._start):
            self._take("mark", len(self._rest) - len(body) + len(self._start))
            self._step = self._header
            return True
        if self._channel and body.startswith(self._channel):  # the start is left out
            self._step = self._header
            return True
        if not body or self._may_begin(body, [self._start, self._channel]):
            self._take("mark", len(self._rest) if self._is_last else 0)
            return False
        self._kind, self._recipient, self._step = "answer", "", self._body
        self._break("answer")
        return True
