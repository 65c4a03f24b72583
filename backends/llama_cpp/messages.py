"""Requests and replies between two processes: a JSON object and arrays of int32, never a pickle."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]  # (n,)
Message: TypeAlias = tuple[dict[str, Any], list[Ints]]

_SIZES = struct.Struct("<II")  # bytes of the object, bytes of the arrays
_MAX_BYTES = 1 << 30  # of either: more is no message
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # the host may have SIGPIPE end it


def send(connection: socket.socket, head: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
    """Send a message. Raises OSError where the other side is gone."""
    parts = [np.ascontiguousarray(array, dtype=np.int32).tobytes() for array in arrays]
    body = b"".join(parts)
    text = json.dumps({**head, "lengths": [len(part) // 4 for part in parts]}).encode()
    connection.sendall(_SIZES.pack(len(text), len(body)) + text + body, _NO_SIGNAL)


def receive(connection: socket.socket) -> Message:
    """Wait for a message. Raises EOFError or OSError where the other side is gone, ValueError for no message."""
    n_text, n_body = _SIZES.unpack(_receive_exactly(connection, _SIZES.size))
    if max(n_text, n_body) > _MAX_BYTES:
        raise ValueError(f"a message of {n_text} and {n_body} bytes")
    text, body = _receive_exactly(connection, n_text), _receive_exactly(connection, n_body)
    head = json.loads(text)
    if not isinstance(head, dict) or not isinstance(head.get("lengths"), list):
        raise ValueError(f"a message must be an object with lengths: found {text[:80]!r}")
    ends = np.cumsum(np.array(head.pop("lengths"), dtype=np.int64))
    return head, np.split(np.frombuffer(body, dtype=np.int32), ends[:-1]) if len(ends) else []


def _receive_exactly(connection: socket.socket, n: int) -> bytearray:
    data = bytearray(n)
    view = memoryview(data)
    while len(view):
        n_received = connection.recv_into(view)
        if not n_received:
            raise EOFError("the other side has closed the connection")
        view = view[n_received:]
    return data
