"""What one request, and all together, may take."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    body: int = 8 * MIB
    depth: int = 64  # of JSON
    containers: int = 200_000  # lists and objects of JSON, each of which takes some 60 bytes
    messages: int = 2048
    tools: int = 128
    schemas: int = 256 << 10  # of all tools, as JSON
    samples: int = 64  # texts of one request
    predict: int | None = None  # most tokens of a text that asks for no number; None for what the context has
    queue: int = 64  # texts that wait for a place, after which requests are refused
    of_key: int = 8  # requests of one key at once, where there are several keys
    connections: int = 256
    headers_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: int = 5  # of a connection between two requests
    ping_seconds: float = 15.0  # of a stream without text, after which a comment is sent
    request_seconds: float = 3600.0
    drain_seconds: float = 10.0  # from SIGTERM on, for answers that run
    unread: int = 256  # pieces of a text that its client has not read, after which the text waits
