"""Words on lines: how wide text is on a terminal, and where a line may break."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

# Letters of scripts that are written without spaces. None of them continues a character before it.
CJK = "\u2e80-\u2fdf\u3000-\u30ff\u3105-\u4dbf\u4e00-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60\U00020000-\U0003ffff"
_IS_CJK = re.compile(f"[{CJK}]")
_CLOSING = frozenset(
    ")]},.;:!?%\u2019\u201d\u3001\u3002\u3009\u300b\u300d\u300f\u3011\u30fc\uff01\uff09\uff0c\uff0e\uff1a\uff1b\uff1f"
)
_OPENING = frozenset("([{\u2018\u201c\u3008\u300a\u300c\u300e\u3010\uff08")
_TAB = 8
_WORDS_ROOM = 24  # columns for the words of an indented line, if there is room

Piece = tuple[str, str]
"""A text and its style: the parameters of an SGR sequence, such as "1;3", or "" for none."""


def clusters(text: str) -> Iterator[str]:
    """The characters as people count them: an emoji with its joiners, or a letter with its accents, is one."""
    if text.isascii():
        yield from text
        return
    from wcwidth import iter_graphemes

    yield from iter_graphemes(text)


def cells(text: str) -> int:
    """Columns that a text without tabs takes on a terminal."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth

    return sum(max(0, wcswidth(cluster)) for cluster in clusters(text))


def most_cells(text: str) -> int:
    """Columns that a text takes at most: some terminals show the parts of an emoji side by side."""
    if text.isascii():
        return len(text)
    from wcwidth import wcwidth

    return max(cells(text), sum(max(0, wcwidth(character)) for character in text))


class Layout:
    """Breaks styled text into lines between words, and writes each word as soon as its end is known.

    A word that is longer than a line is written as it is: the terminal breaks it, and it can be copied whole. With
    `cuts` it is cut. `put` is called with the parts of lines, `end` at the end of each.
    """

    def __init__(
        self, put: Callable[[str, str], None], end: Callable[[], None], width: Callable[[], int], cuts: bool = False
    ) -> None:
        self._put = put
        self._end = end
        self._width = width
        self._cuts = cuts
        self._column = 0
        self._is_open = False  # whether the line has begun
        self._first: Sequence[Piece] = ()
        self._rest: Sequence[Piece] = ()
        self._word: list[Piece] = []
        self._space: str | None = None  # the style of a space before the word
        self._has_word = False  # whether a word stands on the line

    @property
    def is_open(self) -> bool:
        """Whether something stands on the line."""
        return self._is_open

    def start(self, first: Sequence[Piece] = (), rest: Sequence[Piece] = ()) -> None:
        """Begin a new line with `first`; its continuation lines begin with `rest`."""
        self.end_line()
        self._first, self._rest = first, rest

    def text(self, text: str, style: str = "") -> None:
        """Words and spaces. Spaces in a row are one."""
        for part in re.findall(r"[ \t]+|[^ \t]+", text):
            if part[0] in " \t":
                self.flush()
                self._space = style
            elif _IS_CJK.search(part) is None:
                self._append(part, style)
            else:
                self._append_cjk(part, style)

    def verbatim(self, text: str, style: str = "") -> None:
        """A part of a line as it is, without a word of its own."""
        self._begin()
        self._put(text, style)

    def new_line(self) -> None:
        """Continue in a new line of the same block."""
        self.end_line(at_least_one=True)

    def end_line(self, at_least_one: bool = False) -> None:
        """End the line, if there is one or must be."""
        self.flush()
        if at_least_one or self._first:
            self._begin()
        if self._is_open:
            self._end()
        self._is_open, self._space, self._has_word = False, None, False

    def flush(self) -> None:
        """Write the word that has begun."""
        if not self._word:
            return
        word, self._word = self._word, []
        n_cells = sum((cells if self._cuts else most_cells)(text) for text, _ in word)
        width = self._width()
        gap = 1 if self._space is not None and self._has_word else 0
        if self._is_open and self._has_word and self._column + gap + n_cells > width:
            self._end()
            self._is_open, gap = False, 0
        self._begin()
        if gap:
            self._put(" ", self._space or "")
            self._column += 1
        self._space, self._has_word = None, True
        if self._cuts and self._column + n_cells > width:
            self._put_cut(word, width)
            return
        for text, style in word:
            self._put(text, style)
        self._column += n_cells
        if self._column > width:  # the terminal breaks it
            self._column = (self._column - 1) % width + 1

    def _append(self, text: str, style: str) -> None:
        if self._word and self._word[-1][1] == style:
            self._word[-1] = (self._word[-1][0] + text, style)
        else:
            self._word.append((text, style))

    def _append_cjk(self, text: str, style: str) -> None:
        """A line may break before and after a letter of these scripts, but not before closing punctuation."""
        for cluster in clusters(text):
            last = self._word[-1][0][-1] if self._word else ""
            is_break = last and (_IS_CJK.match(cluster) or _IS_CJK.match(last))
            if is_break and last not in _OPENING and cluster not in _CLOSING:
                self.flush()
            self._append(cluster, style)

    def _begin(self) -> None:
        """Begin the line, if it has not begun, with its prefix. In a narrow terminal this is cut to leave room."""
        if self._is_open:
            return
        room = max(self._width() // 2, 1)
        self._is_open, self._has_word, self._column = True, False, 0
        for text, style in self._first or self._rest:
            text = text[: max(room - self._column, 0)] if text.isspace() else text
            if text:
                self._put(text, style)
            self._column += cells(text)
        self._first = ()

    def _put_cut(self, word: list[Piece], width: int) -> None:
        """A word over several lines."""
        for text, style in word:
            for cluster in clusters(text):
                if self._column > 0 and self._column + cells(cluster) > width:
                    self._end()
                    self._is_open = False
                    self._begin()
                    self._has_word = True
                self._put(cluster, style)
                self._column += cells(cluster)


def wrapped(text: str, width: int, hang: int = 0) -> str:
    """The text with line breaks between words; continuation lines are indented as the first one, and by `hang`."""
    lines = [line if cells(line) <= width else _wrapped_line(line, width, hang) for line in text.split("\n")]
    return "\n".join(lines)


def _wrapped_line(line: str, width: int, hang: int) -> str:
    line = line.expandtabs(_TAB)
    margin = len(line) - len(line.lstrip(" "))
    indent = " " * min(margin + hang, max(width - _WORDS_ROOM, 2))
    rows, row = [], ""
    for gap, word in re.findall(r"( *)([^ ]+)", line):
        if row.strip() and cells(row + gap + word) > width:
            rows.append(row)
            row = indent + word
        else:
            row += gap + word
    return "\n".join([*rows, row])
