"""Identities that files carry: they follow from the content, where the tools of a runtime take random ones."""

from __future__ import annotations

import hashlib


def stable_uuid(*parts: bytes) -> str:
    """A random-looking identity that follows from these bytes, in the form of a UUID of version 8."""
    digest = bytearray(hashlib.sha256(b"\0".join(parts)).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x80
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
