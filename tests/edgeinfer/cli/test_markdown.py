"""Answers as Markdown on a terminal: what is shown of it, where lines break, and that nothing is lost."""

import io
import os
import random
import re
import time
from collections import Counter

import pytest

from edgeinfer.cli import markdown
from edgeinfer.cli.layout import cells, wrapped
from edgeinfer.cli.markdown import MarkdownWriter, answer_writer
from edgeinfer.cli.terminal import Writer

SGR = re.compile(r"\x1b\[([0-9;]*)m")
STATUS = re.compile(r"[^\r\n\x1b]*\r\x1b\[K")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def width(monkeypatch):
    """Sets the width of the terminal, 40 at first."""

    def set_to(columns):
        monkeypatch.setattr(markdown, "terminal_width", lambda stream: columns)

    monkeypatch.delenv("NO_COLOR", raising=False)
    set_to(40)
    return set_to


def shown(source, parts=None):
    """What reaches the terminal of an answer that arrives in such parts, or at once."""
    stream = Terminal()
    writer = MarkdownWriter(stream)
    for part in [source] if parts is None else parts:
        writer.write(part)
    writer.end_line()
    return stream.getvalue()


def text_of(output):
    return SGR.sub("", STATUS.sub("", SGR.sub("", output)))


def lines(source, parts=None):
    return text_of(shown(source, parts)).split("\n")[:-1]


def styled(output, text):
    """Styles under which a text stands."""
    return {style for style, piece in re.findall(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", output, re.DOTALL) if text in piece}


# ---- What Markdown means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, text, style",
    [
        ("some **bold words** here", "bold words", "1"),
        ("some __bold__ here", "bold", "1"),
        ("some *slanted* here", "slanted", "3"),
        ("**bold *both* bold**", "both", "1;3"),
        ("a `code **x** y` b", "code **x** y", "36"),
        ("~~gone~~", "gone", "9"),
        ("# Title", "Title", "1;4"),
        ("### Smaller", "Smaller", "1"),
        ("see [the page](http://a.b/c_d_e)", "the page", "4"),
        ("see [the page](http://a.b/c_d_e)", "(http://a.b/c_d_e)", "2"),
        ("<http://a.b/c>", "http://a.b/c", "4"),
        ("```python\nprint(1)\n```", "print(1)", "36"),
        ("two\n**bold\nlines** here", "lines", "1"),
    ],
)
def test_marks_become_styles(width, source, text, style):
    assert style in styled(shown(source), text)


@pytest.mark.parametrize(
    "source",
    [
        "2 * 3 * 4 = 24",
        "snake_case_name and x__y__z",
        "a **bold that never ends",
        "an `open code",
        "[1] and [note] and [0, 1)",
        "<div class='x'>raw <b>html</b></div>",
        "&amp; &eacute; &#65;",
        "$a_1 * b_2$ and $$x_1$$",
        r"\(x_i * y_i\) and \[z_1\]",
        "it costs $5 or $6",
        r"a \ backslash \n",
        "#hashtag and 1.5 and -3",
        "a | b",
        "***",
        "**",
        "``",
        "[a][b]",
        "[a](b",
        "-",
        "|",
        "\\",
        "`",
    ],
)
def test_what_is_no_mark_stands_as_it_is(width, source):
    width(80)
    shape = {"***": "\u2500" * 20, "-": "\u2022 "}
    assert text_of(shown(source)) == shape.get(source, source) + "\n"


@pytest.mark.parametrize(
    "source, expected",
    [
        (r"\*no\* \_marks\_ \`here\`", ["*no* _marks_ `here`"]),
        ("[a](b 'title')", ['a (b "title")']),
        ("![alt](src)", ["alt (src)"]),
        ("- one\n- two\n  - three\n    - four\n- five", ["• one", "• two", "  • three", "    • four", "• five"]),
        ("1. one\n   - two\n10) three", ["1. one", "   • two", "10) three"]),
        ("1. one\n\n   more\n\nout", ["1. one", "", "   more", "", "out"]),
        ("- [ ] open\n- [x] done", ["• [ ] open", "• [x] done"]),
        ("> quoted\n> > twice\n\nout", ["│ quoted", "│ │ twice", "", "out"]),
        ("> a\n>\n> b", ["│ a", "│", "│ b"]),
        ("a\n\n\n\nb\n\n\n", ["a", "", "b"]),
        ("\n\na", ["a"]),
        ("roses\nviolets", ["roses", "violets"]),
        ("a\r\nb", ["a", "b"]),
        ("above\n***\nbelow", ["above", "─" * 20, "below"]),
        ("$$\n\\sum_{i} a_i * b_i\n$$", ["$$", "\\sum_{i} a_i * b_i", "$$"]),
        ("\\[\na_1 * b_1\n\\]\nend", ["\\[", "a_1 * b_1", "\\]", "end"]),
        ("| no table\n| at all", ["| no table", "| at all"]),
        ("text\n| a | b |\n|---|:-:|\n| 1 | 2 |\nend", ["text", "a │ b", "─────", "1 │ 2", "end"]),
        ("    indented code", ["    indented code"]),
    ],
)
def test_blocks(width, source, expected):
    assert lines(source) == expected


# ---- Lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_no_word_is_broken_and_no_line_is_too_long(width, columns):
    width(columns)
    words = [f"word{n}" * (n % 3 + 1) for n in range(60)]
    source = f"{' '.join(words)}\n\n- {' '.join(words)}\n  1. **{' '.join(words[:6])}**\n\n> {' '.join(words)}\n"
    found = lines(source)
    assert max(map(len, found)) <= columns
    assert [word for word in " ".join(found).split() if word not in "•│1."] == words + words + words[:6] + words
    hanging = [line for line in found if not line.startswith((" ", "•", "│"))]
    assert " ".join(hanging).split() == words


def test_what_follows_a_bullet_or_a_number_is_below_its_text(width):
    width(20)
    found = lines("- one two three four five six\n  10. seven eight nine ten eleven")
    assert found == ["• one two three four", "  five six", "  10. seven eight", "      nine ten", "      eleven"]


def test_a_word_longer_than_the_line_stays_whole_so_that_it_can_be_copied(width):
    url = "https://example.com/" + "x" * 50
    assert lines(f"see {url} for more") == ["see", f"{url} for more"]
    assert lines(f"- {url}") == [f"• {url}"]


def test_text_without_spaces_breaks_between_its_letters_and_not_before_a_full_stop(width):
    width(20)
    assert lines("漢字仮名交じり文の例文。「引用」もある。") == ["漢字仮名交じり文の例", "文。「引用」もある。"]
    width(10)
    assert lines("漢字仮名交。じり") == ["漢字仮名", "交。じり"]
    assert lines("中文字符（括号）。") == ["中文字符", "（括号）。"]


@pytest.mark.parametrize("character", ["👨‍👩‍👧", "🇩🇪", "👍🏽", "e\u0301", "क्षि"])
def test_a_character_of_several_code_points_is_never_broken(width, character):
    width(7)
    source = " ".join([character] * 20)
    found = lines(source)
    assert " ".join(found) == source and max(map(cells, found)) <= 7


def test_code_can_be_copied(width):
    code = ["def f(x):", "", "\treturn x", "    y = '" + "long " * 20 + "'", "  # *no* `marks` | here", ""]
    for before, after in (("", ""), ("- item\n", "\n"), ("text\n\n", "\ntext")):
        margin = "  " if before.startswith("-") else ""
        fenced = "\n".join(margin + line for line in ["```python", *code, "```"])
        found = lines(before + fenced + after)
        start = found.index("python") + 1
        assert found[start : start + len(code)] == code


@pytest.mark.parametrize("fence", ["```", "~~~~", "````"])
def test_a_fence_that_never_closes_shows_its_code(width, fence):
    assert lines(f"a\n\n{fence}\n# x\n- y\n``\nz") == ["a", "", "# x", "- y", "``", "z"]


def test_a_table_fits_the_terminal_in_columns_or_row_by_row(width):
    source = (
        "| Name | Meaning |\n|---|---|\n| first | a long explanation of the first name |\n| **second** | `x | y` |"
    ).replace("x | y", "x \\| y")
    assert lines(source) == [
        *("Name   │ Meaning", "─" * 40),
        *("first  │ a long explanation of the first", "       │ name", "second │ x | y"),
    ]
    width(16)
    assert lines(source) == [
        *("Name: first", "Meaning: a long", "  explanation of", "  the first name"),
        *("───", "Name: second", "Meaning: x | y"),
    ]


def test_a_table_with_too_many_cells_loses_none(width):
    found = lines("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n| 4 |")
    assert [re.split(" *│ *", line.strip()) for line in found if "─" not in line] == [
        *(["a", "b", ""], ["1", "2", "3"], ["4", "", ""]),
    ]


# ---- Streaming -----------------------------------------------------------------------------------------------------

BITS = [
    *("# ", "## ", "- ", "  - ", "* ", "1. ", "   2) ", "> ", "> > ", "```", "```py\n", "~~~", "\n", "\n\n", "| "),
    *("|---|---|\n", "| a | b |\n", "**", "*", "_", "__", "~~", "`", "``", "[", "]", "(", ")", "](", "![", "<b>"),
    *("</b>", "<http://x.y/z>", "$", "$$", "\\(", "\\)", "\\[", "\\]", "\\", "\\*", "&amp;", "&#65;", "---", "==="),
    *(
        "    ",
        "\t",
        " ",
        "  ",
        "word",
        "long" * 20,
        "漢字",
        "「",
        "。",
        "👨‍👩‍👧",
        "e\u0301",
        "http://a.b/c_d",
        "foo_bar",
    ),
    *("\x1b[31m", "\r", "\r\n", "x " * 30, "word ", "the cat ", "a ", "\n"),
]


def random_markdown(seed):
    chosen = random.Random(seed)
    source = "".join(chosen.choice(BITS) for _ in range(chosen.randint(1, 60)))
    parts, at = [], 0
    while at < len(source):
        parts.append(source[at : at + chosen.randint(1, 6)])
        at += len(parts[-1])
    return source, parts, chosen.choice([1, 2, 5, 20, 40, 80])


@pytest.mark.parametrize("seed", range(400))
def test_no_letter_is_lost_whatever_the_markdown(width, seed):
    source, parts, columns = random_markdown(seed)
    width(columns)
    output = text_of(shown(source))
    expected = [letter for letter in source.replace("\x1b[31m", "31m") if letter.isalnum()]
    found = [letter for letter in output if letter.isalnum()]
    assert not Counter(expected) - Counter(found)
    if "|---" not in source and "![" not in source:  # a table is laid out anew, an image may get a name
        assert found == expected
    assert text_of(shown(source, parts)) == output, "where the parts end must not matter"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", output)


def test_what_was_written_is_never_taken_back(width):
    source = "# Title\n\nSome *words* in a **paragraph that** wraps around.\n\n- item `x`\n\n```\ncode\n```\n" * 3
    stream = Terminal()
    writer = MarkdownWriter(stream)
    for letter in source:
        writer.write(letter)
    writer.end_line()
    assert set(re.findall(r"[\x00-\x09\x0b-\x1f][^m]*m?", stream.getvalue())) <= {
        "\x1b[0m",
        *(f"\x1b[{style}m" for style in ("1", "3", "36", "1;4", "2")),
    }


def test_words_are_shown_as_soon_as_they_are_whole(width):
    stream = Terminal()
    writer = MarkdownWriter(stream)
    for part, expected in (
        ("One two", "One"),
        (" three ", "One two three"),
        ("**bold", "One two three"),
        (" and** ", "One two three bold and"),
        ("a", "One two three bold and"),
        ("\n", "One two three bold and a"),
        ("\n```\nx = 1", "One two three bold and a\n\nx = 1"),
    ):
        writer.write(part)
        assert text_of(stream.getvalue()).rstrip(" ") == expected


def test_a_mark_without_a_partner_does_not_hold_the_rest_back(width):
    stream = Terminal()
    writer = MarkdownWriter(stream)
    writer.write("a **mark and " + "word " * 200)
    assert text_of(stream.getvalue()).count("word") > 100 and "**mark" in text_of(stream.getvalue())


def test_an_answer_that_is_stopped_shows_what_was_held_and_leaves_no_style_on(width):
    for source in ("a **bold", "| a | b |\n|---|---|\n| c", "[link](http://x", "`code", "```\ncode", "- ", "a\r"):
        stream = Terminal()
        writer = MarkdownWriter(stream)
        writer.write(source)
        writer.end_line()
        output = stream.getvalue()
        for word in re.findall(r"\w+", source):
            assert word in text_of(output)
        assert output.endswith("\n") and output.count("\x1b[0m") == len(re.findall(r"\x1b\[[1-9][0-9;]*m", output))
        writer.write("next")
        writer.end_line()
        assert stream.getvalue() == output + "next\n"


def test_the_terminal_may_change_its_size(width):
    words = [f"w{n}" for n in range(300)]
    stream = Terminal()
    writer = MarkdownWriter(stream)
    for n, word in enumerate(words):
        width([80, 20, 40][n // 20 % 3])
        writer.write(f"{word} ")
    writer.end_line()
    assert text_of(stream.getvalue()).split() == words


@pytest.mark.parametrize(
    "source",
    ["word " * 20_000, "*a " * 8_000, "[" * 20_000, "a" * 50_000, "`x` " * 10_000, "```\n" + "x = 1\n" * 10_000,
     "-" * 50_000, "漢字" * 10_000, "| a " * 10_000, "$a " * 10_000, "> " * 10_000, "- a\n" * 5_000],
    ids=lambda source: source[:8].encode("unicode_escape").decode(),
)  # fmt: skip
def test_the_work_for_a_token_does_not_grow_with_the_answer(width, source):
    def seconds(source):
        before = time.process_time()
        shown(source, [source[at : at + 4] for at in range(0, len(source), 4)])
        return time.process_time() - before

    shown(source[:200])
    assert seconds(source) < 40 * seconds(source[: len(source) // 8]) + 0.5, "8 times as long, 64 times if quadratic"


# ---- Where it is used ----------------------------------------------------------------------------------------------


def test_markdown_is_for_terminals_that_can_show_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(answer_writer(Terminal()), MarkdownWriter)
    assert type(answer_writer(Terminal(), is_plain=True)) is Writer
    assert type(answer_writer(io.StringIO())) is Writer
    for term in ("dumb", None):
        monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM")
        assert type(answer_writer(Terminal())) is Writer


def test_without_colours_code_keeps_its_marks_and_there_is_no_colour(width, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    output = shown("a `b` **c**\n\n```python\nd\n```\n")
    assert text_of(output) == "a `b` c\n\n```python\nd\n```\n"
    assert set(SGR.findall(output)) <= {"0", "1", "2"}


def test_a_terminal_without_line_drawing_gets_ascii(width):
    class Ascii(Terminal):
        encoding = "ascii"

    stream = Ascii()
    writer = MarkdownWriter(stream)
    writer.write("- a\n\n> b\n\n| c | d |\n|---|---|\n| e | f |\n\n---\n")
    writer.end_line()
    assert stream.getvalue().isascii() and "- a\n" in stream.getvalue()


def test_a_pipe_gets_the_bytes_of_the_model():
    stream = io.StringIO()
    source = "# a\n\n**b**\r\n\x1b[1m| x\n"
    writer = answer_writer(stream)
    writer.write(source)
    writer.end_line()
    assert stream.getvalue() == source


# ---- Notes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [20, 40])
def test_a_note_breaks_between_words(columns):
    text = "cut: the context is full; /shorten leaves out the oldest messages and answers"
    found = wrapped(text, columns).split("\n")
    assert " ".join(found) == text and max(map(len, found)) <= columns
    assert wrapped("  /undo  drop the last message and its answer", 33, hang=7) == (
        "  /undo  drop the last message\n         and its answer"
    )
    assert wrapped("  /undo  drop the last message", 20, hang=7) == "  /undo  drop the\n  last message"
    assert wrapped("a\n\n  b  c", 40) == "a\n\n  b  c" and wrapped("x" * 50, 20) == "x" * 50


def test_the_width_of_a_terminal_is_asked_anew(monkeypatch):
    from edgeinfer.cli.terminal import terminal_width

    class Sized(Terminal):
        def fileno(self):
            return 0

    for columns in (33, 77):
        monkeypatch.setattr(os, "get_terminal_size", lambda descriptor, columns=columns: os.terminal_size((columns, 9)))
        assert terminal_width(Sized()) == columns
