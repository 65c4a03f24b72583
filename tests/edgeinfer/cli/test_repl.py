"""Commands of a chat, the line after an answer, and a terminal that is resized, suspended or full of Markdown."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from person import MAIN, SAYING_MAIN, sitting_at
from screen import Screen
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.cli.chat import chat
from edgeinfer.cli.model_names import shown_name
from edgeinfer.cli.settings import Settings
from edgeinfer.common.errors import ContextOverflow, EdgeInferError, InvalidArgument
from edgeinfer.sampling import SamplingParams

# A shell that controls jobs: it says when the chat is suspended, and a line of input lets it go on.
SHELL = 'exec 3<>"$(tty)"; set -m; "$@"; echo SUSPENDED; read -r line; fg; echo ENDED $?'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=2048))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    return str(write_tiny_model(folder / "other.gguf", seed=5, n_ctx_train=512, metadata={"general.name": "the other"}))


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_what_shows_answers_is_in_the_memory_plan(model, tmp_path, native):
    """Of the ledger: the process, which has the libraries of the terminal, takes no more than its lines say."""
    flags = ("--backend", "native", "--drafter", "none", "-n", "5", "-s", "1")
    with sitting_at(model, tmp_path, *flags, main=MAIN) as person:
        person.see("Ctrl-D leaves")
        person.say("日本 **hello**")
        person.see("tok/s")
        person.see_prompt()
        person.type("/stats\r")
        shown = person.see("sampling ")
    figures = {name: re.search(rf"{name} .*?([\d.]+) MiB of +([\d.]+) MiB", shown) for name in ("memory", "process")}
    assert figures["memory"] and figures["process"], shown
    taken, planned = map(float, figures["process"].groups())
    assert taken <= planned + 4.0  # the vocabulary and sampling are lines of their own
    assert float(figures["memory"][1]) <= float(figures["memory"][2])


# ---- The line after an answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_one_short_line_follows_an_answer_unless_it_is_to_be_quiet(model, command, monkeypatch):
    given = [command, "-m", model, "--backend", "reference", "hello", "-n", "2", "-s", "1"]
    said = CliRunner().invoke(cli.main, given).stderr
    assert re.fullmatch(r"2 tokens, \d+\.\d tok/s\n", said)
    for quiet in ("-q", "--quiet"):
        assert CliRunner().invoke(cli.main, [*given, quiet]).stderr == ""
    monkeypatch.setenv("EDGEINFER_QUIET", "1")
    assert CliRunner().invoke(cli.main, given).stderr == ""


def test_the_line_of_one_token_has_no_speed(model):
    given = ["generate", "-m", model, "--backend", "reference", "hello", "-n", "1", "-s", "1"]
    assert CliRunner().invoke(cli.main, given).stderr == "1 token\n"


def test_a_quiet_chat_shows_neither_greeting_nor_figures(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3", "-q", main=SAYING_MAIN, SAY_TWENTY=None, SAYS="yes") as person:
        greeting = person.see("\x1b[?25h")
        person.type("hello\r")
        assert "tiny" not in greeting and "/help" not in person.see("yes")
        assert "tok/s" not in person.see("\x1b[?25h")
        person.type("/stats\r")
        person.see("tok/s")
        person.say("exit")
        assert person.leave() == 0


# ---- Leaving and help ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("farewell", ["exit", "quit", "Quit ", "/exit", "/quit", "/bye", "\x04"])
def test_ways_to_leave(model, tmp_path, farewell):
    with sitting_at(model, tmp_path, "-n", "3", "-q") as person:
        person.see_prompt()
        person.type(farewell if farewell == "\x04" else farewell + "\r")
        assert person.leave() == 0


def test_a_message_that_only_begins_so_is_a_message_and_a_question_mark_is_help(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3") as person:
        for message in (" exit", "exit now", " /bye", "quit?"):
            person.say(message)
            person.see("3 tokens")
        person.say("/?")
        person.see("Alt-Enter makes a new line too")
        person.say("exit")
        assert person.leave() == 0


# ---- /set ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings():
    def make(*arguments):
        context = chat.make_context("chat", list(arguments))
        return Settings(context, context.params)

    return make


@pytest.mark.parametrize(
    "line, name, value",
    [
        ("temp 0.3", "temperature", 0.3),
        ("--temp 0.3", "temperature", 0.3),
        ("temperature 0.3", "temperature", 0.3),
        ("top-k 7", "top_k", 7),
        ("top_k 7", "top_k", 7),
        ("s 5", "seed", 5),
        ("repeat-last-n -1", "penalty_last_n", -1),
        ("logit-bias 15043-1 9+2.5", "logit_bias", ((9, 2.5), (15043, -1.0))),
        ('dry-sequence-breaker "a b" c', "dry_sequence_breakers", ("a b", "c")),
        ("dry-sequence-breaker none", "dry_sequence_breakers", ()),
    ],
)
def test_a_setting_is_named_as_its_flag(settings, line, name, value):
    changed = settings()
    changed.set(line)
    assert getattr(changed.params(SamplingParams()), name) == value
    changed.set(f"{line.split()[0]} default")
    assert changed.params(SamplingParams()) == SamplingParams()


def test_most_tokens_and_stop_texts_can_be_set(settings):
    changed = settings("--stop", "END", "-n", "9")
    assert changed.stop == ("END",) and changed.max_tokens == 9
    for name in ("n", "predict", "max-tokens", "max_tokens"):
        changed.set(f"{name} 17")
        assert changed.max_tokens == 17
        changed.set("predict -1")
        assert changed.max_tokens is None
    changed.set('stop "User\'s turn:" STOP')
    assert changed.stop == ("User's turn:", "STOP")
    changed.set("stop '\\n\\n' a\\tb")
    assert changed.stop == ("\n\n", "a\tb"), "escapes are read as those of the flag"
    changed.set("stop default")
    assert changed.stop == ()


@pytest.mark.parametrize(
    "line, message",
    [
        ("temp hot", "'hot' is not a valid float"),
        ("temp -1", "-1.0 is not in the range x>=0"),
        ("top-k 1.5", "'1.5' is not a valid integer"),
        ("top-p 2", "2.0 is not in the range 0<=x<=1"),
        ("temp 1 2", "temp takes one value: found 1 2"),
        ("repeat-penalty 0", "repeat_penalty"),
        ("logit-bias 5", "ID+BIAS"),
        ("loop-guard 5", "loop_guard"),
        ("tempp 1", "there is no setting tempp: did you mean temp?"),
        ("xyz 1", "there are stop, predict, temp"),
        ("model x", "there is no setting model"),
        ('stop "open', "a quote is not closed"),
        ("stop", "needs a value"),
    ],
)
def test_a_bad_value_says_what_is_expected_and_changes_nothing(settings, line, message):
    changed = settings("--temp", "0.5")
    with pytest.raises((EdgeInferError, click.UsageError)) as refused:
        changed.set(line)
    error = refused.value
    assert message in (error.format_message() if isinstance(error, click.UsageError) else str(error))
    assert changed.params(SamplingParams()) == SamplingParams(temperature=0.5) and changed.stop == ()


def test_settings_are_listed_with_their_values(settings):
    listed = dict(line.split(None, 1) for line in settings("--temp", "0.5", "--stop", "a b").lines(SamplingParams()))
    assert listed["temp"] == "0.5" and listed["top-k"] == "40" and listed["stop"] == "'a b'"
    assert listed["predict"] == "-1 (no limit)" and listed["seed"] == "-1 (a new one each time)"
    assert len(listed) == len(SamplingParams().to_json()) + 2, "and predict and stop"


def test_what_is_set_holds_for_the_next_answer(model, tmp_path):
    with sitting_at(
        model, tmp_path, "-n", "30", "--stop", "y", main=SAYING_MAIN, SAY_TWENTY=None, SAYS="one two y xyz"
    ) as person:
        person.say("hello")
        assert "y" not in person.see("9 tokens").split("\r\n")[1]
        person.say("/set stop x")
        person.see("'x'")
        person.say("/regen")
        assert "one two y" in person.see("tok/s")
        person.say("/set stop default")
        person.say("/set predict 3")
        person.say("/regen")
        assert "one two" not in person.see("3 tokens")
        person.say("/set temp hot")
        person.see("error: Invalid value for '--temp'")
        person.say("/set")
        person.see("seed")
        person.say("/exit")
        assert person.leave() == 0


def test_stop_texts_end_a_one_shot_chat(model):
    given = ["chat", "-m", model, "--backend", "reference", "hello", "-n", "40", "-s", "1", "--json"]
    text = json.loads(CliRunner().invoke(cli.main, given).stdout)["text"]
    stop = re.search(r"[a-z ]{2,}", text)[0]
    record = json.loads(CliRunner().invoke(cli.main, [*given, "--stop", "no such", "--stop", stop]).stdout)
    assert record["text"] == text[: text.index(stop)] and record["finish_reason"] == "stop"


# ---- /model ----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_here_is_answered_with_what_to_type_in_the_chat(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3") as person:
        person.say("/model user/repo:Q8_0")
        said = person.see("Hugging Face")
        person.say("/model /nowhere")
        person.see("error: ")
        person.say("/model no-such-model")
        said += person.see("Hugging Face")
        person.say("/exit")
        assert person.leave() == 0
    words = " ".join(said.split())
    assert "/model hf:user/repo:Q8_0 fetches it" in words and "/model hf:USER/REPO[:QUANT] fetches one" in words
    assert "-hf" not in words


@pytest.mark.parametrize(
    "flags, itself, shown",
    [
        ({"hf_repo": None, "model": Path("/a/b/tiny.gguf")}, "tiny llama", "tiny.gguf"),
        ({"hf_repo": None, "model": Path("m.gguf")}, "Tiny llama", "m.gguf (Tiny llama)"),
        ({"hf_repo": None, "model": Path("qwen3:4b")}, "Qwen3 4B", "qwen3:4b"),
        ({"hf_repo": "Qwen/Qwen3-0.6B-GGUF:Q8_0", "model": None}, "Qwen3 0.6B", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ({"hf_repo": None, "model": None}, "Smollm2 135M 8k", "SmolLM2-135M.Q4_1"),
        ({"hf_repo": None, "model": None}, "", "SmolLM2-135M.Q4_1"),
    ],
)
def test_a_chat_calls_its_model_as_it_was_named(flags, itself, shown):
    engine = SimpleNamespace(path=Path("/models/SmolLM2-135M.Q4_1.gguf"), name=itself)
    assert shown_name(flags, engine) == shown


def test_another_model_goes_on_with_the_conversation(model, other, tmp_path):
    talk = tmp_path / "talk.jsonl"
    with sitting_at(model, tmp_path, "-n", "3", "-s", "1", "-sys", "be brief") as person:
        person.say("hello")
        person.see("tok/s")
        person.say("/model")
        person.see(f"({model})")
        person.say("/model /nowhere.gguf")
        person.see("error: /nowhere.gguf")
        person.say(f"/model {__file__}")
        person.see("error: ")
        person.say("/model")
        person.see(f"({model})")
        person.say(f"/model {other}")
        person.see("(the other) | reference")
        person.say("again")
        person.see("tok/s")
        person.say("/stats")
        person.see(f"({other})")
        person.say(f"/save {talk}")
        person.say("/exit")
        assert person.leave() == 0
    messages = [json.loads(line) for line in talk.read_text().splitlines()]
    with edgeinfer.load(model, backend="reference") as engine, edgeinfer.load(other, backend="reference") as second:
        conversation = engine.chat("be brief")
        list(conversation.send("hello", max_tokens=3, seed=1))
        moved = conversation.moved_to(second)
        list(moved.send("again", max_tokens=3, seed=1))
    assert [message["content"] for message in messages] == [message["content"] for message in moved.messages]


def test_a_template_that_was_given_is_that_of_the_first_model(model, other, tmp_path):
    talk = tmp_path / "talk.jsonl"
    with sitting_at(model, tmp_path, "-n", "3", "-s", "1", "--chat-template", "llama3") as person:
        person.say("hello")
        person.see("tok/s")
        person.say(f"/model {other}")
        person.see("(the other) | reference")
        person.say("again")
        person.see("tok/s")
        person.say(f"/save {talk}")
        person.say("/exit")
        assert person.leave() == 0
    messages = [json.loads(line) for line in talk.read_text().splitlines()]
    given = edgeinfer.load(model, backend="reference", chat_template="llama3")
    with given, edgeinfer.load(other, backend="reference") as second:
        conversation = given.chat()
        list(conversation.send("hello", max_tokens=3, seed=1))
        moved = conversation.moved_to(second)
        list(moved.send("again", max_tokens=3, seed=1))
    assert [message["content"] for message in messages] == [message["content"] for message in moved.messages]


def test_a_model_for_which_there_is_no_room_beside_takes_the_place_and_a_bad_one_gives_it_back(
    model, other, tmp_path, monkeypatch
):
    from edgeinfer.cli import repl as repls
    from edgeinfer.common.errors import BudgetExceeded, UnsupportedModel

    opened, notes = [], []
    open_engine = repls.open_engine

    def cramped(flags):
        if any(not engine._closed for engine in opened):
            raise BudgetExceeded("too much for two")
        if str(flags["model"]) == other and "bad" in notes:
            raise UnsupportedModel("no such architecture")
        opened.append(open_engine(flags))
        return opened[-1]

    monkeypatch.setattr(repls, "open_engine", cramped)
    monkeypatch.setattr(repls, "note", notes.append)
    with chat.make_context("chat", ["-m", model, "--backend", "reference", "-n", "3", "-s", "1"]) as context:
        with repls.Repl(cramped(context.params), None, context.params, None) as repl:
            repl._turn("hello")
            before = list(repl.conversation.messages)
            repl._turn(f"/model {other}")
            assert repl.engine.name == "the other" and repl.conversation.messages[0] == before[0]
            notes.append("bad")
            with pytest.raises(UnsupportedModel):
                repl._flags["model"] = model
                repl._turn(f"/model {other}")
            assert str(repl.engine.path) == model and repl.conversation.messages[0] == before[0]
            repl._turn("again")
            assert len(repl.conversation.messages) == 4
    assert all(engine._closed for engine in opened)


# ---- A context that is full ------------------------------------------------------------------------------------------


def test_the_oldest_exchanges_are_left_out_whole_and_the_system_message_stays(model):
    with edgeinfer.load(model, backend="reference", n_ctx=300) as engine:
        conversation = engine.chat("be brief")
        for number in range(5):
            list(conversation.send(f"question {number}", max_tokens=4, seed=1))
        messages = conversation.messages
        with pytest.raises(ContextOverflow, match="/shorten"):
            conversation.send("word " * 45)
        assert conversation.messages is messages
        n = conversation.shorten("word " * 45)
        assert n % 2 == 0 and 0 < n <= 10
        assert conversation.messages == [messages[0], *messages[1 + n :]]
        list(conversation.send("word " * 45, max_tokens=4, seed=1))


def test_no_more_is_left_out_than_needed(model):
    with edgeinfer.load(model, backend="reference", n_ctx=400) as engine:
        conversation = engine.chat()
        for number in range(6):
            list(conversation.send(f"question {number} " + "x" * 20, max_tokens=2, seed=1))
        whole, n = conversation.messages, conversation.shorten("and now?")
        most = engine.n_ctx - engine.n_ctx // 4
        question = [{"role": "user", "content": "and now?"}]
        assert conversation._n_tokens([*whole[n:], *question], True) <= most
        assert n == 2 or conversation._n_tokens([*whole[n - 2 :], *question], True) > most


def test_what_cannot_be_shortened_says_so_and_stays(model):
    with edgeinfer.load(model, backend="reference", n_ctx=100) as engine:
        conversation = engine.chat("be brief")
        for question in (None, "hello"):
            with pytest.raises(InvalidArgument, match="there is no older exchange to leave out"):
                conversation.shorten(question)
        list(conversation.send("hello", max_tokens=4, seed=1))
        messages = conversation.messages
        with pytest.raises(InvalidArgument, match="there is no older exchange"):
            conversation.shorten()
        with pytest.raises(ContextOverflow):
            conversation.shorten("word " * 100)
        assert conversation.messages is messages


def test_a_full_context_is_said_once_and_shorten_sends_the_message(model, tmp_path):
    talk = tmp_path / "talk.jsonl"
    with sitting_at(model, tmp_path, "-c", "160", "-n", "3", "-sys", "be brief") as person:
        for number in range(3):
            person.say(f"question {number}")
            person.see("3 tokens")
        person.say("long " * 18)
        shown = person.see("a larger -c keeps them")
        assert shown.count("/shorten leaves out the oldest messages and answers, and sends it") == 1
        person.say("/shorten")
        person.see("left out: the oldest ")
        person.see("3 tokens")
        person.say(f"/save {talk}")
        person.say("/exit")
        assert person.leave() == 0
    contents = [json.loads(line)["content"] for line in talk.read_text().splitlines()]
    assert contents[0] == "be brief" and contents[-2] == "long " * 18 and "question 0" not in contents


def test_an_answer_that_fills_the_context_says_what_to_do(model, tmp_path):
    with sitting_at(model, tmp_path, "-c", "120") as person:
        person.say("hello")
        person.see("cut: the context is full; /clear, /undo, or start with a larger -c")
        person.say("/undo")
        person.say("/set predict 3")
        person.say("hi")
        person.see("cut: -n is reached; /set predict N changes it")
        person.say("/set predict -1")
        person.say("again")
        person.see("cut: the context is full; /shorten leaves out the oldest messages and answers")
        person.say("/shorten")
        person.see("left out: the oldest 2 messages; 2 messages left")
        person.say("/exit")
        assert person.leave() == 0


def test_a_one_shot_that_does_not_fit_says_what_to_do(model, tmp_path):
    given = ["chat", "-m", model, "--backend", "reference", "-c", "50", "word " * 60]
    result = CliRunner().invoke(cli.main, given)
    assert result.exit_code == 1 and "shorten the message, leave out older ones (/shorten" in result.stderr


# ---- The terminal ----------------------------------------------------------------------------------------------------

MARKDOWN = (
    "# Title\n\nSome **bold words** and `code` that wrap around.\n\n- item one\n- item two\n\n```py\nx = 1\n```\n"
)


def test_an_answer_is_markdown_on_a_terminal_and_plain_where_asked(model, tmp_path):
    n = str(len(MARKDOWN))
    for flags, expected in (((), "\u2022 item one"), (("--plain",), "- item one")):
        with sitting_at(
            model, tmp_path, "-n", n, *flags, main=SAYING_MAIN, SAY_TWENTY=None, SAYS=MARKDOWN, columns=40
        ) as person:
            person.say("hello")
            shown = person.see("tok/s")
            assert expected in shown and ("**bold" in shown) == bool(flags)
            person.say("/raw")
            assert "**bold words** and `code`" in person.see("```\r\n")
            person.say("/exit")
            assert person.leave() == 0


@pytest.mark.parametrize("plain", [(), ("--plain",)])
def test_a_one_shot_at_a_terminal_is_markdown_too(model, tmp_path, plain):
    n = str(len(MARKDOWN))
    with sitting_at(
        model, tmp_path, "hello", "-n", n, *plain, main=SAYING_MAIN, SAY_TWENTY=None, SAYS=MARKDOWN
    ) as person:
        assert ("**bold" in person.see("tok/s")) == bool(plain)
        assert person.leave() == 0


@pytest.mark.parametrize("columns", [20, 40])
def test_no_note_breaks_a_word(model, tmp_path, columns):
    with sitting_at(
        model, tmp_path, "-n", "3", main=SAYING_MAIN, SAY_TWENTY=None, SAYS="yes", columns=columns
    ) as person:
        shown = person.see("leaves")
        person.say("hello")
        person.see("tok/s")
        person.say("/help")
        shown += person.see("too\r")
        person.say("/exit")
        assert person.leave() == 0
    rows = [row for row in re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", shown).split("\r\n") if ">" not in row]
    assert max(map(len, rows)) <= columns
    words = set(" ".join(rows).split())
    assert {"conversation", "messages", "sampling", "commands;"} <= words


def test_an_answer_survives_a_terminal_that_is_resized(model, tmp_path):
    words = " ".join(f"w{number}" for number in range(60))
    with sitting_at(
        model, tmp_path, "-n", str(len(words)), main=SAYING_MAIN, SAY_TWENTY=None, SAYS=words, columns=80
    ) as person:
        person.say("hello")
        shown = person.see("w5 ")
        for columns, until in ((30, "w15"), (100, "w25"), (20, "w35")):
            person.resize(columns)
            shown += person.see(until)
        shown += person.see("tok/s")
        person.see_prompt()
        person.type("half a ")
        person.see("half a")
        person.resize(50)
        person.type("line")
        person.see("line")
        person.type("\x03")
        person.say("/exit")
        assert person.leave() == 0
    assert re.findall(r"w\d+", shown) == words.split()


def test_ctrl_z_at_the_prompt_suspends_and_what_was_typed_is_there_again(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3", shell=SHELL) as person:
        person.see_prompt()
        person.type("half")
        person.see("half")
        person.type("\x1a")
        person.see("SUSPENDED")
        person.type("\n")
        person.see("half")
        person.type(" more\r")
        person.see("tok/s")
        person.say("/undo")
        person.see("dropped: half more\r")
        person.say("/exit")
        person.see("ENDED 0")


def test_ctrl_z_during_an_answer_suspends_and_it_goes_on(model, tmp_path):
    words = " ".join(f"w{number}" for number in range(60))
    suspended = tmp_path / "suspended"  # which the answer waits for: else it might have ended by then
    variables = {"SAY_TWENTY": None, "SAYS": words, "WAIT_FOR": str(suspended)}
    with sitting_at(model, tmp_path, "-n", str(len(words)), main=SAYING_MAIN, shell=SHELL, **variables) as person:
        person.say("hello")
        shown = person.see("w3 ")
        person.type("\x1a")
        shown += person.see("SUSPENDED")
        suspended.touch()
        person.type("\n")
        shown += person.see("tok/s")
        person.say("/exit")
        person.see("ENDED 0")
    assert re.findall(r"w\d+", shown) == words.split()


def test_ctrl_c_in_the_middle_of_markdown_leaves_no_style_on(model, tmp_path):
    says = "# Title **bold\n\n```py\n" + "x" * 2000
    with sitting_at(model, tmp_path, main=SAYING_MAIN, SAY_TWENTY=None, SAYS=says, NO_COLOR=None) as person:
        person.say("hello")
        shown = person.see("\x1b[36mx")
        person.type("\x03")
        shown += person.see("stopped; what there is of the answer is kept")
        person.see_prompt()
        person.type("/exit\r")
        assert person.leave() == 0
    styles = re.findall(r"\x1b\[([0-9;]*)m", shown)
    assert all(second == "0" for first, second in zip(styles, styles[1:], strict=False) if first != "0")


def test_a_wide_answer_shows_right_on_a_narrow_terminal(model, tmp_path):
    says = "漢字の長い文。" * 8 + "\n\n👨‍👩‍👧 🇩🇪 done\n"
    with sitting_at(
        model, tmp_path, "-n", str(len(says.encode())), main=SAYING_MAIN, SAY_TWENTY=None, SAYS=says, columns=20
    ) as person:
        person.say("hello")
        person.see("\x1b[?2004l")
        screen = Screen()
        screen.write(person.see("tok/s").lstrip("\r\n"))
        person.say("/exit")
        assert person.leave() == 0
    text = "".join(screen.line(row) for row in range(screen.row))
    assert says.replace("\n", "") in text
