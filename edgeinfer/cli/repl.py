"""A conversation on the terminal: messages, commands and answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.answering import note_calls, short_figures, stats_lines, write_answer
from edgeinfer.cli.constraints import constraint_given
from edgeinfer.cli.line_editor import line_editor, unquoted
from edgeinfer.cli.markdown import answer_writer
from edgeinfer.cli.model_names import shown_name
from edgeinfer.cli.options import open_engine, warnings_as_notes
from edgeinfer.cli.sessions import Session, session_lines
from edgeinfer.cli.settings import Settings
from edgeinfer.cli.terminal import ProgressBar, Writer, note, reason
from edgeinfer.cli.thinking import Thinking
from edgeinfer.common.errors import (
    BackendLost,
    BudgetExceeded,
    ContextOverflow,
    EdgeInferError,
    InvalidArgument,
    ModelNotFound,
)
from edgeinfer.library.references import PREFIX

if TYPE_CHECKING:
    from edgeinfer.chat import Answer
    from edgeinfer.completion import Completion
    from edgeinfer.engine import Engine
    from edgeinfer.sampling import SamplingParams

_OTHER_NAMES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit"}
_FAREWELLS = ("exit", "quit")  # as a whole message


class _TerminalLost(EdgeInferError):
    """The terminal is gone."""


class Repl:
    """Reads messages, runs commands, shows answers, until Ctrl-D or /exit. A context manager, which closes the engine.

    session: where the conversation is kept after each turn, None for nowhere.  flags: those of the command.  history:
    the file of typed messages.  is_lost: whether the last answer ended because the backend was lost.
    """

    def __init__(self, engine: Engine, session: Session | None, flags: dict[str, Any], history: Path | None) -> None:
        self.engine = engine
        self.conversation = engine.chat()
        self.is_lost = False
        self._session = session
        self._flags = flags
        self._context = click.get_current_context()
        self._settings = Settings(self._context, flags)
        self._constraint = constraint_given(flags)
        self._show_reasoning = bool(flags["show_reasoning"])
        self._writer = answer_writer(sys.stdout, is_plain=flags["plain"] or bool(self._constraint))
        self._last: Completion | None = None
        self._n_regenerated = 0
        self._unsent: str | None = None  # a message for which the context has no room
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "show this, as /? does"),
            "/regen": (self._regen, "answer the last message anew"),
            "/undo": (self._undo, "drop the last message and its answer"),
            "/clear": (self._clear, "drop all messages but the system message"),
            "/shorten": (self._shorten, "drop the oldest messages and answers, where the context is full"),
            "/system": (self._system, '[TEXT]  show or set the system message; "" removes it'),
            "/set": (self._set, "[NAME VALUE]  show or set sampling parameters, predict (most tokens) and stop"),
            "/model": (self._model, "[NAME]  show the model, or go on with another one"),
            "/reasoning": (self._reasoning, "show what the model thinks before it answers, or hide it again"),
            "/raw": (self._raw, "show the last answer as the model wrote it"),
            "/save": (self._save, "FILE  write the conversation as JSON Lines"),
            "/load": (self._load, "FILE  go on with a saved conversation"),
            "/sessions": (self._sessions, "list the conversations that have a name (--session)"),
            "/stats": (self._stats, "show the model, the context, the memory and the last answer's figures"),
            "/exit": (self._exit, "leave, as exit, quit, /bye and Ctrl-D do"),
        }
        self._lines = line_editor(history, list(self._commands))

    def __enter__(self) -> Repl:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.close()

    def begin(self, system: str | None) -> None:
        """Continue the session, and greet. system: the system message, None to keep it."""
        with warnings_as_notes():  # of a model without system messages
            if self._session is not None:
                self._session.load(self.conversation)
            if system is not None:
                self.conversation.system = system
        if self._flags["quiet"]:
            return
        self._greet()
        if self._session is not None:
            goes_on = f"goes on: {self._size()}" if self.conversation.messages else "begins"
            if not self._session.is_unnamed:
                note(f"session {self._session.name} {goes_on}")
            elif self.conversation.messages:
                note(f"the last conversation {goes_on}")
        note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")

    def _greet(self) -> None:
        engine = self.engine
        name = shown_name(self._flags, engine)
        note(f"{name} | {engine.backend}, {engine.device.n_threads} threads, context {engine.n_ctx}")

    def run(self) -> None:
        """Talk until the person leaves."""
        while True:
            try:
                self._kept_turn(self._read())
            except KeyboardInterrupt:
                note("Ctrl-D or /exit leaves")
            except EOFError:
                return
            except _TerminalLost:
                raise
            except click.UsageError as error:
                note(f"error: {error.format_message()}")
            except (EdgeInferError, OSError) as error:
                if isinstance(error, BrokenPipeError) and error.filename is None:
                    raise
                note(f"error: {reason(error)}")
                if isinstance(error, BackendLost):
                    note("the conversation is kept without this message: /save FILE writes it")

    def _read(self) -> str:
        """The typed message, without the quotes around several lines."""
        try:
            return unquoted(self._lines.prompt("> "))
        except OSError as error:  # asking once more would fail for ever
            raise _TerminalLost(f"the terminal has gone or cannot be used: {reason(error)}") from error

    def _kept_turn(self, text: str) -> None:
        """A turn, after which the session is saved if it changed."""
        before = self.conversation.messages
        try:
            self._turn(text)
        finally:
            if self._session is not None and self.conversation.messages is not before:
                self._session.save(self.conversation)

    def _turn(self, text: str) -> None:
        """Run a command, or answer a message."""
        name, _, argument = text.partition(" ")
        name = _OTHER_NAMES.get(name.rstrip(), name)
        if name in self._commands and "\n" not in name:
            with warnings_as_notes():
                self._commands[name][0](argument.strip())
        elif text.startswith("/") and "\n" not in text:
            note(f"there is no command {name}; /help lists them, and a space before the / makes it a message")
        elif text.rstrip().lower() in _FAREWELLS:
            self._exit("")
        elif text.strip():
            self._send(text)

    def _send(self, text: str) -> None:
        self._n_regenerated = 0
        self._unsent = None
        try:
            self._answer(partial(self.conversation.send, text), self._params)
        except ContextOverflow as error:
            if not any(message["role"] == "user" for message in self.conversation.messages):
                raise
            self._unsent = text
            n = f"{'at least ' if error.at_least else ''}{error.n_tokens}"
            note(
                f"the context is full: {n} tokens with this message, of {error.n_ctx}. /shorten leaves out the oldest "
                "messages and answers, and sends it; a larger -c keeps them"
            )

    @property
    def _params(self) -> SamplingParams:
        return self._settings.params(self.engine.default_params)

    def _answer(self, ask: Callable[..., Answer], params: SamplingParams) -> None:
        """Show an answer. If the backend is lost, try once more, as a session may restart its backend."""

        def show() -> None:
            bar = ProgressBar("reading the prompt")
            settings = self._settings
            with warnings_as_notes():
                limits = {"max_tokens": settings.max_tokens, "stop": settings.stop}
                self._show(ask(**limits, params=params, progress=bar, **self._constraint), bar)

        try:
            show()
        except BackendLost as error:
            self.is_lost = True
            note(f"{error}; trying once more")
            show()
        self.is_lost = False

    def _show(self, answer: Answer, bar: ProgressBar) -> None:
        thinking = Thinking(self._show_reasoning, is_plain=self._flags["plain"])
        completion = write_answer(self.engine, answer, self._writer, bar, thinking)
        self._last = completion
        note_calls(completion)
        if completion.parse_error is not None:
            note(completion.parse_error)
        if completion.finish_reason == "interrupted":
            note("stopped; what there is of the answer is kept" if answer.is_kept else "stopped; nothing is kept")
        elif completion.finish_reason == "length":
            note(self._why_cut(completion))
        elif completion.finish_reason == "repetition":
            note("stopped: the answer only repeated itself; /regen gives another one")
        if not self._flags["quiet"]:
            note(short_figures(completion))

    def _why_cut(self, completion: Completion) -> str:
        """Why an answer ended early, and what to do."""
        cut = "cut" if completion.text or completion.reasoning is None else "cut within the reasoning"
        if completion.usage.prompt_tokens + completion.usage.completion_tokens < self.engine.n_ctx:
            return f"{cut}: -n is reached; /set predict N changes it"
        if sum(message["role"] == "user" for message in self.conversation.messages) > 1:
            return f"{cut}: the context is full; /shorten leaves out the oldest messages and answers"
        return f"{cut}: the context is full; /clear, /undo, or start with a larger -c"

    # ---- Commands ----------------------------------------------------------------------------------------------------

    def _help(self, argument: str) -> None:
        for name, (_, text) in self._commands.items():
            note(f"  {name:10} {text}", hang=11)
        note('  """        begins and ends a message of several lines; Alt-Enter makes a new line too', hang=11)

    def _regen(self, argument: str) -> None:
        params = self._params
        if params.temperature == 0.0:
            note("at --temp 0 the answer is always the same")
        # The same seed would give the same answer.
        self._n_regenerated += 1
        seed = None if params.seed is None else (params.seed + self._n_regenerated) % 2**64
        self._answer(self.conversation.regenerate, replace(params, seed=seed))

    def _undo(self, argument: str) -> None:
        note(f"dropped: {self.conversation.undo():.80}")

    def _clear(self, argument: str) -> None:
        self.conversation.clear()
        note("cleared")

    def _shorten(self, argument: str) -> None:
        unsent, self._unsent = self._unsent, None
        n = self.conversation.shorten(unsent)
        note(f"left out: the oldest {n} message{'' if n == 1 else 's'}; {self._size()} left")
        if unsent is not None:
            self._send(unsent)

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = None if argument == '""' else argument
            note("the system message is removed" if argument == '""' else "the system message is set")
        else:
            note(self.conversation.system or "there is no system message")

    def _set(self, argument: str) -> None:
        if len(argument.split()) > 1:
            name = self._settings.set(argument)
            self._n_regenerated = 0
        else:
            name = argument
        for line in self._settings.lines(self.engine.default_params, name or None):
            note(line, hang=22)

    def _model(self, argument: str) -> None:
        if not argument:
            note(f"{shown_name(self._flags, self.engine)} ({self.engine.path})")
            return
        option = next(option for option in self._context.command.params if option.name == "model")
        name = option.process_value(self._context, argument)
        # A template that was given is that of the model before.
        flags = self._flags | dict.fromkeys(("hf_repo", "hf_file", "chat_template", "chat_template_file"))
        flags |= {"model": name}
        try:
            self._change_engine(open_engine(flags))
        except BudgetExceeded:
            note("there is no room for two models: the one in use is unloaded first")
            self._change_engine_in_place(flags)
        except (ModelNotFound, InvalidArgument) as error:  # which tell of the flag
            raise type(error)(str(error).replace("-hf ", f"/model {PREFIX}")) from None
        self._flags = flags
        self._greet()

    def _change_engine(self, engine: Engine) -> None:
        """Switch to another engine; if it cannot chat, the one in use stays."""
        try:
            self.conversation = self.conversation.moved_to(engine)
        except BaseException:
            engine.close()
            raise
        self.engine.close()
        self.engine, self._last = engine, None

    def _change_engine_in_place(self, flags: dict[str, Any]) -> None:
        """Unload the model, then load another one; if that fails, the first one again."""
        self.engine.close()
        try:
            self._change_engine(open_engine(flags))
        except BaseException:
            self._change_engine(open_engine(self._flags))
            raise

    def _reasoning(self, argument: str) -> None:
        self._show_reasoning = not self._show_reasoning
        note("reasoning is shown" if self._show_reasoning else "reasoning is hidden")

    def _raw(self, argument: str) -> None:
        answers = [message for message in self.conversation.messages if message["role"] == "assistant"]
        if not answers:
            raise InvalidArgument("there is no answer yet: send a message first")
        writer = Writer(sys.stdout)
        writer.write(answers[-1]["content"])
        writer.end_line()

    def _save(self, argument: str) -> None:
        self.conversation.save(_named(argument))
        note(f"saved: {self._size()}")

    def _load(self, argument: str) -> None:
        file = _named(argument)
        if self._session is not None and not self._session.is_unnamed and self.conversation.messages:
            raise InvalidArgument(
                f"this chat is the session {self._session.name} ({self._size()}), which {file} would replace: /clear "
                "it first, or load the file in a chat without --session"
            )
        self.conversation.load(file)
        note(f"loaded: {self._size()}, {self.conversation.n_past} tokens")

    def _sessions(self, argument: str) -> None:
        for line in session_lines() or ["there are no sessions yet: edgeinfer chat --session NAME begins one"]:
            note(line)

    def _size(self) -> str:
        n = len(self.conversation.messages)
        return f"{n} message{'' if n == 1 else 's'}"

    def _stats(self, argument: str) -> None:
        for line in stats_lines(self.engine, self.conversation.n_past, self._last):
            note(line, hang=9)

    def _exit(self, argument: str) -> None:
        raise EOFError


def _named(argument: str) -> str:
    if not argument:
        raise InvalidArgument("name a file")
    return argument
