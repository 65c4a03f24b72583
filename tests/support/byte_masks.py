"""Masks over a vocabulary of bytes: what a grammar lets through, however a model would spell it."""

from __future__ import annotations

from typing import Any

from edgeinfer.constraints.library import open_vocabulary

_END = 256


def byte_vocabulary() -> Any:
    """The 256 bytes and an end."""
    tokens = [bytes([byte]) for byte in range(256)]
    return open_vocabulary([*tokens, b"<end>"], [_END], [_END], lambda text: list(text.encode()))


def lets_through(matcher: Any, text: str) -> bool:
    """Whether each byte of a text, and its end, is in the mask of its place."""
    for byte in [*text.encode(errors="surrogatepass"), _END]:
        bits = matcher.compute_bitmask()
        if not bits[byte >> 3] >> (byte & 7) & 1:
            return False
        if byte != _END and not matcher.consume_token(byte):
            return False
    return True
