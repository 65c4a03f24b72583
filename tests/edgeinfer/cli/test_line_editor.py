"""Typing a message: whole characters, several lines, the history."""

import pytest
from person import sitting_at
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from screen import Screen
from tiny_models import write_tiny_model

from edgeinfer.cli.layout import cells
from edgeinfer.cli.line_editor import line_editor, unquoted

FAMILY, FLAG, THUMB, HEART, ACCENT, SYLLABLE = "👨‍👩‍👧", "🇩🇪", "👍🏽", "❤️", "e\u0301", "क्षि"
CHARACTERS = [FAMILY, FLAG, THUMB, HEART, ACCENT, SYLLABLE, "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "1️⃣", "한", "漢", "x", "é"]
BACK, LEFT, RIGHT, DELETE, UP, HOME = "\x7f", "\x1b[D", "\x1b[C", "\x1b[3~", "\x1b[A", "\x01"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=2048))


def typed(*keys, history=None):
    """The message that is read when these keys are typed."""
    with create_pipe_input() as pipe, create_app_session(input=pipe):
        pipe.send_text("".join(keys))
        return line_editor(history, ["/help", "/set"]).prompt("> ")


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("key", [BACK, "\x08"])
def test_backspace_deletes_a_whole_character(character, key):
    assert typed(f"a{character}b{character}", key, "c\r") == f"a{character}bc"
    assert typed(character, key, key, "c\r") == "c"


@pytest.mark.parametrize("character", CHARACTERS)
def test_the_other_keys_go_by_whole_characters(character):
    text = f"a{character}b"
    assert typed(text, LEFT * 2, "X\r") == f"aX{character}b"
    assert typed(text, HOME, RIGHT * 2, "X\r") == f"a{character}Xb"
    assert typed(text, HOME, RIGHT, DELETE, "\r") == "ab"
    assert typed(text, HOME, RIGHT, "\x04", "\r") == "ab"
    assert typed(text, LEFT * 9, RIGHT * 99, BACK * 9, "Y\r") == "Y"


def test_a_message_of_several_lines_is_one_entry_of_the_history(tmp_path):
    history = tmp_path / "history"
    history.write_text("\n# 2026-01-01 00:00:00.000000\n+an old line\n")  # as earlier versions wrote it
    quoted = '"""one\rtwo\r\rthree"""\r'
    whole = '"""one\ntwo\n\nthree"""'
    assert typed(quoted, history=history) == whole
    assert unquoted(whole) == "one\ntwo\n\nthree"
    assert typed("other\r", history=history) == "other"
    assert list(line_editor(history, []).history.load_history_strings()) == ["other", whole, "an old line"]
    assert history.read_text().count("+an old line\n") == 1
    assert "+one" not in history.read_text() and '+"""one\n+two\n+\n+three"""\n' in history.read_text()


def test_pasted_lines_are_one_message():
    paste = "\x1b[200~one\r\ntwo\rthree\n\x1b[201~"
    assert typed(paste, "\r") == "one\ntwo\nthree\n"
    assert typed("\x1b[200~/set\nno command\x1b[201~", "\r") == "/set\nno command"


@pytest.mark.parametrize(
    "text, message",
    [('"""a"""', "a"), ('""""""', ""), ('"""\na\n"""', "a"), ('say """x"""', 'say """x"""'), ('"""a""" \n', "a")],
)
def test_the_quotes_are_no_part_of_a_message(text, message):
    assert unquoted(text) == message


def test_quotes_that_close_in_their_line_end_the_message():
    assert typed('"""one line"""\r') == '"""one line"""'


def test_ctrl_c_leaves_a_message_of_several_lines_and_ctrl_d_does_not():
    with pytest.raises(KeyboardInterrupt):
        typed('"""one\r', "\x03")
    assert typed('"""one\r', "\x04", 'two"""\r') == '"""one\ntwo"""'
    with pytest.raises(EOFError):
        typed("\x04")


def test_a_very_long_message_is_read_whole():
    text = "word 漢字 " * 3000
    assert typed(f"\x1b[200~{text}\x1b[201~", "\r") == text


def test_up_brings_a_message_of_several_lines_back_whole_and_tab_completes_commands(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3", "--quiet") as person:
        person.say('"""one\rtwo"""')
        person.see_prompt()
        screen = Screen()
        person.type(UP)
        person.watch(screen, lambda: [screen.line(row).strip() for row in (0, 1)] == ['> """one', '. two"""'])
        person.type("\x03")
        person.see_prompt()
        person.type("/he\t")
        person.see("lp")
        person.type("\r")
        person.see("show this, as /? does")
        person.say("/exit")
        assert person.leave() == 0


@pytest.mark.parametrize("by_code_point", [False, True])
@pytest.mark.parametrize("columns", [20, 80])
def test_the_prompt_stays_and_the_line_is_right_on_terminals_of_both_kinds(model, tmp_path, by_code_point, columns):
    with sitting_at(model, tmp_path, "-n", "3", "--quiet", columns=columns) as person:
        screen = Screen(by_code_point=by_code_point)

        def is_seen(keys, line, column):
            person.type(keys)
            person.watch(screen, lambda: screen.line(screen.row).startswith(line) and screen.column == column)

        is_seen("", ">", 2)
        for character in (FAMILY, FLAG, THUMB, HEART, ACCENT):
            is_seen(character, f"> {character[0] if by_code_point else character}", 2 + cells(character))
            person.type(BACK)
            person.watch(screen, lambda: screen.line(screen.row) == ">" and screen.column == 2)
        is_seen(f"a {FAMILY} b", f"> a {FAMILY[0] if by_code_point else FAMILY}", 8)
        is_seen(LEFT * 2 + BACK + "X", "> a X b", 5)
        person.type("\x03")
        person.say("/exit")
        assert person.leave() == 0
