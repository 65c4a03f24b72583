"""/completion and /infill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.completion import Completion, Piece
from edgeinfer.engine import Engine
from edgeinfer.logprobs import TokenLogprob
from edgeinfer.server.answering import Form, answer
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.anthropic.common import met_stop
from edgeinfer.server.dialects.llama_cpp.reading import (
    biases_of,
    chosen,
    fields_of,
    joined,
    prompts_of,
    read,
    text_of,
)
from edgeinfer.server.dialects.openai.common import EVENTS, PING, event, logprob
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.fill_in import fill_in_prompt
from edgeinfer.server.pace import Pace, timings_of
from edgeinfer.server.problem import Problem
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server
from edgeinfer.stream import Stream


def error_of(exchange: Exchange, problem: Problem) -> dict[str, Any]:
    """An error as llama-server writes it."""
    kind, message = problem.kind, problem.message
    if problem.code == "context_length_exceeded":  # which clients tell by the type, or by words of the message
        kind, message = "exceed_context_size_error", f"the request exceeds the available context size: {message}"
    return {"error": {"code": problem.status, "message": message, "type": kind, **problem.more}}


async def complete(server: Server, exchange: Exchange) -> None:
    """Complete prompts."""
    body = await exchange.json()
    if "prompt" not in body:
        raise Problem(400, "the request has no prompt", param="prompt")
    asked = read(body, server.limits)
    asked.prompts = given = prompts_of(body["prompt"], server.limits)

    def prepare(engine: Engine) -> None:
        asked.prompts = [each if isinstance(each, str) else joined(each, engine) for each in given]

    await _answer(server, exchange, asked, body, prepare)


async def infill(server: Server, exchange: Exchange) -> None:
    """Fill in what is between two texts."""
    body = await exchange.json()
    asked = read(body, server.limits, is_infill=True)
    before, after, begun = (text_of(body, name) for name in ("input_prefix", "input_suffix", "prompt"))
    extra = body.get("input_extra") or []
    if not isinstance(extra, list) or not all(isinstance(each, dict) for each in extra):
        raise Problem(400, "input_extra must be a list of objects with filename and text", param="input_extra")
    if not all(isinstance(each.get("text"), str) for each in extra):
        raise Problem(400, "each of input_extra must have a text", param="input_extra")
    files = [(text_of(each, "filename") or "file", text_of(each, "text")) for each in extra]
    asked.prompts = [before]

    def prepare(engine: Engine) -> None:
        asked.prompts = [fill_in_prompt(engine, before, after, files, begun)]

    await _answer(server, exchange, asked, body, prepare)


async def _answer(
    server: Server, exchange: Exchange, asked: Asked, body: dict[str, Any], prepare: Callable[[Engine], None]
) -> None:
    fields = fields_of(body)
    # Tokens of a whole answer come where they are asked for, as from llama-server.
    shows_tokens = asked.is_stream or body.get("return_tokens") is True

    def prepare_all(engine: Engine) -> None:
        prepare(engine)
        if body.get("logit_bias"):
            asked.options["logit_bias"] = biases_of(body["logit_bias"], engine)

    asked.prepare = prepare_all
    await answer(
        server,
        exchange,
        asked,
        lambda served, asked: CompletionForm(served, asked, fields, shows_tokens),
        error_of,
    )


class CompletionForm(Form):
    """llama-server's objects, the last of which says stop."""

    kind = EVENTS
    ping = PING

    def __init__(self, served: Served, asked: Asked, fields: list[str], shows_tokens: bool) -> None:
        """fields: of an answer; all where there are none.  shows_tokens: whether it has the ids of its tokens."""
        self._fields, self._shows_tokens = fields, shows_tokens
        self._engine, self._asked, self._id = served.engine, asked, served.id
        self._has_logprobs = asked.options.get("logprobs") is not None
        self._ends: dict[int, dict[str, Any]] = {}
        self._n_made: dict[int, int] = {}

    @override
    def begin(self, streams: Sequence[Stream]) -> Iterator[bytes]:
        return iter(())

    @override
    def piece(self, number: int, piece: Piece) -> Iterator[bytes]:
        self._n_made[number] = self._n_made.get(number, 0) + len(piece.tokens)
        if self._asked.is_stream and (piece.text or piece.tokens):
            yield event(
                {
                    "index": number,
                    "content": piece.text,
                    "tokens": list(piece.tokens),
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": self._n_made[number],
                    **self._probabilities(piece.logprobs),
                    **self._asked.times(number),
                }
            )

    @override
    def progress(self, number: int, pace: Pace) -> Iterator[bytes]:
        part = {"index": number, "content": "", "tokens": [], "stop": False, "id_slot": -1, "tokens_predicted": 0}
        yield event({**part, "prompt_progress": pace.progress(), **self._asked.times(number)})

    @override
    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        stops = self._asked.options.get("stop") or ()
        met = met_stop(self._engine, completion, [stops] if isinstance(stops, str) else stops)
        is_stop = completion.finish_reason in ("stop", "interrupted")
        whole = "" if self._asked.is_stream else completion.text
        self._ends[number] = {
            "index": number,
            "content": whole,
            "tokens": [] if self._asked.is_stream or not self._shows_tokens else list(completion.tokens),
            "id_slot": -1,
            "stop": True,
            "model": self._id,
            "tokens_predicted": completion.usage.completion_tokens,
            "tokens_evaluated": completion.usage.prompt_tokens,
            "tokens_cached": completion.usage.cached_tokens,
            "generation_settings": _settings(completion, self._asked),
            "prompt": self._prompt(number),
            "has_new_line": "\n" in completion.text,
            "truncated": self._is_full(completion),  # which is no cut of the prompt
            "stop_type": ("word" if met is not None else "eos") if is_stop else "limit",
            "stopping_word": met or "",
            "timings": timings_of(completion.usage, completion.timings),
            **({} if self._asked.is_stream else self._probabilities(completion.logprobs)),
        }
        self._ends[number] = chosen(self._ends[number], self._fields)
        if self._asked.is_stream:
            yield event(self._ends[number])

    @override
    def end(self) -> Iterator[bytes]:
        return iter(())

    @override
    def failed(self, error: Any) -> bytes:
        return event(error)

    @override
    def whole(self) -> Any:
        ends = [self._ends[number] for number in sorted(self._ends)]
        return ends[0] if len(ends) == 1 else ends

    def _is_full(self, completion: Completion) -> bool:
        """Whether a text ended because there was no more room in the context."""
        usage = completion.usage
        n_tokens = usage.prompt_tokens + usage.completion_tokens
        return completion.finish_reason == "length" and n_tokens >= self._engine.n_ctx

    def _prompt(self, number: int) -> str:
        prompt = self._asked.prompts[number // self._asked.n]
        return prompt if isinstance(prompt, str) else self._engine.detokenize(prompt)

    def _probabilities(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if not self._has_logprobs:
            return {}
        is_sampled = bool(self._asked.options.get("sampled_logprobs"))
        return {"completion_probabilities": [_probability(self._engine, each, is_sampled) for each in tokens]}


def _probability(engine: Engine, token: TokenLogprob, is_sampled: bool) -> dict[str, Any]:
    """A token with its alternatives: logarithms of the model's probabilities, or those that it was drawn with."""

    def entry(id: int, value: float) -> dict[str, Any]:
        data = engine.tokenizer.token_bytes(id)
        found = {"prob": math.exp(value)} if is_sampled else {"logprob": logprob(value)}
        return {"id": id, "token": data.decode(errors="replace"), "bytes": list(data), **found}

    tops = "top_probs" if is_sampled else "top_logprobs"
    return {**entry(token.token, token.logprob), tops: [entry(*top) for top in token.top]}


def _settings(completion: Completion, asked: Asked) -> dict[str, Any]:
    """The sampling parameters, with the seed that was drawn."""
    n_most = asked.options.get("max_tokens")
    found = asdict(completion.params) | dict.fromkeys(("n_predict", "max_tokens"), -1 if n_most is None else n_most)
    found["logit_bias"] = [
        {"token": id, "bias": bias if math.isfinite(bias) else None} for id, bias in completion.params.biases
    ]
    return found | {"dry_sequence_breakers": list(completion.params.dry_sequence_breakers)}
