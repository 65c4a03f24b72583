"""The file of answers of a batch: a line for each, in the order in which they ended, with the key of its request.

A run that was killed leaves whole lines and at most a torn one at the end. The next run cuts that, and skips the
requests whose keys are there. A key is the number of the line in the input and a hash of the request and its options.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edgeinfer.batch.lines import MOST_BYTES, Line
from edgeinfer.batch.records import KEY_PREFIX
from edgeinfer.common.errors import InvalidArgument

_BEGIN = b'{"id": '  # of every line
_MOST = (1 << 64) - 1


class Keys:
    """Makes keys of lines.  options: those of the run, which are a part of each request."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = json.dumps(options, sort_keys=True, default=str).encode()

    def digest(self, line: Line) -> int:
        """Of a request, 64 bits."""
        data = b"\n".join((self._options, b"" if line.data is None else line.data))
        return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")

    def key(self, line: Line) -> str:
        """The number of a line and its digest."""
        return f"{line.number}-{self.digest(line):016x}"


class Output:
    """A file to which answers are appended. A context manager; one process at a time has it.

    n_errors: of the answers of earlier runs, those that are errors.
    Raises InvalidArgument where the file is of something else or another process writes it, OSError.
    """

    def __init__(self, path: Path, anew: bool = False) -> None:
        """anew: drop what is there."""
        self.path = path
        self._numbers, self._digests = array("Q"), array("Q")
        self.n_errors = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            if self._is_regular:
                self._lock()
                if anew:
                    os.ftruncate(self._file, 0)
                self._length = self._read()
        except BaseException:
            os.close(self._file)
            raise
        numbers = np.array(self._numbers, dtype=np.uint64)
        order = np.argsort(numbers, kind="stable")
        self._sorted = numbers[order], np.array(self._digests, dtype=np.uint64)[order]

    def __len__(self) -> int:
        """Requests that earlier runs answered."""
        return len(self._numbers)

    def n_lines(self) -> int | None:
        """Whole lines that are there now, of this run too; None where the file cannot be read.

        Asked of the file: a signal may come when a line is written and not counted yet.
        """
        if not self._is_regular:
            return None
        with open(self._file, "rb", closefd=False) as file:
            file.seek(self._length)
            return len(self) + sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))

    def holds(self, line: Line, digest: int) -> bool:
        """Whether an earlier run answered a line. Raises InvalidArgument if that was another request."""
        numbers, digests = self._sorted
        place = int(np.searchsorted(numbers, np.uint64(line.number)))
        if place == len(numbers) or int(numbers[place]) != line.number:
            return False
        if int(digests[place]) != digest:
            raise self.other(f"that of line {line.number} was another request, or had other options")
        return True

    def other(self, why: str) -> InvalidArgument:
        """The error that the file has answers of another batch."""
        return InvalidArgument(
            f"{self.path} has answers of another batch: {why}; name another output with -o, or replace it with "
            "--overwrite"
        )

    def cut(self) -> None:
        """Cut the torn line at the end, if there is one."""
        if self._is_regular and os.fstat(self._file).st_size > self._length:
            os.ftruncate(self._file, self._length)

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, which names the file."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # no POSIX
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidArgument(f"another process writes {self.path}: wait for it, or name another output") from None
        except OSError:  # a file system without locks
            return

    def _read(self) -> int:
        """Note the answers that are there; gives the length of the whole lines."""
        length = 0
        with open(self._file, "rb", closefd=False) as file:
            while data := file.readline(2 * MOST_BYTES):
                if not data.endswith(b"\n"):
                    if not data.startswith(_BEGIN[: len(data)]):
                        raise self.other("its last line is none of an answer")
                    break
                length += len(data)
                self._note(data)
        return length

    def _note(self, data: bytes) -> None:
        """Note an answer. Raises InvalidArgument for what is none."""
        with suppress(ValueError, RecursionError, AttributeError, KeyError):
            record = json.loads(data)
            key = record["request"] if "request" in record else record["id"].removeprefix(KEY_PREFIX)
            number, _, digest = key.partition("-")
            found = int(number), int(digest, 16)
            if all(0 <= each <= _MOST for each in found):
                self._numbers.append(found[0])
                self._digests.append(found[1])
                self.n_errors += record.get("error") is not None
                return
        raise self.other(f"line {len(self._numbers) + 1} is no answer")

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
