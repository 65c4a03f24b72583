"""The file that keeps earlier answers for drafts: a line of JSON that describes it, and the tokens as 32-bit integers.

Whoever can read the file can read the answers.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import warn
from edgeinfer.common.files import write_whole

_KIND, _VERSION = "edgeinfer answers", 1
_MOST_BYTES = 1 << 20  # of a file that is read: some eight times what is written
_MOST_HEADER = 4096


class AnswerFile:
    """A file of answers. mark: identifies their tokenizer, which has n_vocab tokens."""

    def __init__(self, path: Path, mark: str, n_vocab: int) -> None:
        self._path, self._mark, self._n_vocab = path, mark, n_vocab
        self._may_be_replaced = True

    def read(self) -> list[list[int]]:
        """The answers. Where the file cannot be used, there are none, and a warning says why.

        A file that does not exist yet has none. A damaged file is replaced later; a file of another kind is not.
        """
        path = self._path
        try:
            return list(_answers(_tokens(path, self._mark, self._n_vocab))) if path.exists() else []
        except _Damaged as error:
            warn(f"{path} {error}; drafts begin without earlier answers, and it will be replaced")
        except ValueError as error:
            warn(f"{path} {error}; drafts begin without earlier answers, and none are kept: name another file")
            self._may_be_replaced = False
        except OSError as error:
            warn(f"earlier answers could not be read: {error}; none are kept")
            self._may_be_replaced = False
        return []

    def write(self, text: Sequence[int]) -> None:
        """Replace the file by answers, each followed by a negative number. Warns where that fails."""
        if not self._may_be_replaced:
            return
        tokens = _little_endian(array("i", text)).tobytes()
        header = {
            "kind": _KIND,
            "version": _VERSION,
            "tokenizer": self._mark,
            "tokens": len(text),
            "crc32": zlib.crc32(tokens),
        }
        try:
            write_whole(self._path, json.dumps(header).encode() + b"\n" + tokens)
        except OSError as error:
            warn(f"the answers for drafts could not be kept: {error}")


class _Damaged(ValueError):
    """A file of answers that differs from what was written."""


def _tokens(path: Path, mark: str, n_vocab: int) -> array[int]:
    """The tokens of a file. Raises _Damaged or ValueError, which say what is wrong with it, and OSError."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"is larger than any file of answers for drafts, {human_bytes(_MOST_BYTES)}")
    with path.open("rb") as file:
        line = file.readline(_MOST_HEADER)
        data = file.read(_MOST_BYTES)
    try:
        header: Any = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("kind") != _KIND:
        raise ValueError("is no file of answers for drafts")
    if header.get("version") != _VERSION:
        raise ValueError(f"has version {header.get('version')!r} of this kind of file: version {_VERSION} can be read")
    if header.get("tokenizer") != mark:
        raise ValueError("has answers of a model with another tokenizer")
    if header.get("tokens") != len(data) / 4 or header.get("crc32") != zlib.crc32(data):
        raise _Damaged("is damaged: length or checksum are not as written")
    tokens = _little_endian(array("i", data))
    if len(tokens) and not -1 <= min(tokens) <= max(tokens) < n_vocab:
        raise _Damaged(f"is damaged: its tokens must be in -1..{n_vocab - 1}")
    return tokens


def _answers(tokens: Sequence[int]) -> Iterator[list[int]]:
    answer: list[int] = []
    for token in tokens:
        if token < 0:
            yield answer
            answer = []
        else:
            answer.append(token)


def _little_endian(tokens: array[int]) -> array[int]:
    """Tokens with the order of bytes of files."""
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
