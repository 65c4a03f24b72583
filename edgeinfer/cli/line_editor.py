"""Typing a message: editing by whole characters, messages of several lines, history, suspending."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_toolkit import PromptSession
from prompt_toolkit import utils as measures
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition, has_selection
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.screen import Char
from prompt_toolkit.output import ColorDepth, Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from edgeinfer.cli.layout import cells, clusters

if TYPE_CHECKING:
    from prompt_toolkit.buffer import Buffer

QUOTES = '"""'
_MOST_BACK = 64  # characters before the cursor that are searched for the beginning of the one there
_FIRST_STANDIN = 0xF0000  # private use


def line_editor(history: Path | None, commands: Sequence[str]) -> PromptSession[str]:
    """Line editing on the terminal; prompts go to stderr, as stdout is the answers'. Tab completes commands.

    history: the file of typed messages, None for those of this run alone.
    """
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory() if history is None else _History(str(history)),
        output=_output(),
        color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        key_bindings=_keys(),
        multiline=Condition(lambda: _is_in_quotes(session.default_buffer.text)),
        prompt_continuation=lambda width, line, n_wraps: "  " if n_wraps else ". ",
        enable_suspend=True,
        input_processors=[_WholeCharacters()],
        style=Style.from_dict({"control-character": "noinherit"}),
    )
    return session


def unquoted(text: str) -> str:
    """A message without the quotes that let it have several lines."""
    if not text.startswith(QUOTES):
        return text
    return text.rstrip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def _is_in_quotes(text: str) -> bool:
    """Whether a message of several lines has begun and not ended."""
    return text.startswith(QUOTES) and not (text.rstrip().endswith(QUOTES) and len(text.rstrip()) >= 2 * len(QUOTES))


class _History(FileHistory):
    """Typed messages in a file. One that cannot be written or read in its time is not kept, and stops nothing."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string.encode(errors="replace").decode())  # what was typed may be no UTF-8

    def load_history_strings(self) -> Iterable[str]:
        try:
            yield from super().load_history_strings()
        except OSError:
            return


# ---- Keys ------------------------------------------------------------------------------------------------------------


def _keys() -> KeyBindings:
    """Keys that move and delete by characters as people count them; Alt-Enter makes a new line."""
    keys = KeyBindings()

    def is_first(event: KeyPressEvent) -> bool:
        return not event.is_repeat

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("left", filter=~has_selection)
    @keys.add("c-b", filter=~has_selection)
    def left(event: KeyPressEvent) -> None:
        event.current_buffer.cursor_position -= _length_before(event.current_buffer, within_line=True)

    @keys.add("right", filter=~has_selection)
    @keys.add("c-f", filter=~has_selection)
    def right(event: KeyPressEvent) -> None:
        event.current_buffer.cursor_position += _length_after(event.current_buffer, within_line=True)

    @keys.add("backspace", filter=~has_selection, save_before=is_first)
    def delete_before(event: KeyPressEvent) -> None:
        n = _length_before(event.current_buffer)
        if n:
            event.current_buffer.delete_before_cursor(n)
        else:
            event.app.output.bell()

    is_before_text = Condition(lambda: bool(_current_buffer().document.text_after_cursor))

    @keys.add("delete", filter=~has_selection, save_before=is_first)
    @keys.add("c-d", filter=is_before_text, save_before=is_first)
    def delete_after(event: KeyPressEvent) -> None:
        event.current_buffer.delete(_length_after(event.current_buffer))

    return keys


def _current_buffer() -> Buffer:
    from prompt_toolkit.application import get_app

    return get_app().current_buffer


def _length_before(buffer: Buffer, within_line: bool = False) -> int:
    """Length of the character before the cursor, 0 if there is none."""
    document = buffer.document
    before = document.current_line_before_cursor if within_line else document.text_before_cursor
    *_, last = [""] + list(clusters(before[-_MOST_BACK:]))
    return len(last)


def _length_after(buffer: Buffer, within_line: bool = False) -> int:
    """Length of the character after the cursor, 0 if there is none."""
    document = buffer.document
    after = document.current_line_after_cursor if within_line else document.text_after_cursor
    return len(next(clusters(after[:_MOST_BACK]), ""))


# ---- What is shown of characters of several code points --------------------------------------------------------------
# prompt_toolkit draws and measures code point by code point. Terminals differ in how wide they show an emoji with
# joiners, so each such character is drawn at once, and then the cursor is put where it belongs.


class _WholeCharacters(Processor):
    """Gives each character of several code points a cell of its own: one code point stands in for it."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        fragments: StyleAndTextTuples = []
        starts: list[int] = []  # in the source, of each character on the screen
        at = 0
        for style, text, *_ in transformation_input.fragments:
            shown = [_standin(cluster) if len(cluster) > 1 else cluster for cluster in clusters(text)]
            for cluster in clusters(text):
                starts.append(at)
                at += len(cluster)
            fragments.append((style, "".join(shown)))
        if at == len(starts):
            return Transformation(transformation_input.fragments)
        place = {start: number for number, start in enumerate(starts)}
        for index in range(at):  # within a character: where it begins
            place.setdefault(index, place.get(index - 1, 0))
        return Transformation(
            fragments,
            source_to_display=lambda source: place.get(source, len(starts) + source - at),
            display_to_source=lambda shown: starts[shown] if shown < len(starts) else at + shown - len(starts),
        )


_standins: dict[str, str] = {}


def _standin(cluster: str) -> str:
    """The code point that stands in for a character; it is measured and drawn as that."""
    if cluster not in _standins:
        standin = chr(_FIRST_STANDIN + len(_standins) % 0xFFFD)
        _standins[cluster] = standin
        Char.display_mappings[standin] = cluster
        for text in (standin, cluster):
            measures._CHAR_SIZES_CACHE[text] = cells(cluster)
    return _standins[cluster]


class _SyncedOutput(Vt100_Output):
    """Says where the cursor is after each character of which terminals know different widths."""

    _column = 0

    def write(self, data: str) -> None:
        super().write(data)
        if data.startswith("\r"):
            self._column = 0
            return
        self._column += measures.get_cwidth(data)
        if data in _standins:
            self.write_raw(f"\x1b[{self._column + 1}G")

    def cursor_forward(self, amount: int) -> None:
        super().cursor_forward(amount)
        self._column += amount

    def cursor_backward(self, amount: int) -> None:
        super().cursor_backward(amount)
        self._column = max(self._column - amount, 0)


def _output() -> Output:
    output = create_output(stdout=sys.stderr)
    if type(output) is not Vt100_Output:
        return output
    term: Any = os.environ.get("TERM")
    return _SyncedOutput.from_pty(sys.stderr, term=term, default_color_depth=ColorDepth.from_env())
