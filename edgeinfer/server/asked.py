"""A request in no dialect: what to answer, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from edgeinfer.server.pace import Pace
from edgeinfer.server.problem import Problem
from edgeinfer.stream import RequestOptions, Stream

HEADER = "x-edgeinfer-continue"


@dataclass(frozen=True)
class GoingOn:
    """What another replica has begun.  tokens: that the client has.  id: of that reply, None for a new one."""

    seed: int
    tokens: Sequence[int]
    id: str | None = None


def read_going_on(value: str | None) -> GoingOn | None:
    """The header of a request that goes on: "seed=7; tokens=1,2,3; id=chatcmpl-x". Raises Problem."""
    if value is None:
        return None
    parts = dict(part.strip().partition("=")[::2] for part in value.split(";"))
    try:
        if parts.keys() - {"seed", "tokens", "id"} or not all(id.isdigit() for id in parts["tokens"].split(",") if id):
            raise ValueError
        tokens = [int(id) for id in parts["tokens"].split(",") if id]
        id = parts.get("id")
        if id is not None and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", id):
            raise ValueError
        return GoingOn(int(parts["seed"]), tokens, id)
    except (KeyError, ValueError):
        raise Problem(400, f'{HEADER} must be "seed=NUMBER; tokens=ID,ID,...": found {value[:60]!r}') from None


MakeStream: TypeAlias = Callable[[RequestOptions], Stream]


@dataclass
class Asked:
    """A request.

    model: its name, None for the server's own.  messages: of a chat, None where `prompts` are completed.  options: as
    for Engine.stream.  tools: tools, tool_choice and parallel_tool_calls, as for Conversation.stream.  template:
    chat_template_kwargs, likewise.  n: samples of each.  ignored: parameters that change nothing here.
    """

    model: str | None = None
    messages: list[Message] | None = None
    prompts: Sequence[Prompt] = ()
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    tools: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    is_stream: bool = False
    prepare: Callable[[Engine], None] = lambda engine: None  # called first of all, in a thread
    going_on: GoingOn | None = None  # with an answer that another replica has begun
    ignored: list[str] = field(default_factory=list)
    ignores_ends: bool = False  # whether no token ends a text, as benchmarks ask for
    suffix: str = ""  # what comes after the text that is asked for
    has_scores: bool = False  # whether the tokens of prompts are scored too
    scores: list[Score] = field(default_factory=list)  # of the prompts but their first tokens, once there are streams
    prompt_tokens: list[Sequence[int]] = field(default_factory=list)  # of chats only where they are shown
    # What llama.cpp's clients may ask to see: the prompt with the answer, its progress, times of each part.
    shows_prompt: bool | None = None  # None: as the server does
    tells_progress: bool = False
    tells_times: bool = False
    tell_read: Callable[[int, float], None] | None = None  # called with a text and how much of its prompt is read
    paces: dict[int, Pace] = field(default_factory=dict)  # of the texts, once there is something to tell

    @property
    def n_texts(self) -> int:
        """Texts that run for it."""
        return self.n * (1 if self.messages is not None else len(self.prompts))

    @property
    def n_begun(self) -> int:
        """Tokens that the client has already."""
        return 0 if self.going_on is None else len(self.going_on.tokens)

    def go_on(self, going_on: GoingOn | None) -> None:
        """Go on with an answer that another replica has begun. Raises Problem where that cannot be."""
        if going_on is None:
            return
        if self.n_texts != 1 or not self.is_stream or self.options.get("logprobs") is not None:
            raise Problem(400, "only a stream of one text without logprobs goes on elsewhere")
        self.going_on = going_on
        self.options["seed"] = going_on.seed
        self.options["begun"] = going_on.tokens

    def _ban_ends(self, engine: Engine) -> None:
        options = cast("dict[str, Any]", self.options)
        given = options.get("logit_bias") or ()
        pairs = list(given.items()) if isinstance(given, Mapping) else list(given)
        options["logit_bias"] = [*pairs, *((id, False) for id in sorted(engine.tokenizer.stop_ids))]

    def streams(self, engine: Engine, limits: Limits) -> Iterator[Stream]:
        """Its texts: the samples of the first prompt, of the second one, and so on. Raises as Engine.stream."""
        self.prepare(engine)
        if self.ignores_ends:
            self._ban_ends(engine)
        options = cast(RequestOptions, {**self.options, "timeout": self._seconds(limits)})
        if limits.predict is not None and "max_tokens" not in options:
            options["max_tokens"] = limits.predict
        if self.messages is None:
            for at, prompt in enumerate(self.prompts):
                # In tokens, so that samples need not be cut into them again.
                tokens = self._tokens(engine, prompt)
                self.prompt_tokens.append(tokens)
                if self.has_scores:
                    self.scores += engine.score(tokens[:1], [tokens[1:]]) if len(tokens) > 1 else [Score((), True)]
                yield from self._samples(lambda given, tokens=tokens: engine.stream(tokens, **given), options, at)  # type: ignore[misc]
            return
        conversation = self._conversation(engine)
        if self.shows_prompt:
            self.prompt_tokens.append(self.prompt_of_chat(engine))
        yield from self._samples(lambda given: conversation.stream(**given, **self.tools, **self.template), options, 0)

    def _tokens(self, engine: Engine, prompt: Prompt) -> Sequence[int]:
        if self.suffix:
            return fill_in_prompt(engine, prompt if isinstance(prompt, str) else engine.detokenize(prompt), self.suffix)
        return engine.tokenize(prompt) if isinstance(prompt, str) else prompt

    def _samples(self, make: MakeStream, options: RequestOptions, at: int) -> Iterator[Stream]:
        """Those of a prompt. Sample i is what the seed + i gives alone, as with Engine.samples."""

        def told(given: dict[str, Any], number: int) -> RequestOptions:
            if self.tell_read is not None:
                given["progress"] = partial(self.tell_read, at * self.n + number)
            return cast(RequestOptions, given)

        first = make(told({**options}, 0))
        params = first.params
        yield first
        others = {name: value for name, value in options.items() if name not in SamplingOptions.__annotations__}
        for number in range(1, self.n):
            seed = seed_of_sample(cast(int, params.seed), number)
            yield make(told({**others, "params": replace(params, seed=seed)}, number))

    def prompt_of_chat(self, engine: Engine) -> list[int]:
        """Tokens of the prompt that its messages make. Raises TemplateError, InvalidArgument."""
        return self._conversation(engine).prompt(**self.tools, **self.template)

    def _conversation(self, engine: Engine) -> Conversation:
        conversation = Conversation(engine)
        conversation.messages = self.messages or []
        return conversation

    def prompt_text(self, engine: Engine, number: int) -> str:
        """The prompt of a text, with its special tokens as they are written."""
        return engine.detokenize(self.prompt_tokens[number // self.n])

    def times(self, number: int) -> dict[str, Any]:
        """What a part of a text says of its times: nothing, unless that was asked for."""
        return {"timings": self.paces[number].timings()} if self.tells_times and number in self.paces else {}

    def _seconds(self, limits: Limits) -> float:
        given = self.options.get("timeout")
        return limits.request_seconds if given is None else min(given, limits.request_seconds)


def check_seconds(value: object) -> float | None:
    """The argument `timeout` of a request. Raises InvalidArgument."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidArgument("timeout must be seconds above 0")
    return float(value)
