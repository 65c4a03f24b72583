"""`edgeinfer chat`: a conversation on the terminal, or one answer for a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.answering import (
    expert_lines,
    figures,
    finish_one_shot,
    memory_lines,
    note_calls,
    sampling_line,
    speculation_table,
    write_answer,
)
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    escaped_text,
    json_option,
    max_tokens,
    model_options,
    open_engine,
    read_input,
    sampling_given,
    sampling_options,
    text_argument,
    text_or_prompt,
    variable_option,
    warnings_as_notes,
)
from edgeinfer.cli.terminal import ProgressBar, Thinking, Writer, note, reason
from edgeinfer.errors import BackendLost, EdgeInferError, InvalidArgument
from edgeinfer.files import state_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    from edgeinfer.chat import Answer, Conversation
    from edgeinfer.completion import Completion
    from edgeinfer.sampling import SamplingParams


@click.command(cls=ModelCommand, model="model", draft="model_draft", finds=False)
@text_argument
@model_options
@click.option("-p", "--prompt", callback=escaped_text, help="The message, same as TEXT.")
@click.option("-sys", "--system", callback=escaped_text, help="System message.")
@variable_option("--no-history", is_flag=True, help="Do not read or write the history of typed lines.")
@variable_option("--show-reasoning", is_flag=True, help="Show the reasoning before the answer.")
@sampling_options
@json_option
def chat(
    texts: tuple[str, ...],
    prompt: str | None,
    system: str | None,
    no_history: bool,
    show_reasoning: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Chat with a model.

    With TEXT, -p, or standard input that is not a terminal, one message is answered and the program exits. With both
    TEXT and standard input, the message is the input, an empty line, and TEXT: edgeinfer chat "Summarise this." <
    report.txt

    The answer goes to standard output, everything else to standard error.
    """
    message = _one_message(text_or_prompt(texts, prompt))
    if as_json and message is None:
        raise click.UsageError("--json is for programs: give a message as TEXT, with -p or on standard input")
    sampling = sampling_given(flags)
    with open_engine(flags) as engine:
        with warnings_as_notes():  # of a model without system messages
            conversation = engine.chat(system)
        params = engine.default_params.changed(sampling)
        if message is None:
            history = None if no_history else _history_file()
            repl = Repl(conversation, params, max_tokens(flags), history, show_reasoning)
            repl.run()
            if repl.is_lost:
                click.get_current_context().exit(BackendLost.exit_code)
            return
        bar = ProgressBar("reading the prompt")
        answer = conversation.send(message, max_tokens=max_tokens(flags), params=params, progress=bar)
        thinking = Thinking(is_shown=show_reasoning and not as_json)
        completion = write_answer(engine, answer, Writer.to_stdout(silent=as_json), bar, thinking)
        finish_one_shot(engine, completion, as_json)


def _one_message(prompt: str | None) -> str | None:
    """The message to answer before leaving, None for a conversation. Raises InvalidArgument if it is empty."""
    piped = read_input(beside_prompt=prompt is not None)
    if prompt is None and piped is None:
        return None
    parts = [part for part in ((piped or "").strip("\n"), prompt) if part]
    if not parts:
        raise InvalidArgument("the message is empty: give one as TEXT, with -p or on standard input")
    return "\n\n".join(parts)


def _history_file() -> Path | None:
    """Where typed lines are kept, readable for their owner only; None with a note where that cannot be."""
    folder = state_folder()
    if folder is None:
        note("typed lines are not kept: this user has no home folder, set HOME or XDG_STATE_HOME")
        return None
    path = folder / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        note(f"typed lines are not kept: {reason(error)}")
        return None
    return path


class _TerminalLost(EdgeInferError):
    """There is nobody to talk with any more."""


class Repl:
    """Reads lines, runs commands, shows answers, until Ctrl-D or /exit.

    is_lost: whether the last answer ended because the backend was lost.
    """

    def __init__(
        self,
        conversation: Conversation,
        params: SamplingParams,
        max_tokens: int | None,
        history: Path | None,
        show_reasoning: bool,
    ) -> None:
        self.conversation = conversation
        self.engine = conversation.engine
        self.params = params
        self.max_tokens = max_tokens
        self.is_lost = False
        self.show_reasoning = show_reasoning
        self._writer = Writer(sys.stdout)
        self._last: Completion | None = None
        self._n_regenerated = 0
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "show this"),
            "/regen": (self._regen, "answer the last message anew"),
            "/undo": (self._undo, "drop the last message and its answer"),
            "/clear": (self._clear, "drop all messages but the system message"),
            "/system": (self._system, '[TEXT]  show or set the system message; "" removes it'),
            "/reasoning": (self._reasoning, "show what the model thinks before it answers, or hide it again"),
            "/save": (self._save, "FILE  write the conversation as JSON Lines"),
            "/load": (self._load, "FILE  go on with a saved conversation"),
            "/stats": (self._stats, "show the model, the context, the memory and the last answer's figures"),
            "/exit": (self._exit, "leave, as Ctrl-D does"),
        }
        self._lines = _line_reader(history, list(self._commands))

    def run(self) -> None:
        """Talk until the person leaves."""
        engine = self.engine
        note(
            f"{engine.name} | {engine.backend}, {engine.device.n_threads} threads, context {engine.n_ctx}\n"
            "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves"
        )
        while True:
            try:
                self._turn(self._read())
            except KeyboardInterrupt:
                note("Ctrl-D or /exit leaves")
            except EOFError:
                return
            except _TerminalLost:
                raise
            except (EdgeInferError, OSError) as error:
                if isinstance(error, BrokenPipeError) and error.filename is None:
                    raise
                note(f"error: {reason(error)}")
                if isinstance(error, BackendLost):
                    note("the conversation is kept without this message: /save FILE writes it")

    def _read(self) -> str:
        '''A line, or the lines between """ and """.'''
        text = self._line("> ")
        if not text.startswith('"""'):
            return text
        text = text.removeprefix('"""')
        while not text.rstrip().endswith('"""'):
            text += "\n" + self._line(". ")
        return text.rstrip().removesuffix('"""').strip("\n")

    def _line(self, prompt: str) -> str:
        try:
            return self._lines.prompt(prompt)
        except OSError as error:  # asking once more would fail for ever
            raise _TerminalLost(f"the terminal has gone or cannot be used: {reason(error)}") from error

    def _turn(self, text: str) -> None:
        """Run a command, or answer a message."""
        name, _, argument = text.partition(" ")
        if name in self._commands and "\n" not in name:
            with warnings_as_notes():
                self._commands[name][0](argument.strip())
        elif text.startswith("/") and "\n" not in text:
            note(f"there is no command {name}; /help lists them, and a space before the / makes it a message")
        elif text.strip():
            self._n_regenerated = 0
            self._answer(partial(self.conversation.send, text), self.params)

    def _answer(self, ask: Callable[..., Answer], params: SamplingParams) -> None:
        """Show an answer. Where the backend is lost, ask for it once more: a session may start its backend again."""

        def show() -> None:
            bar = ProgressBar("reading the prompt")
            with warnings_as_notes():
                self._show(ask(max_tokens=self.max_tokens, params=params, progress=bar), bar)

        try:
            show()
        except BackendLost as error:
            self.is_lost = True
            note(f"{error}; trying once more")
            show()
        self.is_lost = False

    def _show(self, answer: Answer, bar: ProgressBar) -> None:
        completion = write_answer(self.engine, answer, self._writer, bar, Thinking(self.show_reasoning))
        self._last = completion
        note_calls(completion)
        if completion.finish_reason == "interrupted":
            note("stopped; what there is of the answer is kept" if answer.is_kept else "stopped; nothing is kept")
        elif completion.finish_reason == "length":
            full = completion.usage.prompt_tokens + completion.usage.completion_tokens >= self.engine.n_ctx
            cut = "cut" if completion.text or completion.reasoning is None else "cut within the reasoning"
            note(
                f"{cut}: {'the context is full; /clear, /undo, or start with a larger -c' if full else '-n is reached'}"
            )
        elif completion.finish_reason == "repetition":
            note("stopped: the answer only repeated itself; /regen gives another one")
        note(figures(self.engine, completion))

    # ---- Commands ----------------------------------------------------------------------------------------------------

    def _help(self, argument: str) -> None:
        for name, (_, text) in self._commands.items():
            note(f"  {name:10} {text}")
        note('  """        begins and ends a message of several lines; Alt-Enter makes a new line too')

    def _regen(self, argument: str) -> None:
        if self.params.temperature == 0.0:
            note("at --temp 0 the answer is always the same")
        # The same seed would say the same again.
        self._n_regenerated += 1
        seed = None if self.params.seed is None else (self.params.seed + self._n_regenerated) % 2**64
        self._answer(self.conversation.regenerate, replace(self.params, seed=seed))

    def _undo(self, argument: str) -> None:
        note(f"dropped: {self.conversation.undo():.80}")

    def _clear(self, argument: str) -> None:
        self.conversation.clear()
        note("cleared")

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = None if argument == '""' else argument
            note("the system message is removed" if argument == '""' else "the system message is set")
        else:
            note(self.conversation.system or "there is no system message")

    def _reasoning(self, argument: str) -> None:
        self.show_reasoning = not self.show_reasoning
        note("reasoning is shown" if self.show_reasoning else "reasoning is hidden")

    def _save(self, argument: str) -> None:
        self.conversation.save(_named(argument))
        note(f"saved: {self._size()}")

    def _load(self, argument: str) -> None:
        self.conversation.load(_named(argument))
        note(f"loaded: {self._size()}, {self.conversation.n_past} tokens")

    def _size(self) -> str:
        n = len(self.conversation.messages)
        return f"{n} message{'' if n == 1 else 's'}"

    def _stats(self, argument: str) -> None:
        from edgeinfer.arguments import human_bytes

        note(f"model    {self.engine.name} ({self.engine.path})")
        note(f"engine   {self.engine.backend}, {self.engine.device.n_threads} threads")
        if (tuning := getattr(self.engine.session, "tuning", None)) is not None:
            note(f"weights  {tuning}")
        note(f"context  {self.conversation.n_past} of {self.engine.n_ctx} tokens")
        for line in memory_lines(self.engine.memory):
            note(line)
        if (n_bytes := self.engine.memory_plan.expert_cache) is not None:
            experts = self.engine.experts
            share = f", {experts.share:.0%} of all experts" if experts is not None else ""
            note(f"experts  cache of {human_bytes(n_bytes)}{share}")
        if (tier := self.engine.expert_tier) is not None:
            note(f"experts  {tier.describe()}")
        speculation = None if self._last is None else self._last.timings.speculation
        for name, placed in ({} if self.engine.speculator is None else self.engine.speculator.placements).items():
            is_idle = speculation is not None and name not in {**speculation.by_drafter, **speculation.dropped}
            why = "; not asked in the last answer, where it promised less than it would have taken" if is_idle else ""
            note(f"drafts   {name} on {placed.device}{why}")
        if self._last is not None:
            note(f"last     {figures(self.engine, self._last)} seed {self._last.params.seed}")
            for line in expert_lines(self._last.timings, self._last.usage.completion_tokens):
                note(line)
            note(f"sampling {sampling_line(self._last.params)}")
            for line in [] if speculation is None else speculation_table(speculation):
                note(line)

    def _exit(self, argument: str) -> None:
        raise EOFError


def _named(argument: str) -> str:
    if not argument:
        raise InvalidArgument("name a file")
    return argument


def _file_history(path: Path) -> FileHistory:
    """Typed lines in a file. One that cannot be written or read when its time comes is not kept, and stops nothing."""
    from prompt_toolkit.history import FileHistory

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string.encode(errors="replace").decode())  # what was typed may be no UTF-8

        def load_history_strings(self) -> Iterable[str]:
            try:
                yield from super().load_history_strings()
            except OSError:
                return

    return History(str(path))


def _line_reader(history: Path | None, commands: list[str]) -> PromptSession[str]:
    """Line editing on the terminal; prompts go to stderr, as stdout is the answers'. Tab completes commands."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import ColorDepth, create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=InMemoryHistory() if history is None else _file_history(history),
        output=create_output(stdout=sys.stderr),
        color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
