"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.completion import Completion, Piece
from edgeinfer.logprobs import TokenLogprob
from edgeinfer.server.answering import answer
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai import common
from edgeinfer.server.dialects.openai.choices import ChoicesForm
from edgeinfer.server.dialects.openai.reading import read_completion
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.pace import Pace
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server
from edgeinfer.stream import Stream


async def complete(server: Server, exchange: Exchange) -> None:
    """Complete prompts."""
    asked, wants_usage, echo = read_completion(await exchange.json(), server.limits)
    asked.shows_prompt = server.shown.prompts if asked.shows_prompt is None else asked.shows_prompt
    common.check_model(server, asked)
    await answer(
        server, exchange, asked, lambda served, asked: TextForm(served, asked, wants_usage, echo), common.error_of
    )


class TextForm(ChoicesForm):
    """Objects text_completion."""

    def __init__(self, served: Served, asked: Asked, wants_usage: bool, echo: bool) -> None:
        super().__init__(served, asked, wants_usage, "text_completion", "cmpl")
        self._echo = echo
        self._offsets: dict[int, int] = {}  # characters of the tokens in chunks so far

    @override
    def begin(self, streams: Sequence[Stream]) -> Iterator[bytes]:
        for number in range(len(streams)) if self._echo else ():
            logprobs = self._of_prompt(number) if self._has_logprobs else None
            if self._asked.is_stream:
                yield self._chunk(number, self._prompt(number), logprobs)

    @override
    def piece(self, number: int, piece: Piece) -> Iterator[bytes]:
        if self._asked.is_stream:
            self._logprobs.setdefault(number, []).extend(piece.logprobs)
            if piece.text:
                yield self._chunk(number, piece.text, self._waiting(number))

    @override
    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        self._completions[number] = completion
        if self._asked.is_stream:
            self._logprobs.setdefault(number, []).extend(_of_end(completion))
            waiting = self._waiting(number) if self._logprobs.get(number) else None
            yield self._chunk(number, "", waiting, common.finish_of(completion))

    @override
    def progress(self, number: int, pace: Pace) -> Iterator[bytes]:
        choice = {"index": number, "text": "", "logprobs": None, "finish_reason": None}
        yield self._event(choice, prompt_progress=pace.progress())

    @override
    def whole(self) -> Any:
        choices = [self._choice(number) for number in sorted(self._completions)]
        return {**self._head, "choices": choices, "usage": self._usage(), **self._more()}

    def _choice(self, number: int) -> dict[str, Any]:
        completion = self._completions[number]
        logprobs = None
        if self._has_logprobs:
            self._offsets.pop(number, None)
            parts = [self._of_prompt(number)] if self._echo else []
            parts.append(self._of_tokens(number, [*completion.logprobs, *_of_end(completion)]))
            logprobs = {name: [each for part in parts for each in part[name]] for name in parts[0]}
        return {
            "index": number,
            "text": (self._prompt(number) if self._echo else "") + completion.text,
            "logprobs": logprobs,
            "finish_reason": common.finish_of(completion),
        }

    def _chunk(self, number: int, text: str, logprobs: Any, finish: str | None = None) -> bytes:
        return self._event({"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish})

    def _prompt(self, number: int) -> str:
        prompt = self._asked.prompts[number // self._asked.n]
        return prompt if isinstance(prompt, str) else self._engine.detokenize(prompt)

    def _waiting(self, number: int) -> dict[str, list[Any]] | None:
        return self._of_tokens(number, self._logprobs.pop(number, [])) if self._has_logprobs else None

    def _of_prompt(self, number: int) -> dict[str, list[Any]]:
        """Log probabilities of a prompt, of whose first token there is none."""
        at = number // self._asked.n
        first = common.token_text(self._engine, self._asked.prompt_tokens[at][0])
        self._offsets[number] = len(first)
        found = self._of_tokens(number, self._asked.scores[at].tokens)
        start = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [start[name], *values] for name, values in found.items()}

    def _of_tokens(self, number: int, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        n_top = self._asked.options.get("logprobs") or 0
        for each in tokens:
            text, offset = common.token_text(self._engine, each.token), self._offsets.get(number, 0)
            self._offsets[number] = offset + len(text)
            found["tokens"].append(text)
            found["token_logprobs"].append(common.logprob(each.logprob))
            top = {common.token_text(self._engine, id): common.logprob(value) for id, value in each.top[:n_top]}
            found["top_logprobs"].append({**top, text: common.logprob(each.logprob)})  # the one that was drawn always
            found["text_offset"].append(offset)
        return found


def _of_end(completion: Completion) -> list[TokenLogprob]:
    """The stop token, if one was drawn: no part of the text, but lm-eval takes the last entry for a drawn token."""
    return [] if completion.end_logprob is None else [completion.end_logprob]
