"""A conversation: messages, streaming answers, and what happens when an answer is stopped.

The prompt is always rendered anew from the messages, so an answer depends on them alone: a saved and loaded
conversation continues as if it had never stopped. The engine finds the part that is in the KV cache.

Of an answer the tokens are kept, and its parts (edgeinfer.models.reasoning): the answer itself, the reasoning before
it, tool calls. A template gets the parts that it expects of an earlier answer.
"""

from __future__ import annotations

import json
import os
import stat
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from edgeinfer.asynchronous import pieces_of
from edgeinfer.common.arguments import check_callback, check_file_name, check_integer, check_text
from edgeinfer.common.errors import ContextOverflow, InvalidArgument, TemplateError, warn
from edgeinfer.common.files import check_no_model, write_whole
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.user_text import without_mark
from edgeinfer.completion import Completion, Piece
from edgeinfer.message import (
    CHANNEL_MARK,
    Message,
    answer_message,
    read_message,
    result_messages,
    texts_of,
    with_broken_marks,
    without_ids,
)
from edgeinfer.models.provenance import joined, trusted
from edgeinfer.models.reasoning import OutputParser, calls_for_template, reasoning_fields
from edgeinfer.stream import RequestOptions, Stream
from edgeinfer.template_values import NO_VALUES, TemplateOptions, TemplateValues, is_reasoning_off, values_of
from edgeinfer.tools.asking import asked_for
from edgeinfer.tools.options import NO_TOOLS, CallOptions, Given, ToolOptions, ToolUse, split_tool_options, tool_use_of
from edgeinfer.tools.reading import FormatReader, spelled
from edgeinfer.tools.running import Round, check_runnable, run_calls
from edgeinfer.tools.selection import selected, selection_of
from edgeinfer.tools.template import CallForm, TemplateTools

if TYPE_CHECKING:
    from edgeinfer.engine import Engine


class RunOptions(RequestOptions, CallOptions, TemplateOptions, total=False):
    """Keyword arguments of answers with tools: those of Engine.stream and of the template, and how tools are called."""


class PromptOptions(ToolOptions, TemplateOptions, total=False):
    """Keyword arguments that a prompt depends on: the tools, and what the template is given."""


class ChatOptions(RequestOptions, PromptOptions, total=False):
    """Keyword arguments of an answer: those of Engine.stream, the tools, and what the template is given."""


def _split_begun(messages: list[Message], is_lenient: bool = False) -> tuple[list[Message], str]:
    """(the messages that are answered, how the answer begins): an answer at the end is the beginning of the next one.

    is_lenient: messages without a question are all before the answer.  Raises InvalidArgument.
    """
    roles = [message["role"] for message in messages[-2:]]
    if roles[-1:] in (["user"], ["tool"]):
        return messages, ""
    last = messages[-1] if messages else None
    if last is not None and roles in (["user", "assistant"], ["tool", "assistant"]):
        if last["content"] and not last.get("tool_calls") and not last.get("reasoning"):
            return messages[:-1], last["content"]
    if is_lenient:
        return messages, ""
    raise InvalidArgument(
        "the last message must be the user's or a tool's, or after one the beginning of an answer, a text without "
        "reasoning and calls: there is nothing to answer"
    )


_MOST_OUTPUTS = 1024  # answers that are kept split
_Rendered = TypeVar("_Rendered")


class Conversation(OfOneProcess):
    """A conversation with one model. Not thread-safe.

    An exchange, a question and its answer, is kept when the answer ends or is stopped. If it is refused, fails, or is
    stopped before the first character, the conversation is unchanged.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self._template = engine.template  # raises where there is none
        self._format = engine.output_format
        self._tools = TemplateTools(self._template, self._format.calls)
        self._outputs: dict[tuple[str, tuple[int, ...]], OutputParser] = {}  # answers that were split again
        self.messages: list[Message] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message, None without one."""
        return self.messages[0]["content"] if self.messages[:1] and self.messages[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None:
            check_text("system", text)
        others = self.messages[1:] if self.system is not None else self.messages
        first: list[Message] = [] if text is None else [{"role": "system", "content": text}]
        self.messages = first + others
        self._tell_of_system()

    def send(self, text: str, **options: Unpack[ChatOptions]) -> Answer:
        """The answer to a message, piece by piece. Options as for Engine.stream, and the tools that the model may call.

        tools, tool_choice, parallel_tool_calls: see edgeinfer.tools.options.ToolOptions. The calls are in the pieces
        and the completion; nothing runs them here. Raises ContextOverflow with the counts if the conversation with this
        message leaves no room for an answer, TemplateError if the template refuses it.
        """
        question: Message = {"role": "user", "content": check_text("the message", text)}
        return self._answer([*self.messages, question], options)

    def send_results(self, results: Sequence[object] | Mapping[str, object], **options: Unpack[ChatOptions]) -> Answer:
        """The answer to the results of the calls of the last answer. Options and errors as for `send`.

        results: one of each call, in their order or by its id; a text as it is, anything else as JSON. Raises
        InvalidArgument if the last answer has no calls, or a result is missing.
        """
        calls = self.messages[-1].get("tool_calls", []) if self.messages else []
        if not calls:
            raise InvalidArgument("the last answer has no calls of tools: there is nothing to give results of")
        return self._answer([*self.messages, *result_messages(calls, results)], options)

    def run(
        self,
        text: str,
        tools: Sequence[Given],
        *,
        max_rounds: int = 8,
        on_round: Callable[[Round], None] | None = None,
        **options: Unpack[RunOptions],
    ) -> Completion:
        """The answer to a message, for which the model may call tools, which run here: calls, results, and so on.

        tools: Python functions; those that only describe themselves cannot run. Calls of one answer run side by side,
        each in a thread, unless parallel_tool_calls is False. The exception of a tool becomes its result, in words, and
        so do a call to a tool that there is not and arguments that do not fit.  max_rounds: most answers with calls;
        after so many the model has to answer without.  on_round: called with the calls of an answer and their results.
        tool_choice: of the first answer; then the model is free.  Otherwise as `send`; all messages are kept.
        """
        check_integer("max_rounds", max_rounds, 1)
        check_callback("on_round", on_round)
        own = tool_use_of({"tools": tools}).tools
        check_runnable(own)
        answer = self.send(text, **cast(ChatOptions, {**options, "tools": own}))
        for number in range(1, max_rounds + 1):
            for _ in answer:
                pass
            calls = answer.completion.tool_calls
            if not calls or answer.completion.finish_reason == "interrupted":
                break
            results = run_calls(calls, own, options.get("parallel_tool_calls") is not False)
            if on_round is not None:
                on_round(Round(calls, results))
            choice = "auto" if number < max_rounds else "none"
            given = {**options, "tools": own, "tool_choice": choice}
            answer = self.send_results([each.result for each in results], **cast(ChatOptions, given))
        for _ in answer:
            pass
        return answer.completion

    async def asend(self, text: str, **options: Unpack[ChatOptions]) -> Completion:
        """The whole answer, for asyncio; as `send`. Where the task is cancelled, what was said so far is kept."""
        answer = self.send(text, **options)
        async for _ in pieces_of(answer):
            pass
        return answer.completion

    def astream(self, text: str, **options: Unpack[ChatOptions]) -> AsyncIterator[Piece]:
        """As `send`, for asyncio. A task that is cancelled or leaves early ends the answer; what was said is kept."""
        return pieces_of(self.send(text, **options))

    def regenerate(self, **options: Unpack[ChatOptions]) -> Answer:
        """Another answer to the last message, in the place of the one there is. Options and errors as for `send`.

        Raises InvalidArgument if there is no answer yet.
        """
        self._last_question()
        return self._answer(self.messages[:-1], options)

    def undo(self) -> str:
        """Drop the last exchange; gives its question. Raises InvalidArgument if there is none."""
        start = self._last_question()
        question = self.messages[start]["content"]
        self.messages = self.messages[:start]
        return question

    def clear(self) -> None:
        """Drop all messages but the system message."""
        self.messages = self.messages[:1] if self.system is not None else []

    def shorten(self, question: str | None = None) -> int:
        """Drop the oldest exchanges until a quarter of the context is free; gives the number of messages dropped.

        The system message stays. question: the message that is to be sent next, for which all exchanges may be dropped;
        without one the last exchange stays, even if it fills the context. Raises InvalidArgument if no exchange can be
        dropped, ContextOverflow if the question leaves no room for an answer; then the conversation is unchanged.
        """
        first = 0 if self.system is None else 1
        asked: list[Message] = [] if question is None else [{"role": "user", "content": question}]
        starts = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        ends = starts[1:] + ([len(self.messages)] if starts and asked else [])
        if not ends:
            raise InvalidArgument("there is no older exchange to leave out: /clear, or raise n_ctx (-c)")

        def n_tokens(end: int) -> int:
            return self._n_tokens([*self.messages[:first], *self.messages[end:], *asked], bool(asked))

        most = self.engine.n_ctx - self.engine.n_ctx // 4
        at = bisect_left(ends, -most, key=lambda end: -n_tokens(end))
        end = ends[min(at, len(ends) - 1)]
        if asked and (n := n_tokens(end)) >= self.engine.n_ctx:
            raise ContextOverflow(n + 1, self.engine.n_ctx, "shorten the message or raise n_ctx (-c)")
        self.messages = [*self.messages[:first], *self.messages[end:]]
        return end - first

    def moved_to(self, engine: Engine) -> Conversation:
        """The same messages in a conversation with another model. Raises TemplateError if that has no template."""
        moved = Conversation(engine)
        moved.messages = [moved._fitted(message) for message in self.messages]
        moved._tell_of_system()
        return moved

    @property
    def n_past(self) -> int:
        """Tokens of the context that the messages take, of `engine.n_ctx`; a lower bound where they do not fit."""
        if all(message["role"] == "system" for message in self.messages):
            return 0  # a template may refuse a system message alone
        return self._n_tokens(self.messages, add_generation_prompt=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages as JSON Lines, one {"role": ..., "content": ...} a line, atomically.

        An answer has also what else a Message holds. Raises InvalidArgument, OSError.
        """
        target = check_file_name("path", path)
        check_no_model(target, "a conversation")
        lines = "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in self.messages)
        write_whole(target, lines.encode(errors="backslashreplace"))  # lone surrogates, as JSON writes them

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the messages by those of a file that `save` wrote. Raises InvalidArgument, OSError.

        Of an answer that a model with another vocabulary gave the tokens are left out.
        """
        place = check_file_name("path", path)
        if not stat.S_ISREG(place.stat().st_mode):  # what is none may have no end
            raise InvalidArgument(f"{path} is no regular file: name one that was saved")
        lines = enumerate(without_mark(place.read_bytes(), path).splitlines(), start=1)
        messages = [
            self._fitted(read_message(line, f"{path}, line {number}")) for number, line in lines if line.strip()
        ]
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidArgument(f"{path}: a system message must be the first one")
        self.messages = messages
        self._tell_of_system()

    def _tell_of_system(self) -> None:
        """Warn, once for an engine, that the model knows no system message, if there is one."""
        if self.system is not None and self._template.merges_system and not self.engine.has_told_of_system:
            self.engine.has_told_of_system = True
            warn(
                "the chat template of this model has no system message: it becomes the beginning of the first user "
                "message"
            )

    def stream(self, **options: Unpack[ChatOptions]) -> Stream:
        """The answer to the messages as they are, the last of which is a question or a result, without keeping it.

        The last message may also be the beginning of the answer, which then goes on after it. Options and errors as for
        `send`.
        """
        messages, begun = _split_begun(self.messages)
        return self._asked(messages, options, begun)[0]

    def _answer(self, messages: list[Message], options: ChatOptions) -> Answer:
        return Answer(self, messages, *self._asked(messages, options))

    def prompt(self, *, add_generation_prompt: bool = True, **options: Unpack[PromptOptions]) -> list[int]:
        """Tokens of the prompt for an answer to the messages as they are, also of one that does not fit.

        add_generation_prompt: the answer is begun, by an answer at the end of the messages if there is one.  Raises
        TemplateError, InvalidArgument.
        """
        use, values = tool_use_of(options), self._values(options)
        if not add_generation_prompt:
            return self._encode(self.messages, add_generation_prompt=False, use=use, values=values)
        messages, begun = _split_begun(self.messages, is_lenient=True)
        return self._begun_prompt(messages, use, values, begun)[0]

    def _values(self, options: Mapping[str, Any]) -> TemplateValues:
        """What the template is given beside messages and tools. Raises InvalidArgument, TemplateError."""
        return values_of(self.engine.reasoning, options.get("chat_template_kwargs"))

    def _begun_prompt(
        self, messages: list[Message], use: ToolUse, values: TemplateValues, begun: str
    ) -> tuple[list[int], str]:
        """(the prompt, what of it opens the reasoning of the answer or ""). begun: how the answer begins."""

        def encoded(following: str) -> list[int]:
            return self._encode(messages, add_generation_prompt=True, use=use, values=values, following=following)

        prompt = encoded("")
        question = messages[-1]["content"] if messages else ""
        opened = self._format.opened_by(prompt, question, lambda: self._generation_prompt(messages, use, values))
        closing = self._format.closing_of(opened) if opened and (begun or is_reasoning_off(values)) else ""
        if closing:
            opened = ""
            closing = joined([trusted(closing), trusted("\n\n")]) if begun else closing
        if closing or begun:
            prompt = encoded(joined([closing, begun]))
        return prompt, opened

    def _asked(self, messages: list[Message], options: ChatOptions, begun: str = "") -> tuple[Stream, OutputParser]:
        """The answer to the last of the messages, and what splits it. begun: how it begins."""
        values = self._values(options)
        tool_options, others = split_tool_options(options)
        others.pop("chat_template_kwargs", None)
        use = self._selected(messages, tool_use_of(tool_options), tool_options.get("tool_selection"))
        hint = "shorten the message, leave out older ones (/shorten, /undo, /clear) or raise n_ctx (-c)"
        n_least = self._least_tokens(messages, values)
        if n_least >= self.engine.n_ctx:
            raise ContextOverflow(n_least + 1, self.engine.n_ctx, hint, at_least=True)
        prompt, opened = self._begun_prompt(messages, use, values, begun)
        if len(prompt) >= self.engine.n_ctx:
            raise ContextOverflow(len(prompt) + 1, self.engine.n_ctx, hint)
        takes_bare = not ({"schema", "json"} & others.keys())  # else an answer may begin as a call does
        reader = FormatReader(self._tools.format, use.tools, takes_bare) if use.may_call else None
        output = self._format.parser(opened, reader)
        if use.tools:
            others = asked_for(self.engine, self._tools.format, use, bool(opened), others)
        return self.engine.stream(prompt, output=output, **cast(RequestOptions, others)), output

    def _selected(self, messages: list[Message], use: ToolUse, given: object) -> ToolUse:
        """The tools that are given to the model; results are of calls for the last question."""
        selection = selection_of(given)
        if selection is None or len(use.tools) <= selection.most:
            return use
        question = next((each["content"] for each in reversed(messages) if each["role"] == "user"), "")
        called = {call["name"] for each in messages for call in each.get("tool_calls", ())}
        return replace(use, tools=selected(question, use.tools, selection, {use.named, *called}))

    def _n_tokens(self, messages: list[Message], add_generation_prompt: bool) -> int:
        """Tokens of the messages; a lower bound where they do not fit, as to count all would take long."""
        values = self._values({})
        n_least = self._least_tokens(messages, values)
        if n_least > self.engine.n_ctx:
            return n_least
        return len(self._encode(messages, add_generation_prompt=add_generation_prompt, values=values))

    def _encode(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        use: ToolUse = NO_TOOLS,
        values: TemplateValues = NO_VALUES,
        following: str = "",
    ) -> list[int]:
        """Tokens of the messages, and of a text after them."""
        tools = self._tools.declarations(use)
        return self._rendered_by(
            lambda given: self._template.encode(
                self.engine.tokenizer,
                given,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                values=values,
                following=following,
            ),
            messages,
            use,
        )

    def _generation_prompt(self, messages: list[Message], use: ToolUse, values: TemplateValues) -> str:
        """What the template adds to these messages to begin an answer."""
        tools = self._tools.declarations(use)

        def rendered(is_begun: bool) -> str:
            return self._rendered_by(
                lambda given: self._template.render(given, add_generation_prompt=is_begun, tools=tools, values=values),
                messages,
                use,
            )

        whole, before = rendered(True), rendered(False)
        return whole.removeprefix(before) if whole.startswith(before) else ""

    # ---- Earlier answers ---------------------------------------------------------------------------------------------

    def _rendered_by(
        self,
        render: Callable[[list[dict[str, Any]]], _Rendered],
        messages: list[Message],
        use: ToolUse = NO_TOOLS,
    ) -> _Rendered:
        """What `render` makes of the messages in the form that the template expects.

        Templates differ in the calls of tools that they take: with arguments as an object, as JSON, or none at all; and
        some refuse an answer without text, such as one that was cut within its reasoning.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        forms: tuple[CallForm, ...] = ("object",)
        if any("tool_calls" in answer for answer in answers):
            forms = self._tools.call_forms
        elif not all(answer["content"] for answer in answers):
            forms = ("object", "text")
        refused: TemplateError | None = None
        for form in forms:
            try:
                return render(self._tools.prepared([self._for_template(message, form) for message in messages], use))
            except TemplateError as error:
                refused = refused or error
        if self._format.uses_channels and any(CHANNEL_MARK in part for answer in answers for part in texts_of(answer)):
            # gpt-oss's template takes an answer that writes about its marks for one that was not split.
            broken = [self._for_template(with_broken_marks(message), forms[0]) for message in messages]
            return render(self._tools.prepared(broken, use))
        raise cast(TemplateError, refused)

    def _for_template(self, message: Message, form: CallForm) -> dict[str, Any]:
        """A message with what templates know."""
        given: dict[str, Any] = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            return given | {key: message[key] for key in ("name", "tool_call_id") if key in message}
        reasoning, calls = message.get("reasoning", ""), message.get("tool_calls", [])
        takes_calls = form != "text" and all(call["name"] is not None for call in calls)
        is_empty = form == "text" and not message["content"]
        has_marks = bool(reasoning) and self._format.looks_for_marks
        if (has_marks and not calls) or (calls and not takes_calls) or is_empty:
            return given | {"content": self._as_emitted(message)}
        if not calls:
            return given | reasoning_fields(reasoning)
        if self._format.uses_channels and reasoning:  # its template takes one of the two beside a call
            reasoning = "\n\n".join(filter(None, (reasoning, message["content"])))
            given["content"] = ""
        elif has_marks:
            given["content"] = self._as_emitted(message, with_calls=False)
        return given | reasoning_fields(reasoning) | {"tool_calls": calls_for_template(calls, form == "json")}

    def _as_emitted(self, message: Message, with_calls: bool = True) -> str:
        """An answer with its marks; without tokens, which tell them, its texts alone."""
        output = self._parsed(message)
        if output is not None:
            return output.emitted(len(message["content"]), with_calls)
        calls = message.get("tool_calls", []) if with_calls else []
        if calls and all(call["name"] is not None for call in calls):
            return joined(filter(None, (message["content"], spelled(self._tools.format, calls))), "\n")
        return "\n".join(filter(None, (message["content"], *(call["text"] for call in calls))))

    def _parsed(self, message: Message) -> OutputParser | None:
        """The tokens of an answer, split again; None without any, or where the message does not say what they say."""
        tokens = tuple(message.get("tokens", ()))
        key = (message.get("opened", ""), tokens)
        if not tokens or max(tokens) >= self.engine.tokenizer.n_vocab or not self._format.may_open(key[0]):
            return None
        output = self._outputs.get(key)
        if output is None:
            if len(self._outputs) >= _MOST_OUTPUTS:
                self._outputs.clear()
            output = self._outputs[key] = self._read(self._format.parser(key[0]), tokens)
        wanted = {**without_ids(message), "tokens": list(tokens)}
        if answer_message(output, len(message["content"]), tokens) == wanted:
            return output
        # An answer where tools were given may be split otherwise.
        output = self._read(self._format.parser(key[0], FormatReader(self._tools.format)), tokens)
        return output if answer_message(output, len(message["content"]), tokens) == wanted else None

    def _read(self, output: OutputParser, tokens: Sequence[int]) -> OutputParser:
        for token in tokens:
            output.push(token)
        output.flush()
        return output

    def _fitted(self, message: Message) -> Message:
        """A message from a file, with the tokens only if they are of this model's vocabulary."""
        if "tokens" not in message:
            return message
        output = self._parsed(message)
        if output is not None:
            fitted = answer_message(output, len(message["content"]), message["tokens"])
            if "tool_calls" in message:
                fitted["tool_calls"] = message["tool_calls"]  # with their ids
            return fitted
        return cast(Message, {key: value for key, value in message.items() if key not in ("tokens", "opened")})

    def _least_tokens(self, messages: list[Message], values: TemplateValues) -> int:
        """A number of tokens that the prompt has at least, in little time however long the messages are."""
        from edgeinfer.models.chat_template import MAX_LENGTH

        least_tokens = self.engine.tokenizer.least_tokens
        n_least = sum(least_tokens(message["content"]) for message in messages)
        if n_least < self.engine.n_ctx:
            return 0
        if sum(len(message["content"]) for message in messages) > MAX_LENGTH:
            return n_least  # more than a template is given
        # A template may leave out what does not fit.
        return least_tokens(self._rendered_by(lambda given: self._template.render(given, values=values), messages))

    def _last_question(self) -> int:
        """Index of the last question, which has an answer, perhaps with calls of tools and their results before it."""
        questions = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        is_answered = self.messages[-1:] and self.messages[-1]["role"] == "assistant"
        if not questions or not is_answered or self.messages[-2]["role"] not in ("user", "tool"):
            raise InvalidArgument("there is no exchange yet: send a message first")
        return questions[-1]


class Answer(OfOneProcess, Iterator[Piece]):
    """An answer while it is made: pieces, and at the end, or when it is left early, two more messages."""

    def __init__(
        self, conversation: Conversation, messages: list[Message], stream: Stream, output: OutputParser
    ) -> None:
        self._conversation = conversation
        self._output = output
        self._before = conversation.messages
        self._messages = messages
        self._stream = stream
        self._kept = False

    def __next__(self) -> Piece:
        if not self._kept and self._conversation.messages is not self._before:
            raise InvalidArgument("the conversation went on without this answer: send the message again")
        try:
            piece = next(self._stream)
        except KeyboardInterrupt:
            self.close()
            raise
        if piece.finish_reason is not None:
            self._keep()
        return piece

    def cancel(self) -> None:
        """End the answer, from any thread: who reads it gets what was said, "interrupted"."""
        self._stream.cancel()

    def close(self) -> None:
        """Stop here; what was said is kept. Does nothing if the answer has ended."""
        self._stream.close()
        self._keep()

    @property
    def completion(self) -> Completion:
        """The whole answer, once it has ended. Raises InvalidArgument before, and if it ended in an error."""
        return self._stream.completion

    @property
    def parsed(self) -> Any:
        """The value of the answer to a constraint, once it has ended: see Completion. Raises as `completion`."""
        return self.completion.parsed

    @property
    def is_kept(self) -> bool:
        """Whether the exchange has become part of the conversation."""
        return self._kept

    def _keep(self) -> None:
        if self._kept or self._stream.failed or self._conversation.messages is not self._before:
            return
        completion = self._stream.completion
        if completion.finish_reason == "interrupted" and not (completion.text or completion.tool_calls):
            return
        answer = answer_message(self._output, len(completion.text), completion.tokens, completion.tool_calls)
        self._kept = True
        # One assignment: a second Ctrl-C finds either the old messages or the new ones.
        self._conversation.messages = [*self._messages, answer]

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
