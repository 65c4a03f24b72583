"""From a request in no dialect to the reply in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from edgeinfer.completion import Completion, Piece
from edgeinfer.server.asked import HEADER, Asked, read_going_on
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.pace import Pace
from edgeinfer.server.problem import problem_of
from edgeinfer.server.run import Ended, PromptRead, Run
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server
from edgeinfer.stream import Stream

_TOKENS = "x-edgeinfer-tokens"  # "1": events are followed by comments with the ids of their tokens


class Form(Protocol):
    """How a dialect writes an answer.  kind: the content type of a stream.  ping: a part without a meaning, or b""."""

    kind: str
    ping: bytes

    def begin(self, streams: Sequence[Stream]) -> Iterable[bytes]:
        """The beginning of a stream. Called for whole answers too."""
        ...

    def piece(self, number: int, piece: Piece) -> Iterable[bytes]:
        """What a piece of a text adds. Called for whole answers too."""
        ...

    def progress(self, number: int, pace: Pace) -> Iterable[bytes]:
        """How much of a prompt is read; nothing in dialects that do not tell."""
        return ()

    def ended(self, number: int, completion: Completion) -> Iterable[bytes]:
        """The end of a text. Called for whole answers too."""
        ...

    def end(self) -> Iterable[bytes]:
        """The end of a stream."""
        ...

    def whole(self) -> Any:
        """The answer, not as a stream, as a JSON value."""
        ...

    def failed(self, error: Any) -> bytes:
        """The end of a stream with an error; error: as `error` of the dialect writes it."""
        ...


async def answer(
    server: Server,
    exchange: Exchange,
    asked: Asked,
    form_of: Callable[[Served, Asked], Form],
    error_of: Callable[[Exchange, Any], Any],
) -> None:
    """Answer a request whose body was read. Raises Problem and others while nothing was sent."""
    if asked.ignored:
        exchange.extra["x-edgeinfer-ignored"] = ", ".join(sorted(asked.ignored))
    asked.go_on(read_going_on(exchange.headers.get(HEADER)))
    exchange.watch()
    is_told = asked.is_stream and asked.tells_progress and asked.going_on is None
    async with server.models.use(asked.model) as served, server.running(exchange, asked.n_texts) as run:
        form = form_of(served, asked)
        asked.tell_read = run.tell_read if is_told else None
        streams = await run.prepare(lambda: list(asked.streams(served.engine, server.limits)))
        if len(streams) == 1:
            exchange.extra["x-edgeinfer-seed"] = str(streams[0].params.seed)
        answering = _Answering(server, exchange, form, asked, streams)
        if not asked.is_stream:
            list(form.begin(streams))  # which count
            async for _ in answering.parts(run):
                pass
            answering.count_end()
            await exchange.reply_json(form.whole())
            return
        await exchange.begin(form.kind)
        try:
            begin = list(form.begin(streams))
            await _write(exchange, [] if asked.n_begun else begin)
            async for part in answering.parts(run):
                await exchange.write(part)
            await _write(exchange, form.end())
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= 500 and problem is not error:
                server.log_error(exchange, error)
            await exchange.write(form.failed(error_of(exchange, problem)))
        answering.count_end()
        await exchange.finish()


async def _write(exchange: Exchange, parts: Iterable[bytes]) -> None:
    if data := b"".join(parts):
        await exchange.write(data)


class _Answering:
    """The texts of an answer while they run, and their times."""

    def __init__(self, server: Server, exchange: Exchange, form: Form, asked: Asked, streams: Sequence[Stream]) -> None:
        self._server, self._exchange, self._form, self._asked = server, exchange, form, asked
        self._streams = streams
        self._paces = [Pace(stream.n_prompt) for stream in streams]
        self._tells = asked.tell_read is not None or asked.tells_times
        self._last: list[float | None] = [None] * asked.n_texts  # when each text brought something
        self._n_known = asked.n_begun  # tokens to come that the client has
        is_told = exchange.headers.get(_TOKENS) == "1" and asked.n_texts == 1
        self._is_told = is_told and form.kind.startswith("text/event-stream")

    async def parts(self, run: Run) -> Any:
        """Parts of the stream."""
        async for events in run.events(self._server.limits.ping_seconds):
            now = time.monotonic()
            parts: list[bytes] = [] if events else [self._form.ping]
            for number, event in events:
                if isinstance(event, Ended):
                    self._count(event.completion)
                    parts += self._form.ended(number, event.completion)
                elif isinstance(event, PromptRead):
                    parts += self._progress(number, event.share)
                else:
                    self._time(number, now)
                    pace = self._paces[number]
                    if self._tells and pace.n_read < pace.n_prompt:
                        parts += self._progress(number, 1.0)
                    pace.made(len(event.tokens))
                    parts += self._piece(number, event)
            if data := b"".join(parts):
                yield data

    def _progress(self, number: int, share: float) -> list[bytes]:
        """What the stream says of a prompt, of which so much is read: first of all, what the cache had of it."""
        pace = self._paces[number]
        parts: list[bytes] = []
        is_told = self._asked.tell_read is not None
        if number not in self._asked.paces:
            self._asked.paces[number] = pace
            sequence = self._streams[number].sequence
            pace.n_read = pace.n_cached = (sequence.n_cached if sequence is not None else 0) or 0
            parts += self._form.progress(number, pace) if is_told else ()
        n_read = pace.n_read
        pace.read(share)
        return parts + list(self._form.progress(number, pace) if is_told and pace.n_read > n_read else ())

    def _piece(self, number: int, piece: Piece) -> list[bytes]:
        """What a piece adds to the stream, and after it, where asked for, a comment with its tokens."""
        parts = list(self._form.piece(number, piece))
        if self._n_known:
            self._n_known -= len(piece.tokens)
            return []
        if self._is_told and piece.tokens:
            parts.append(b": tokens " + ",".join(map(str, piece.tokens)).encode() + b"\n\n")
        return parts

    def _time(self, number: int, now: float) -> None:
        last = self._last[number]
        if last is None:
            self._server.metrics.first_token.add(now - self._exchange.started)
        else:
            self._server.metrics.between_tokens.add(now - last)
        self._last[number] = now

    def _count(self, completion: Completion) -> None:
        self._server.metrics.count(completion)
        self._exchange.n_prompt += completion.usage.prompt_tokens
        self._exchange.n_made += completion.usage.completion_tokens

    def count_end(self) -> None:
        self._server.count_seconds(time.monotonic() - self._exchange.started)
