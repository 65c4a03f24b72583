"""What a client has of a stream, so that another server can go on with it. Nothing in here knows Ray."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

CONTINUE = "x-edgeinfer-continue"
TOKENS = "x-edgeinfer-tokens"  # asks for comments with the ids of tokens

_COMMENT = b": tokens "
_ID = re.compile(rb'data: \{"id":"([A-Za-z0-9_-]{1,64})"')


class Delivered:
    """The events of a stream, from the server to the client.

    Events are kept back until the comment after them has come, which names their tokens: what the client has then is
    always what those tokens make.
    """

    def __init__(self, seed: str | None, shows_tokens: bool = False) -> None:
        """seed: of the text; None of a reply that cannot go on, which is handed on as it comes.

        shows_tokens: whether the client asked for the comments too.
        """
        self._seed, self._shows_tokens = seed, shows_tokens
        self._tokens: list[str] = []
        self._id = b""
        self._rest = b""  # of an event that has not come whole
        self._held: list[bytes] = []

    def take(self, data: bytes) -> bytes:
        """What may be handed on once this has come."""
        if self._seed is None:
            return data
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._event(event + b"\n\n") for event in events)

    def end(self) -> bytes:
        """What is handed on at the end."""
        held = b"".join(self._held) + self._rest
        self._held, self._rest = [], b""
        return held

    def going_on(self) -> Mapping[str, str]:
        """The headers of a request that asks for the rest. What the client does not have is forgotten."""
        self._held, self._rest = [], b""
        if self._seed is None:
            return {}
        id = f"; id={self._id.decode()}" if self._id and self._tokens else ""
        return {CONTINUE: f"seed={self._seed}; tokens={','.join(self._tokens)}{id}"}

    def _event(self, event: bytes) -> bytes:
        if event.startswith(_COMMENT):
            self._tokens += event[len(_COMMENT) :].decode().strip().split(",")
            held, self._held = b"".join(self._held), []
            return held + (event if self._shows_tokens else b"")
        if event.startswith(b":"):  # a sign of life
            return event
        if not self._id and (found := _ID.match(event)):
            self._id = found[1]
        self._held.append(event)
        return b""


def conversation_of(headers: Mapping[str, str], body: bytes) -> str:
    """The key by which a request finds the server that has its beginning in memory.

    The client's x-session-id; else a hash of what a conversation begins with and keeps: the messages up to the user's
    first one, or the first 1,000 characters of a prompt.
    """
    if session := headers.get("x-session-id"):
        return session
    try:
        asked = json.loads(body)
        begin = _beginning(asked) if isinstance(asked, dict) else None
    except (ValueError, RecursionError):
        begin = None
    return hashlib.sha256(json.dumps(begin).encode() if begin else body).hexdigest()


def _beginning(asked: dict[str, Any]) -> Any:
    messages = asked.get("messages") or asked.get("input")
    if isinstance(messages, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        until = roles.index("user") + 1 if "user" in roles else len(messages)
        return [asked.get("system") or asked.get("instructions"), messages[:until]]
    prompt = asked.get("prompt") or messages
    return prompt[:1000] if isinstance(prompt, (str, list)) else None
