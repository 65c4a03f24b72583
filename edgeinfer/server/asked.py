"""A request in no dialect: what to answer, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from edgeinfer.chat import Conversation
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.engine import Engine, Prompt
from edgeinfer.logprobs import Score
from edgeinfer.many import seed_of_sample
from edgeinfer.message import Message
from edgeinfer.sampling import SamplingOptions
from edgeinfer.server.fill_in import fill_in_prompt
from edgeinfer.server.limits import Limits
from edgeinfer.stream import RequestOptions, Stream

MakeStream: TypeAlias = Callable[[RequestOptions], Stream]


@dataclass
class Asked:
    """A request.

    model: its name, None for the server's own.  messages: of a chat, None where `prompts` are completed.  options: as
    for Engine.stream.  tools: tools, tool_choice and parallel_tool_calls, as for Conversation.stream.  n: samples of
    each.  ignored: parameters that change nothing here.
    """

    model: str | None = None
    messages: list[Message] | None = None
    prompts: Sequence[Prompt] = ()
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    tools: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    is_stream: bool = False
    ignored: list[str] = field(default_factory=list)
    suffix: str = ""  # what comes after the text that is asked for
    has_scores: bool = False  # whether the tokens of prompts are scored too
    scores: list[Score] = field(default_factory=list)  # of the prompts but their first tokens, once there are streams
    prompt_tokens: list[Sequence[int]] = field(default_factory=list)

    @property
    def n_texts(self) -> int:
        """Texts that run for it."""
        return self.n * (1 if self.messages is not None else len(self.prompts))

    def streams(self, engine: Engine, limits: Limits) -> Iterator[Stream]:
        """Its texts: the samples of the first prompt, of the second one, and so on. Raises as Engine.stream."""
        options = cast(RequestOptions, {**self.options, "timeout": self._seconds(limits)})
        if self.messages is None:
            for prompt in self.prompts:
                # In tokens, so that samples need not be cut into them again.
                tokens = self._tokens(engine, prompt)
                self.prompt_tokens.append(tokens)
                if self.has_scores:
                    self.scores += engine.score(tokens[:1], [tokens[1:]]) if len(tokens) > 1 else [Score((), True)]
                yield from _samples(lambda given, tokens=tokens: engine.stream(tokens, **given), options, self.n)  # type: ignore[misc]
            return
        conversation = Conversation(engine)
        conversation.messages = self.messages
        yield from _samples(lambda given: conversation.stream(**given, **self.tools), options, self.n)

    def _tokens(self, engine: Engine, prompt: Prompt) -> Sequence[int]:
        if self.suffix:
            return fill_in_prompt(engine, prompt if isinstance(prompt, str) else engine.detokenize(prompt), self.suffix)
        return engine.tokenize(prompt) if isinstance(prompt, str) else prompt

    def _seconds(self, limits: Limits) -> float:
        given = self.options.get("timeout")
        return limits.request_seconds if given is None else min(given, limits.request_seconds)


def _samples(make: MakeStream, options: RequestOptions, n: int) -> Iterator[Stream]:
    """Sample i is what the seed + i gives alone, as with Engine.samples."""
    first = make(options)
    params = first.params
    yield first
    others = {name: value for name, value in options.items() if name not in SamplingOptions.__annotations__}
    for number in range(1, n):
        given = {**others, "params": replace(params, seed=seed_of_sample(cast(int, params.seed), number))}
        yield make(cast(RequestOptions, given))


def check_seconds(value: object) -> float | None:
    """The argument `timeout` of a request. Raises InvalidArgument."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidArgument("timeout must be seconds above 0")
    return float(value)
