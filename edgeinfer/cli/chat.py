"""`edgeinfer chat`: a conversation on the terminal, or one answer for a program."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.answering import finish_one_shot, write_answer
from edgeinfer.cli.constraints import constraint_given, constraint_options
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    Command,
    backend_option,
    escaped_text,
    json_option,
    max_tokens,
    model_options,
    open_engine,
    quiet_option,
    read_input,
    sampling_given,
    sampling_options,
    stop_option,
    template_options,
    text_argument,
    text_or_prompt,
    variable_option,
    warnings_as_notes,
)
from edgeinfer.cli.terminal import ProgressBar, Writer, note, reason, show
from edgeinfer.common.errors import BackendLost, InvalidArgument
from edgeinfer.common.files import state_folder

if TYPE_CHECKING:
    from edgeinfer.cli.sessions import Session
    from edgeinfer.engine import Engine
    from edgeinfer.stream import ChoiceOptions


_OPTIONS = (
    click.option("-p", "--prompt", callback=escaped_text, help="The message, same as TEXT."),
    click.option("-sys", "--system-prompt", "--system", "system", callback=escaped_text, help="System message."),
    click.option("--session", "session_name", metavar="NAME", help="Go on with the conversation of that name."),
    click.option("--resume", is_flag=True, help="Go on with the last conversation, whether it has a name or not."),
    click.option("--list-sessions", is_flag=True, help="List the conversations that have a name, and exit."),
    variable_option("--no-history", is_flag=True, help="Do not read or write the history of typed messages."),
    variable_option("--show-reasoning", is_flag=True, help="Show the reasoning before the answer."),
    variable_option("--plain", is_flag=True, help="Show answers as the model writes them, not as Markdown."),
)


def chat_options(command: Command) -> Command:
    """Adds -p, -sys, --session and the other options that only a chat has."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(cls=ModelCommand, model="model", draft="model_draft", finds=False)
@text_argument
@model_options
@template_options
@backend_option
@chat_options
@stop_option
@sampling_options
@constraint_options
@quiet_option
@json_option
def chat(
    texts: tuple[str, ...],
    prompt: str | None,
    system: str | None,
    session_name: str | None,
    resume: bool,
    list_sessions: bool,
    no_history: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Chat with a model.

    With TEXT, -p, or standard input that is not a terminal, one message is answered and the program exits. With both
    TEXT and standard input, the message is the input, an empty line, and TEXT: edgeinfer chat "Summarise this." <
    report.txt

    The answer goes to standard output, everything else to standard error.
    """
    if list_sessions:
        _list_sessions()
        return
    message = _one_message(text_or_prompt(texts, prompt))
    if as_json and message is None:
        raise click.UsageError("--json is for programs: give a message as TEXT, with -p or on standard input")
    # Refuse values out of range before a model is loaded.
    sampling_given(flags)
    constraint_given(flags)
    if flags["cache_disk"] is None:
        flags["cache_disk"] = "auto"
    with ExitStack() as opened:
        session = _session(session_name, resume, keeps=message is None and not no_history)
        if session is not None:
            opened.enter_context(session)
        _import_ahead(message is None)
        engine = opened.enter_context(open_engine(flags))
        if message is None:
            _converse(engine, session, system, None if no_history else _history_file(), flags)
        else:
            _answer_once(engine, session, system, message, as_json, flags)


def _session(name: str | None, resume: bool, keeps: bool) -> Session | None:
    """The session that is named or the last one, None for none.

    keeps: whether a conversation without a name is kept for --resume.  Raises click.UsageError, and what Session does.
    """
    if resume and name is not None:
        raise click.UsageError("--session names a conversation and --resume takes the last one: leave one out")
    if not (resume or name is not None or keeps):
        return None
    from edgeinfer.cli.sessions import Session, last_session, unnamed_session

    if resume:
        return last_session()
    return unnamed_session() if name is None else Session(name)


def _import_ahead(is_conversation: bool) -> None:
    """Import what shows answers before the model is loaded, so that the memory plan counts it."""
    if is_conversation:
        importlib.import_module("edgeinfer.cli.repl")
    if is_conversation or sys.stdout.isatty():
        from edgeinfer.cli.markdown import warm_up

        warm_up()


def _converse(
    engine: Engine, session: Session | None, system: str | None, history: Path | None, flags: dict[str, Any]
) -> None:
    """Talk with a person."""
    from edgeinfer.cli.repl import Repl

    with Repl(engine, session, flags, history) as repl:
        repl.begin(system)
        repl.run()
    if repl.is_lost:
        click.get_current_context().exit(BackendLost.exit_code)


def _answer_once(
    engine: Engine, session: Session | None, system: str | None, message: str, as_json: bool, flags: dict[str, Any]
) -> None:
    """Answer one message, in the session if there is one."""
    from edgeinfer.cli.markdown import answer_writer
    from edgeinfer.cli.thinking import Thinking

    conversation = engine.chat()
    with warnings_as_notes():  # of a model without system messages
        if session is not None:
            session.load(conversation)
        if system is not None:
            conversation.system = system
    bar = ProgressBar("reading the prompt")
    constraint = constraint_given(flags)
    request: ChoiceOptions = {**sampling_given(flags), **constraint}
    answer = conversation.send(message, max_tokens=max_tokens(flags), stop=flags["stop"], progress=bar, **request)
    is_plain = flags["plain"] or bool(constraint)
    thinking = Thinking(is_shown=flags["show_reasoning"] and not as_json, is_plain=is_plain)
    writer = Writer.to_stdout(silent=True) if as_json else answer_writer(sys.stdout, is_plain=is_plain)
    completion = write_answer(engine, answer, writer, bar, thinking)
    if session is not None:
        session.save(conversation)
    finish_one_shot(engine, completion, as_json, flags["quiet"])


def _list_sessions() -> None:
    from edgeinfer.cli.sessions import session_lines
    from edgeinfer.cli.terminal import visible

    lines = session_lines()
    for line in lines:
        show(visible(line))
    if not lines:
        note("there are no sessions yet: edgeinfer chat --session NAME begins one")


def _one_message(prompt: str | None) -> str | None:
    """The only message to answer, None for a conversation. Raises InvalidArgument if it is empty."""
    piped = read_input(beside_prompt=prompt is not None)
    if prompt is None and piped is None:
        return None
    parts = [part for part in ((piped or "").strip("\n"), prompt) if part]
    if not parts:
        raise InvalidArgument("the message is empty: give one as TEXT, with -p or on standard input")
    return "\n\n".join(parts)


def _history_file() -> Path | None:
    """The file of typed messages, readable for its owner only; None with a note if there can be none."""
    folder = state_folder()
    if folder is None:
        note("typed messages are not kept: this user has no home folder, set HOME or XDG_STATE_HOME")
        return None
    path = folder / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        note(f"typed messages are not kept: {reason(error)}")
        return None
    return path
