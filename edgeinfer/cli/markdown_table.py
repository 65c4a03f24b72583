"""Tables of Markdown: as columns where they fit, else row by row."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgeinfer.cli.layout import Layout, Piece, cells
from edgeinfer.cli.markdown_inline import put_runs, runs

_DELIMITER = re.compile(r"\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_NARROWEST = 8  # columns of text, in which a cell is still easy to read
Line = list[Piece]


def is_delimiter(line: str) -> bool:
    """Whether a line is the one under a table's header."""
    return "|" in line and _DELIMITER.fullmatch(line.strip()) is not None


def table_lines(source: Sequence[str], width: int, bar: str, rule: str, code_style: str | None) -> list[Line]:
    """The lines of a table that fit a width. source: its rows, the second one the delimiters."""
    header, delimiters, *body = (_cells_of(row) for row in source)
    n_columns = max(map(len, (header, *body)))
    rows = [[*row, *[""] * (n_columns - len(row))] for row in (header, *body)]
    styles = ["1"] + [""] * len(body)
    lengths = [[_length(cell, code_style) for cell in row] for row in rows]
    widths = _widths([max(column) for column in zip(*lengths, strict=True)], width - len(bar) * (n_columns - 1))
    if widths is None:
        return _row_by_row(rows, width, rule, code_style)
    sides = [_side(delimiters[n] if n < len(delimiters) else "") for n in range(n_columns)]
    lines: list[Line] = []
    for number, (row, style) in enumerate(zip(rows, styles, strict=True)):
        columns = [_cell_lines(cell, style, size, code_style) for cell, size in zip(row, widths, strict=True)]
        for at in range(max(map(len, columns))):
            of_columns = [column[at] if at < len(column) else [] for column in columns]
            lines.append(_row(of_columns, widths, sides, bar))
        if number == 0:
            lines.append([(rule * (sum(widths) + len(bar) * (n_columns - 1)), "2")])
    return lines


def _cells_of(row: str) -> list[str]:
    row = row.strip().removeprefix("|")
    if row.endswith("|") and not row.endswith("\\|"):
        row = row[:-1]
    return [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", row)]


def _length(cell: str, code_style: str | None) -> int:
    return sum(cells(text) for text, _ in runs(cell, "", code_style))


def _widths(longest: list[int], room: int) -> list[int] | None:
    """Widths of columns with such texts that fit; None where they would be too narrow."""
    if sum(longest) <= room:
        return longest
    if room < sum(min(length, _NARROWEST) for length in longest):
        return None
    most = max(longest)
    while sum(min(length, most) for length in longest) > room:
        most -= 1
    return [min(length, most) for length in longest]


def _side(delimiter: str) -> str:
    return {(True, True): "centre", (False, True): "right"}.get(
        (delimiter.startswith(":"), delimiter.endswith(":")), "left"
    )


def _cell_lines(cell: str, style: str, width: int, code_style: str | None) -> list[Line]:
    """A cell over lines of a width."""
    lines: list[Line] = [[]]
    layout = Layout(
        lambda text, of_text: lines[-1].append((text, of_text)), lambda: lines.append([]), lambda: width, cuts=True
    )
    put_runs(layout, cell, style, code_style)
    layout.end_line()
    return lines[:-1] or lines


def _row(columns: list[Line], widths: list[int], sides: list[str], bar: str) -> Line:
    line: Line = []
    for number, (column, width, side) in enumerate(zip(columns, widths, sides, strict=True)):
        free = max(width - sum(cells(text) for text, _ in column), 0)
        before = {"left": 0, "centre": free // 2, "right": free}[side]
        after = 0 if number == len(widths) - 1 else free - before
        line += [(bar, "2")] if number else []
        line += [(" " * before, ""), *column, (" " * after, "")]
    return [piece for piece in line if piece[0]]


def _row_by_row(rows: list[list[str]], width: int, rule: str, code_style: str | None) -> list[Line]:
    """Each row as a list of cells after the names of their columns."""
    names, *body = rows
    lines: list[Line] = []
    for number, row in enumerate(body or [[""] * len(names)]):
        if number:
            lines.append([(rule * min(3, width), "2")])
        for name, cell in zip(names, row, strict=True):
            if name or cell:
                lines += _field(name, cell, width, code_style)
    return lines


def _field(name: str, cell: str, width: int, code_style: str | None) -> list[Line]:
    lines: list[Line] = [[]]
    layout = Layout(lambda text, style: lines[-1].append((text, style)), lambda: lines.append([]), lambda: width)
    layout.start([("", "")], [("  ", "")])
    put_runs(layout, name, "1", code_style)
    layout.text(": " if name else "")
    put_runs(layout, cell, "", code_style)
    layout.end_line()
    return lines[:-1]
