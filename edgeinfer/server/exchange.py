"""One request and its reply, over bare ASGI: a body that is counted, a client that may go at any time."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from edgeinfer.server import body
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LARGE = 64 << 10  # bytes of a body that a thread parses
_MOST_DROPPED = 4  # bodies that are too long are read up to so many times the limit, so that the client reads the reply
JSON = "application/json"


class ClientGone(Exception):
    """The client has closed the connection."""


class Exchange:
    """A request, and what is sent for it.

    headers: by their names in lower case.  status: of the reply, None before it.  key: the number of the request's key.
    is_gone: whether the client closed the connection.  started: by time.monotonic.  id: of the request.  extra: headers
    of the reply.  n_prompt, n_made: tokens, for the log.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive, self._send, self._limits = receive, send, limits
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=16))
        self.client = (scope.get("client") or ("?",))[0]
        self.parameters: Mapping[str, str] = {}  # of the path
        self.id = f"req-{secrets.token_hex(12)}"
        self.started = time.monotonic()
        self.status: int | None = None
        self.is_over = self.is_gone = False
        self.key: int | None = None
        self.extra: dict[str, str] = {"x-request-id": self.id}
        self.n_prompt = self.n_made = 0
        self._watcher: asyncio.Task[None] | None = None

    # ---- The request -------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """The whole body. Raises Problem where it is too long or too slow, ClientGone."""
        most = self._limits.body
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > _MOST_DROPPED * most:
            raise self._too_long({"connection": "close"})
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._read(most)
        except TimeoutError:
            raise Problem(
                408, f"the body did not come in {self._limits.body_seconds:g} s", headers={"connection": "close"}
            ) from None

    async def _read(self, most: int) -> bytes:
        parts, n = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            data = message.get("body", b"")
            n += len(data)
            if n <= most:
                parts.append(data)
            else:
                parts.clear()
            if n > _MOST_DROPPED * most:
                raise self._too_long({"connection": "close"})
            if not message.get("more_body", False):
                if n > most:
                    raise self._too_long({})
                return b"".join(parts)

    def _too_long(self, headers: Mapping[str, str]) -> Problem:
        return Problem(413, f"a body may have {self._limits.body} bytes: found more", headers=headers)

    async def json(self) -> dict[str, Any]:
        """The object of the body; of no body an empty one. Raises Problem, ClientGone."""
        data = await self.body()
        if not data.strip():
            return {}
        if len(data) < _LARGE:
            return body.parse(data, self._limits)
        return await asyncio.get_running_loop().run_in_executor(None, body.parse, data, self._limits)

    def watch(self) -> None:
        """From now on, once the body is read, a client that goes cancels the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._watcher = asyncio.create_task(self._watch(task))

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.is_over:
            self.is_gone = True
            task.cancel()

    def end(self) -> None:
        """Nothing more is read or sent."""
        if self._watcher is not None:
            self._watcher.cancel()

    # ---- The reply ---------------------------------------------------------------------------------------------------

    async def reply(self, status: int, content: bytes, kind: str, headers: Mapping[str, str] = {}) -> None:
        """Send all of a reply. kind: its content type."""
        length = {"content-length": str(len(content))}
        await self._start(status, {"content-type": kind, **length, **headers})
        self.is_over = True
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else content})

    async def reply_json(self, content: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """Send a JSON value."""
        await self.reply(status, encoded(content), JSON, headers)

    async def begin(self, kind: str) -> None:
        """Begin a reply that is sent in parts."""
        await self._start(200, {"content-type": kind, "x-accel-buffering": "no"})

    async def write(self, data: bytes) -> None:
        """Send a part; returns when there is room for another one."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End a reply that is sent in parts."""
        self.is_over = True
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        fixed = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        lines = [
            (name.encode(), value.encode("latin-1", errors="replace"))
            for name, value in {**fixed, **headers, **self.extra}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": lines})


def encoded(content: Any) -> bytes:
    """A JSON value in UTF-8; halves of surrogate pairs, which UTF-8 lacks, as escapes."""
    try:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
