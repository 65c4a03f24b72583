"""Markdown on a terminal, while a model writes it.

Everything is written once, from left to right and from top to bottom, and nothing is taken back: what is on the screen
or above it stays whatever the terminal's size becomes. What cannot be shown yet is held: a word until its end, an
emphasis until it closes, a table until its last row. The work for a token does not depend on the length of the answer.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from typing import TextIO

from edgeinfer.cli.layout import Layout, Piece, cells
from edgeinfer.cli.markdown_inline import Inline
from edgeinfer.cli.markdown_table import is_delimiter, table_lines
from edgeinfer.cli.streams import writing_result
from edgeinfer.cli.terminal import Writer, terminal_width, visible

_TAB = 4
_LONGEST_START = 200  # most characters of a line that are read to find its kind
_LONGEST_RULE = 20
_CODE_STYLE = "36"
_QUIET_STYLE = "2"
_QUOTE = re.compile(r" {0,3}>[ \t]?")
_FENCE = re.compile(r"(`{3,}|~{3,})(.*)")
_HEADING = re.compile(r"(#{1,6})[ \t]+(?=\S)")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])[ \t]+(?=\S)")
_EMPTY_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])[ \t]*")
_RULE = re.compile(r"([-*_])[ \t]*(\1[ \t]*){2,}")
# A beginning of a line that may become several kinds of block.
_OPEN = re.compile(r"#{1,6}[ \t]*|([-*_])([ \t]*\1)*[ \t]*|\+[ \t]*|\d{1,9}([.)][ \t]*)?|`{1,2}|~{1,2}|\$|\\")
_WHOLE = re.compile(r"```|~~~|\||\$\$|\\\[")  # beginnings of lines that are read whole first


@dataclass(frozen=True)
class _Item:
    """An item of a list."""

    source: int  # its margin in the source
    text: int  # column of its text on the terminal


class MarkdownWriter(Writer):
    """Writes a model's Markdown to a terminal as it is generated.

    style: of all text, as SGR parameters. Raises EdgeInferError if the stream is closed or full, BrokenPipeError if its
    reader is gone.
    """

    def __init__(self, stream: TextIO, style: str = "") -> None:
        super().__init__(stream)
        self._style = style
        self._has_colours = not os.environ.get("NO_COLOR")
        self._code_style = _CODE_STYLE if self._has_colours else None
        self._signs = _signs(stream)
        self._out: list[Piece] = []  # not yet on the stream
        self._layout = Layout(self._put, lambda: self._put("\n", ""), lambda: terminal_width(stream))
        self._inline = Inline(self._layout, self._code_style)
        self._reset()

    def _reset(self) -> None:
        """Before an answer."""
        self._carriage = ""  # a carriage return, which may be a part of a line end
        self._line = ""  # of the source, as far as its kind is not known
        self._kind = ""  # of the line: "" unknown, "text", "code", or "whole" when it is read to its end first
        self._block = ""  # that is open: "", "text", "heading", "fence", "formula"
        self._ends = _RULE  # the line that ends a fence or a formula
        self._margin = 0  # of the line that began the fence or formula
        self._quotes = 0
        self._items: list[_Item] = []
        self._table: list[str] = []
        self._status = ""
        self._blank: int | None = None  # the quotes that empty lines before what comes are in
        self._has_written = False

    def write(self, text: str) -> None:
        """Write what can be shown of it at once."""
        text = self._carriage + text
        self._carriage = "\r" if text.endswith("\r") else ""
        text = visible(text.removesuffix("\r").replace("\r\n", "\n"))
        for part in re.findall(r"[^\n]+|\n", text):
            if part == "\n":
                self._end_source_line()
            else:
                self._feed(part)
        self._flush()

    def end_line(self) -> None:
        """The answer has ended: write what was held, and end the line."""
        self._feed(visible(self._carriage))
        if self._line or self._kind:
            self._end_source_line()
        self._close_table()
        self._close_text()
        self._layout.end_line()
        self._flush()
        self._reset()

    # ---- What is written ---------------------------------------------------------------------------------------------

    def _put(self, text: str, style: str) -> None:
        if self._out and self._out[-1][1] == style:
            text = self._out.pop()[0] + text
        self._out.append((text, style))

    def _flush(self) -> None:
        """Write what was put out. No style stays on, so that the terminal can be left at any time."""
        written = "".join(map(self._styled, self._out))
        self._out.clear()
        if written:
            with writing_result():
                self._stream.write(written)
                self._stream.flush()

    def _styled(self, piece: Piece) -> str:
        text, style = piece
        style = ";".join(filter(None, (self._style, style)))
        return f"\x1b[{style}m{text}\x1b[0m" if style and text.strip("\n") else text

    def _show_status(self, text: str) -> None:
        """A short line in the place of what is held; "" takes it away."""
        if self._status:
            self._put("\r\x1b[K", "")
        self._status = text
        self._put(text[: terminal_width(self._stream) - 1], _QUIET_STYLE)

    def _start(self, first: list[Piece], rest: list[Piece]) -> None:
        """A block begins, after an empty line if there is one in the source. Both follow the bars of quotes."""
        self._space()
        bars = [(self._signs["bar"] * self._quotes, _QUIET_STYLE)] if self._quotes else []
        self._layout.start(bars + first if first else (), bars + rest)

    def _space(self) -> None:
        """End the line, and write the empty line before what comes."""
        self._layout.end_line()
        if self._blank is not None and self._has_written:
            self._put(self._signs["bar"].rstrip() * min(self._blank, self._quotes), _QUIET_STYLE)
            self._put("\n", "")
        self._blank, self._has_written = None, True

    # ---- Lines of the source -----------------------------------------------------------------------------------------

    def _feed(self, part: str) -> None:
        """A part of a line."""
        if self._kind == "text":
            self._inline.feed(part)
        elif self._kind == "code":
            self._layout.verbatim(part, self._code_style or "")
        elif part:
            self._line += part
            if self._kind != "whole" and not self._decide(is_whole=False) and len(self._line) > _LONGEST_START:
                self._kind = "whole"

    def _end_source_line(self) -> None:
        if self._kind in ("", "whole"):
            self._kind = ""
            self._decide(is_whole=True)
        if self._block == "heading":
            self._close_text()
        elif self._kind == "text":
            self._inline.pause()
        elif self._kind == "code":
            self._layout.end_line(at_least_one=True)
        self._line, self._kind = "", ""

    def _decide(self, *, is_whole: bool) -> bool:
        """Find the kind of the line, and show what there is of it. Gives whether it is found."""
        if self._block in ("fence", "formula"):
            quotes, line = _unquoted(self._line, most=self._quotes)
            if quotes == self._quotes:
                return self._decide_verbatim(line, is_whole=is_whole)
        quotes, line = _unquoted(self._line)
        body = line.lstrip(" \t")
        margin = len(line[: len(line) - len(body)].expandtabs(_TAB))
        if not is_whole and (not body or _OPEN.fullmatch(body) or _WHOLE.match(body)):
            self._kind = "whole" if _WHOLE.match(body) else ""
            return False
        if quotes != self._quotes:
            self._close_table()
            self._close_text()
            self._quotes, self._block, self._items = quotes, "", []
        self._begin_line(line, body, margin)
        return True

    def _decide_verbatim(self, line: str, *, is_whole: bool) -> bool:
        """A line of a fence or a formula, or the one that ends it."""
        body = line.lstrip(" ")
        if not is_whole and (not body or self._block == "formula" or re.fullmatch(r"(`+|~+)\s*", body)):
            self._kind = "whole" if self._block == "formula" else ""
            return False
        is_end = self._ends.search(line.strip()) is not None
        if not is_end or self._block == "formula":
            self._code(line[min(self._margin, len(line) - len(body)) :])
        elif not self._has_colours:
            self._quiet_line(body.rstrip())
        self._block = "" if is_end else self._block
        return True

    def _begin_line(self, line: str, body: str, margin: int) -> None:
        """A line that belongs to no fence or formula; of one that is not whole yet there is enough to know its kind."""
        if body.startswith("|"):
            self._table_line(body)
            return
        self._close_table()
        fence = _FENCE.fullmatch(body)
        heading, item = _HEADING.match(body), _ITEM.match(body) or _EMPTY_ITEM.fullmatch(body)
        if not body:
            self._close_text()
            self._blank = self._quotes
        elif fence is not None and not (fence[1][0] == "`" and "`" in fence[2]):
            self._open_fence(fence[1], fence[2].strip(), margin)
        elif re.match(r"\$\$|\\\[", body) and ("$$" if body[0] == "$" else "\\]") not in body[2:]:
            self._open_formula(body, margin)
        elif self._block != "text" and margin >= self._code_margin() and not (self._items and item):
            self._code(line)
        elif _RULE.fullmatch(body):
            self._close_text()
            self._items = []
            self._quiet_line(self._signs["rule"] * min(_LONGEST_RULE, terminal_width(self._stream)))
        elif heading is not None:
            self._items = []
            self._open_text("heading", [], [], body[heading.end() :], "1;4" if len(heading[1]) == 1 else "1")
        elif item is not None:
            self._open_item(item[1], margin, body[item.end() :])
        else:
            self._paragraph(body, margin)

    # ---- Blocks ------------------------------------------------------------------------------------------------------

    def _close_text(self) -> None:
        """The paragraph, item or heading that is open has ended."""
        if self._block in ("text", "heading"):
            self._inline.end()
            self._block = ""

    def _open_text(self, block: str, first: list[Piece], rest: list[Piece], text: str, style: str = "") -> None:
        self._close_text()
        self._start(first, rest)
        self._block, self._kind = block, "text"
        self._inline.begin(style)
        self._inline.feed(text)

    def _paragraph(self, text: str, margin: int) -> None:
        """A line of text, which goes on with the paragraph that is open or begins one."""
        if self._block == "text":
            self._kind = "text"
            self._inline.feed("\n" + text)
            return
        self._leave_items(margin)
        self._open_text("text", [], [(" " * self._items[-1].text, "")] if self._items else [], text)

    def _open_item(self, mark: str, margin: int, text: str) -> None:
        self._leave_items(margin)
        column = self._items[-1].text if self._items else 0
        sign = mark if mark[0].isdigit() else self._signs["bullet"]
        item = _Item(margin, column + cells(sign) + 1)
        self._items.append(item)
        self._open_text("text", [(" " * column + sign + " ", "")], [(" " * item.text, "")], text)

    def _leave_items(self, margin: int) -> None:
        """Leave the items that a line with this margin does not belong to."""
        while self._items and margin < self._items[-1].source + 2:
            self._items.pop()

    def _code_margin(self) -> int:
        """The margin from which on a line is code."""
        return 4 + (self._items[-1].source + 2 if self._items else 0)

    def _open_fence(self, marks: str, info: str, margin: int) -> None:
        self._close_text()
        self._block, self._margin = "fence", margin
        self._ends = re.compile(f"^{marks[0]}{{{len(marks)},}}$")
        if info or not self._has_colours:
            self._quiet_line(info if self._has_colours else marks + info)

    def _open_formula(self, body: str, margin: int) -> None:
        self._close_text()
        self._block, self._margin = "formula", margin
        self._ends = re.compile(r"\$\$" if body[0] == "$" else r"\\\]")
        self._code(body)

    def _code(self, text: str) -> None:
        """A line as it is, without a margin of ours; the rest of it may follow."""
        self._space()
        self._layout.start()
        self._kind = "code"
        self._layout.verbatim(text, self._code_style or "")

    def _quiet_line(self, text: str) -> None:
        """A line that is no text of the answer's."""
        self._space()
        self._layout.start()
        self._layout.verbatim(text, _QUIET_STYLE)
        self._layout.end_line()

    def _table_line(self, row: str) -> None:
        """A line that begins with a bar: a row, or text if no table comes of it."""
        self._close_text()
        self._layout.end_line()
        if len(self._table) == 1 and not is_delimiter(row):
            self._close_table()
            self._close_text()
            self._layout.end_line()
        self._table.append(row)
        if len(self._table) > 2:
            self._show_status(f"table ... {len(self._table) - 2} rows")

    def _close_table(self) -> None:
        """Write the rows that were held."""
        if not self._table:
            return
        rows, self._table = self._table, []
        self._show_status("")
        if len(rows) < 2:
            self._paragraph(rows[0], 0)
            self._inline.pause()
            self._kind = ""
            return
        self._space()
        width = terminal_width(self._stream)
        for line in table_lines(rows, width, self._signs["column"], self._signs["rule"], self._code_style):
            self._layout.start()
            for text, style in line:
                self._layout.verbatim(text, style)
            self._layout.end_line(at_least_one=True)


def _unquoted(line: str, most: int | None = None) -> tuple[int, str]:
    """Number of the marks of quotes before a line, at most so many, and the rest of it."""
    n, at = 0, 0
    while n != most and (found := _QUOTE.match(line, at)) is not None:
        n, at = n + 1, found.end()
    return n, line[at:]


def _signs(stream: TextIO) -> dict[str, str]:
    """What is drawn, as far as the stream has these characters."""
    signs = {"bullet": "\u2022", "bar": "\u2502 ", "rule": "\u2500", "column": " \u2502 "}
    try:
        "".join(signs.values()).encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return {"bullet": "-", "bar": "> ", "rule": "-", "column": " | "}
    return signs


def warm_up() -> None:
    """Write some of everything to nowhere: libraries and their tables are in memory after it."""
    writer = MarkdownWriter(io.StringIO())
    for text in (
        "# Title\n\nA *word* `code` [link](target), 日本 \U0001f469\u200d\U0001f467\n\n",
        "- item\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    ):
        writer.write(text)
    writer.end_line()


def answer_writer(stream: TextIO, *, is_plain: bool = False, style: str = "") -> Writer:
    """What writes answers to a stream: as Markdown on a terminal that can show it, unless told not to."""
    if is_plain or not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return Writer(stream)
    return MarkdownWriter(stream, style)
