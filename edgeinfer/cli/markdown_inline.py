"""Markdown within a paragraph, as it arrives: which part of it can be shown already, and in which style."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from edgeinfer.cli.layout import CJK, Layout, Piece

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline

_MOST_HELD = 320  # characters after a mark whose partner has not come
_PIECE = re.compile(f"[^\\s{CJK}]*[\\s{CJK}]|[^\\s{CJK}]+")
_ENDS_PIECE = re.compile(f"[\\s{CJK}]")
_LONGEST_PIECE = 256
_PLAIN = re.compile(r"[^\\`*_~\[<!$\n]*")
_ESCAPED = frozenset("`*_~#>+-.!|$<&")
_LONGEST_FORMULA = 120  # between single dollars: most dollars are none
_MATH_ENDS = {"(": "\\)", "[": "\\]"}
_STYLES = {"strong_open": "1", "em_open": "3", "s_open": "9", "link_open": "4"}
_URL_STYLE = "2"
_AMPERSAND = "\x01"  # stands for &, so that no entity is read; the sources have no control characters


class Inline:
    """The text of one block, put out through a Layout as far as its style is known.

    Of an emphasis, a code span or a link that has begun nothing is put out until it ends, or until it is long: then its
    mark stands for itself. code_style: of code spans, None where they keep their marks.
    """

    def __init__(self, layout: Layout, code_style: str | None) -> None:
        self._layout = layout
        self._code_style = code_style
        self._style = ""
        self._source = ""
        self._n_since = 0  # characters since the last possible end

    def begin(self, style: str = "") -> None:
        """A block begins, in a style."""
        self._style, self._source, self._n_since = style, "", 0

    def feed(self, text: str) -> None:
        """The next part of the source; what it means does not depend on where parts end."""
        at = 0
        while at < len(text):
            found = _PIECE.match(text, at, at + _LONGEST_PIECE - self._n_since)
            piece = found.group() if found is not None else text[at]
            at += len(piece)
            self._source += piece
            self._n_since += len(piece)
            if _ENDS_PIECE.match(piece[-1]) or self._n_since >= _LONGEST_PIECE:
                self._n_since = 0
                self._show(settled(self._source))

    def pause(self) -> None:
        """The line has ended: show what does not depend on the next one."""
        if settled(self._source + " ") == len(self._source) + 1:
            self._show(len(self._source))
        self._layout.flush()

    def end(self) -> None:
        """The block has ended: show all of it."""
        self._show(len(self._source))
        self._layout.flush()

    def _show(self, n: int) -> None:
        """Put out the first n characters, or more where too much would be held."""
        if len(self._source) - n > _MOST_HELD:
            n = len(self._source)
        if n:
            source, self._source = self._source[:n], self._source[n:]
            put_runs(self._layout, source, self._style, self._code_style)


def put_runs(layout: Layout, source: str, style: str, code_style: str | None) -> None:
    """Put out a source whose marks have their partners in it."""
    for text, of_text in runs(source, style, code_style):
        if text == "\n":
            layout.new_line()
        else:
            layout.text(text, of_text)


def runs(source: str, style: str, code_style: str | None) -> Iterator[Piece]:
    """Texts with their styles; a line break is a text of its own."""
    if _PLAIN.fullmatch(source):
        yield source, style
        return
    for text, of_text in _parsed(source, style, code_style):
        yield text.replace(_AMPERSAND, "&"), of_text


def _parsed(source: str, style: str, code_style: str | None) -> Iterator[Piece]:
    margin = len(source) - len(source.lstrip(" \t"))
    yield source[:margin], style
    styles = [style]
    target = ""
    for token in _parser().parseInline(source[margin:].replace("&", _AMPERSAND))[0].children or []:
        now = styles[-1]
        if token.type == "code_inline":
            yield (token.content, _joined(now, code_style)) if code_style is not None else (f"`{token.content}`", now)
        elif token.type in ("softbreak", "hardbreak"):
            yield "\n", now
        elif token.type == "image":
            yield f"{token.content or 'image'} ({_target(token, 'src')})", now
        elif token.type in _STYLES:
            styles.append(_joined(now, _STYLES[token.type]))
            target = _target(token, "href") if token.type == "link_open" and token.info != "auto" else ""
        elif token.nesting < 0:
            styles.pop()
            if token.type == "link_close" and target:
                yield f" ({target})", _joined(styles[-1], _URL_STYLE)
                target = ""
        else:
            yield token.content, now
    yield source[len(source.rstrip(" \t")) :] if source[-1:] in " \t" else "", style


def _joined(style: str, more: str) -> str:
    return ";".join(filter(None, (style, more)))


def _target(token: Any, key: str) -> str:
    """Where a link or an image leads, and its title."""
    title = token.attrs.get("title")
    return f'{token.attrs[key]} "{title}"' if title else str(token.attrs[key])


@cache
def _parser() -> MarkdownIt:
    """CommonMark's inline syntax without HTML and entities, which stay as they are, and with formulas, which do too."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").disable("entity")
    parser.inline.ruler.at("escape", _escape)
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.normalizeLink = lambda url: url  # type: ignore[method-assign]
    parser.validateLink = lambda url: True  # type: ignore[method-assign]
    return parser


def _escape(state: StateInline, silent: bool) -> bool:
    """A backslash before a mark takes its meaning away; before anything else it is one."""
    after = state.src[state.pos + 1 : state.pos + 2]
    if state.src[state.pos] != "\\" or not after:
        return False
    if not silent:
        state.pending += after if after in _ESCAPED else "" if after == "\n" else "\\" + after
        if after == "\n":
            state.push("hardbreak", "br", 0)
    state.pos += 2
    return True


def _formula(state: StateInline, silent: bool) -> bool:
    """A formula between dollars, or after a backslash and a bracket, is text without marks."""
    end = _end_of_formula(state.src, state.pos)
    if end is None:
        return False
    if not silent:
        state.pending += state.src[state.pos : end]
    state.pos = end
    return True


# ---- What is settled -------------------------------------------------------------------------------------------------


def settled(source: str) -> int:
    """Length of the beginning whose look does not depend on what follows. It ends after a space or beside CJK."""
    end = at = 0
    open_marks: list[list[Any]] = []  # [mark, how many]
    while at < len(source):
        mark = source[at]
        after: int | None = at + 1
        if mark.isspace():
            end = end if open_marks else at + 1
        elif mark == "\\":
            after = _after_backslash(source, at)
        elif mark == "`":
            after = _after_code(source, at)
        elif mark == "[":
            after = _after_link(source, at)
        elif mark == "$":
            after = _after_dollar(source, at)
        elif mark in "*_~":
            after = _after_run(source, at, open_marks)
        elif _ENDS_PIECE.match(mark) and not open_marks:
            end = at
        if after is None:
            return end
        at = after
    return end


def _after_backslash(source: str, at: int) -> int | None:
    after = source[at + 1 : at + 2]
    if after in _MATH_ENDS:
        return _end_of_formula(source, at)
    return at + 2 if after else None


def _after_code(source: str, at: int) -> int | None:
    run = _run(source, at)
    if at + len(run) == len(source):
        return None
    closing = re.compile(f"(?<!`){run}(?!`)").search(source, at + len(run))
    return None if closing is None or closing.end() == len(source) else closing.end()


def _after_link(source: str, at: int) -> int | None:
    """The end of [text](target), or of [text] that is no link."""
    close = _partner(source, at, "[", "]")
    if close is None or close + 1 == len(source):
        return None
    if source[close + 1] != "(":
        return at + 1
    end = _partner(source, close + 1, "(", ")")
    return None if end is None else end + 1


def _after_dollar(source: str, at: int) -> int | None:
    end = _end_of_formula(source, at)
    if end is not None:
        return end if end < len(source) else None
    rest = source[at : at + _LONGEST_FORMULA]
    may_be_one = len(rest) < _LONGEST_FORMULA and "\n" not in rest and re.match(r"\$\$|\$[^\s\d$]|\$$", rest)
    return None if may_be_one else at + 1


def _after_run(source: str, at: int, open_marks: list[list[Any]]) -> int | None:
    """The end of a run of * _ or ~, which opens or closes what open_marks has."""
    run = _run(source, at)
    mark, n, end = run[0], len(run), at + len(run)
    if end == len(source):
        return None
    before, after = source[at - 1] if at else " ", source[end]
    opens, closes = _flanks(mark, before, after)
    if mark == "~" and n == 1:
        return end
    marks = [open_mark for open_mark, _ in open_marks]
    while closes and n and mark in marks:
        del open_marks[len(marks) - marks[::-1].index(mark) :]
        taken = min(n, open_marks[-1][1])
        open_marks[-1][1] -= taken
        n -= taken
        if not open_marks[-1][1]:
            open_marks.pop()
        marks = [open_mark for open_mark, _ in open_marks]
    if opens and n:
        open_marks.append([mark, n])
    return end


def _flanks(mark: str, before: str, after: str) -> tuple[bool, bool]:
    """Whether a run of marks can open, and close, an emphasis, by the rules of CommonMark."""
    left = not after.isspace() and (not _is_punctuation(after) or before.isspace() or _is_punctuation(before))
    right = not before.isspace() and (not _is_punctuation(before) or after.isspace() or _is_punctuation(after))
    if mark == "_":
        return left and (not right or _is_punctuation(before)), right and (not left or _is_punctuation(after))
    return left, right


def _is_punctuation(character: str) -> bool:
    import unicodedata

    return unicodedata.category(character)[0] in "PS"


def _run(source: str, at: int) -> str:
    """The marks of one kind that stand there."""
    end = at
    while end < len(source) and source[end] == source[at]:
        end += 1
    return source[at:end]


def _partner(source: str, at: int, opening: str, closing: str) -> int | None:
    """Index of the bracket that closes one; None where it has not come."""
    depth = 0
    while at < len(source):
        if source[at] == "\\":
            at += 1
        elif source[at] == opening:
            depth += 1
        elif source[at] == closing:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return None


def _end_of_formula(source: str, at: int) -> int | None:
    """Where the formula ends that begins there; None where there is none, or its end has not come."""
    start = source[at : at + 2]
    if start[:1] == "\\" and start[1:] in _MATH_ENDS:
        end = source.find(_MATH_ENDS[start[1:]], at + 2)
        return None if end < 0 else end + 2
    if start == "$$":
        end = source.find("$$", at + 2)
        return None if end < 0 else end + 2
    found = re.compile(r"\$(?![\s\d$])[^$\n]*?(?<![\s\\])\$(?!\w)").match(source, at)
    return None if found is None else found.end()
