"""What a terminal shows of what a program writes: enough of one for a line editor."""

from __future__ import annotations

import re
from collections.abc import Iterator

from wcwidth import iter_graphemes, wcswidth, wcwidth

_TOKEN = re.compile(r"\x1b\[([?>]?)([0-9;]*)([A-Za-z])|\x1b.|[\x00-\x1f]|[^\x00-\x1f]+")


class Screen:
    """Rows of text. by_code_point: as terminals that know no emoji with joiners, whose parts stand side by side."""

    def __init__(self, *, by_code_point: bool = False) -> None:
        self.by_code_point = by_code_point
        self.row = self.column = 0
        self._cells: dict[tuple[int, int], str] = {}

    def write(self, text: str) -> None:
        """Show what is written."""
        for token in _TOKEN.finditer(text):
            if token[3] is not None:
                self._control(token[3], int(token[2] or 1) if token[2].isdigit() or not token[2] else 1, token[2])
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self.row += 1
            elif token[0] == "\b":
                self.column = max(self.column - 1, 0)
            elif token[0][0] >= " ":
                self._print(token[0])

    def line(self, row: int) -> str:
        """What stands in a row."""
        columns = [column for at, column in self._cells if at == row]
        return "".join(self._cells.get((row, column), " ") for column in range(max(columns, default=-1) + 1)).rstrip()

    def _print(self, text: str) -> None:
        for character, width in self._characters(text):
            if width == 0:
                before = (self.row, max(self.column - 1, 0))
                self._cells[before] = self._cells.get(before, "") + character
                continue
            self._cells[self.row, self.column] = character
            for column in range(self.column + 1, self.column + width):
                self._cells[self.row, column] = ""
            self.column += width

    def _characters(self, text: str) -> Iterator[tuple[str, int]]:
        if self.by_code_point:
            yield from ((character, max(wcwidth(character), 0)) for character in text)
        else:
            yield from ((character, max(wcswidth(character), 0)) for character in iter_graphemes(text))

    def _control(self, name: str, n: int, given: str) -> None:
        if name == "A":
            self.row = max(self.row - n, 0)
        elif name == "B":
            self.row += n
        elif name == "C":
            self.column += n
        elif name == "D":
            self.column = max(self.column - n, 0)
        elif name == "G":
            self.column = n - 1
        elif name in "KJ" and given in ("", "0"):
            rows = (row for row, _ in self._cells) if name == "J" else ()
            below = {row for row in rows if row > self.row}
            self._cells = {
                at: cell
                for at, cell in self._cells.items()
                if at[0] not in below and not (at[0] == self.row and at[1] >= self.column)
            }
