"""A conversation: messages, answers that stream, and what to do when one is stopped.

What the model is given is always made anew from the messages, so an answer depends on them alone: a conversation that
was saved and loaded goes on as if it had not been. The engine finds what of it is in the KV cache.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, Unpack

from edgeinfer.arguments import check_file_name, check_text
from edgeinfer.backends.base import Progress
from edgeinfer.completion import Completion, Piece
from edgeinfer.errors import ContextOverflow, InvalidArgument
from edgeinfer.sampling import SamplingOptions, SamplingParams
from edgeinfer.stream import Stream

if TYPE_CHECKING:
    from edgeinfer.engine import Engine

Message: TypeAlias = dict[str, str]  # "role": "system", "user" or "assistant"; "content": the text

_ROLES = ("system", "user", "assistant")


class Conversation:
    """Messages with one model. Not thread-safe.

    An exchange, a question and its answer, is kept when the answer ends or is stopped half-way; one that was refused,
    failed, or was stopped before the first character leaves the conversation as it was.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self._template = engine.template  # raises where there is none
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
        self.messages = ([] if text is None else [{"role": "system", "content": text}]) + others

    def send(
        self,
        text: str,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """The answer to a message, piece by piece. Arguments as for Engine.stream.

        Raises ContextOverflow with the counts if the conversation with this message leaves no room for an answer,
        TemplateError if the template refuses it.
        """
        question = {"role": "user", "content": check_text("the message", text)}
        return self._answer([*self.messages, question], max_tokens, stop, params, progress, **sampling)

    def regenerate(
        self,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Another answer to the last message, in the place of the one there is. Arguments and errors as for `send`.

        Raises InvalidArgument if there is no answer yet.
        """
        return self._answer(self.messages[: self._last_question() + 1], max_tokens, stop, params, progress, **sampling)

    def undo(self) -> str:
        """Drop the last exchange; gives its question. Raises InvalidArgument if there is none."""
        start = self._last_question()
        question = self.messages[start]["content"]
        self.messages = self.messages[:start]
        return question

    def clear(self) -> None:
        """Drop all messages but the system message."""
        self.messages = self.messages[:1] if self.system is not None else []

    @property
    def n_past(self) -> int:
        """Tokens of the context that the messages take; there are `engine.n_ctx`."""
        if all(message["role"] == "system" for message in self.messages):
            return 0  # a template may refuse a system message alone
        return len(self._encode(self.messages, add_generation_prompt=False))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages as JSON Lines, one {"role": ..., "content": ...} a line; whole or not at all."""
        target = Path(check_file_name("path", path))
        lines = "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in self.messages)
        with tempfile.NamedTemporaryFile("wb", dir=target.parent, delete=False) as file:
            written = Path(file.name)
            try:
                file.write(lines.encode(errors="backslashreplace"))  # lone surrogates, as JSON writes them
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                written.unlink()
                raise
        written.replace(target)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the messages by those of a file that `save` wrote. Raises InvalidArgument, OSError."""
        lines = enumerate(Path(check_file_name("path", path)).read_bytes().splitlines(), start=1)
        messages = [_read_message(line, f"{path}, line {number}") for number, line in lines if line.strip()]
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidArgument(f"{path}: a system message must be the first one")
        self.messages = messages

    def _answer(
        self,
        messages: list[Message],
        max_tokens: int | None,
        stop: str | Sequence[str],
        params: SamplingParams | None,
        progress: Progress | None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        hint = "shorten the message, drop earlier ones (/undo, /clear) or raise n_ctx (-c)"
        n_least = self._least_tokens(messages)
        if n_least >= self.engine.n_ctx:
            raise ContextOverflow(n_least + 1, self.engine.n_ctx, hint, at_least=True)
        prompt = self._encode(messages, add_generation_prompt=True)
        if len(prompt) >= self.engine.n_ctx:
            raise ContextOverflow(len(prompt) + 1, self.engine.n_ctx, hint)
        stream = self.engine.stream(
            prompt, max_tokens=max_tokens, stop=stop, params=params, progress=progress, **sampling
        )
        return Answer(self, messages, stream)

    def _encode(self, messages: list[Message], *, add_generation_prompt: bool) -> list[int]:
        return self._template.encode(self.engine.tokenizer, messages, add_generation_prompt=add_generation_prompt)

    def _least_tokens(self, messages: list[Message]) -> int:
        """A number of tokens that the prompt has at least, in little time however long the messages are."""
        least_tokens = self.engine.tokenizer.least_tokens
        if sum(least_tokens(message["content"]) for message in messages) < self.engine.n_ctx:
            return 0
        return least_tokens(self._template.render(messages))  # a template may leave out what does not fit

    def _last_question(self) -> int:
        """Index of the last question that has an answer."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant" or self.messages[-2]["role"] != "user":
            raise InvalidArgument("there is no exchange yet: send a message first")
        return len(self.messages) - 2


class Answer(Iterator[Piece]):
    """An answer while it is made: pieces, and at the end, or when it is left early, two more messages."""

    def __init__(self, conversation: Conversation, messages: list[Message], stream: Stream) -> None:
        self._conversation = conversation
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

    def close(self) -> None:
        """Stop here; what was said is kept. Does nothing if the answer has ended."""
        self._stream.close()
        self._keep()

    @property
    def completion(self) -> Completion:
        """The whole answer, once it has ended. Raises InvalidArgument before, and if it ended in an error."""
        return self._stream.completion

    @property
    def is_kept(self) -> bool:
        """Whether the exchange has become part of the conversation."""
        return self._kept

    def _keep(self) -> None:
        if self._kept or self._stream.failed or self._conversation.messages is not self._before:
            return
        completion = self._stream.completion
        if completion.finish_reason == "interrupted" and not completion.text:
            return
        self._kept = True
        # One assignment: a second Ctrl-C finds either the old messages or the new ones.
        self._conversation.messages = [*self._messages, {"role": "assistant", "content": completion.text}]

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read_message(line: bytes, place: str) -> Message:
    """A message from a line of JSON. Raises InvalidArgument, which names the place."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{place} is no JSON: {error}") from None
    if not isinstance(message, dict) or set(message) != {"role", "content"} or not isinstance(message["content"], str):
        raise InvalidArgument(f'{place} must be {{"role": ..., "content": ...}}: found {message!r:.80}')
    if message["role"] not in _ROLES:
        raise InvalidArgument(f"{place}: the role must be {', '.join(_ROLES)}: found {message['role']!r:.80}")
    return message
