"""Blocks: the files of segments. Their names are hashes of all that their bytes depend on; their bytes have a checksum.

A block is a header and the bytes of one segment in the layers of one kind (edgeinfer.backends.base.Segments). The key
of a segment is the hash of the key of the one before it and its own tokens; the first one follows a hash of the model
and the form of the cache. So a text finds the blocks of its beginning, and no others, whoever wrote them.

A tail is the block of a last segment that is not whole, and has its tokens with it: a text that begins as another one
may go on differently in its midst. Its key is a hash of that of the segment before it, so that there is one.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgeinfer.backends.base import SegmentFile, Segments
from edgeinfer.context_cache.folder import Kept

KEY_BYTES = 32
_MAGIC = b"edgeinfer context"
_VERSION = 1
_NAME_BYTES, _TYPE_BYTES = 64, 16
_MOST_TOKENS = 128  # of a tail
_TAIL = b"tail"
# magic, version, kind, number of the segment, tokens of it, bytes, key, name of the model, type of the cache, tokens of
# a tail
_FIELDS = struct.Struct(f"<20sIiIIQ{KEY_BYTES}s{_NAME_BYTES}s{_TYPE_BYTES}s{4 * _MOST_TOKENS}s")
_SUM = struct.Struct("<Q")  # at the end of the header: of the header before it, and then of the bytes
HEADER_BYTES = _FIELDS.size + _SUM.size


@dataclass(frozen=True)
class Block:
    """A block that there is or may be.

    key: of its segment.  number: of the segment in its text.  n_bytes: without the header.  model, cache_type: said to
    people only; what the bytes depend on is in the key.
    """

    key: bytes
    kind: int
    number: int
    n_tokens: int
    n_bytes: int
    model: str
    cache_type: str
    tokens: tuple[int, ...] = ()  # of a tail

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.key.hex()}-{self.kind}"

    @property
    def file_bytes(self) -> int:
        """Of the file."""
        return HEADER_BYTES + self.n_bytes

    def header(self) -> bytes:
        """The header without the checksum."""
        names = self.model.encode()[:_NAME_BYTES], self.cache_type.encode()[:_TYPE_BYTES]
        numbers = _VERSION, self.kind, self.number, self.n_tokens, self.n_bytes
        return _FIELDS.pack(_MAGIC, *numbers, self.key, *names, np.asarray(self.tokens, "<i4").tobytes())


def first_key(*facts: object) -> bytes:
    """What the key of the first segment of a text follows: a hash of all that the bytes depend on beside tokens."""
    return hashlib.blake2b(repr((_VERSION, *facts)).encode(), digest_size=KEY_BYTES).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a segment of these tokens after the one with a key."""
    return hashlib.blake2b(key + np.asarray(tokens, "<i4").tobytes(), digest_size=KEY_BYTES).digest()


def tail_key(key: bytes) -> bytes:
    """The key of a tail after the segment with a key."""
    return hashlib.blake2b(key + _TAIL, digest_size=KEY_BYTES).digest()


def write_header(block: Block, sum_of_bytes: int) -> bytes:
    """The whole header, with the checksum of what follows it."""
    return block.header() + _SUM.pack(sum_of_bytes)


def segment_file(
    block: Block, descriptor: int, path: Path, segments: Segments
) -> tuple[SegmentFile, tuple[int, ...]] | None:
    """Where the bytes of a block are in its open file, and of a tail its tokens; None for another or a damaged file."""
    try:
        if os.fstat(descriptor).st_size != block.file_bytes:
            return None
        data = os.pread(descriptor, HEADER_BYTES, 0)
    except OSError:
        return None
    if len(data) != HEADER_BYTES or (found := _read_header(data)) is None:
        return None
    # The model's name may be another: that of the same content elsewhere. A tail is what it says.
    same = replace(found, model=block.model, n_tokens=block.n_tokens, tokens=()) if found.tokens else found
    if replace(same, model=block.model) != block:
        return None
    (expected,) = _SUM.unpack_from(data, _FIELDS.size)
    before = segments.byte_sum(data[: _FIELDS.size], 0)
    return SegmentFile(block.kind, descriptor, path, HEADER_BYTES, before, expected), found.tokens


def block_of(folder: Path, kept: Kept) -> Block | None:
    """What the header of a file says that it is; None where it says nothing. Raises OSError."""
    with (folder / kept.name).open("rb") as file:
        data = file.read(HEADER_BYTES)
    found = _read_header(data) if len(data) == HEADER_BYTES else None
    return found if found is not None and found.name == kept.name and found.file_bytes == kept.n_bytes else None


def _read_header(data: bytes) -> Block | None:
    magic, version, kind, number, n_tokens, n_bytes, key, model, cache_type, tail = _FIELDS.unpack_from(data)
    if magic.rstrip(b"\0") != _MAGIC or version != _VERSION:
        return None
    model, cache_type = (text.rstrip(b"\0").decode(errors="replace") for text in (model, cache_type))
    tokens = np.frombuffer(tail, "<i4")[:n_tokens].tolist() if n_tokens < _MOST_TOKENS else []
    return Block(key, kind, number, n_tokens, n_bytes, model, cache_type, tuple(tokens))
