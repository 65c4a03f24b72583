"""A file that is written tensor by tensor beside its place, with a journal by which a stopped export goes on.

OUT.partial has the bytes, OUT.partial.journal a line of JSON for what is done: first what the export is made of, then
each tensor with its hash. What the journal says is compared with the bytes before it is relied on, so that neither a
kill nor a power cut leaves anything that is taken for whole. OUT gets its name when all is written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ModelFileChanged
from edgeinfer.common.file_identity import check_sources
from edgeinfer.common.files import behind_links, check_writable, take_over
from edgeinfer.exporters.gguf.writer import Layout, Tensor

Progress = Callable[[float], None]
_PIECE_BYTES = 8 << 20
_OPENED = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)  # as it is found


def partial_path(out: Path) -> Path:
    """Where the bytes lie until all are written."""
    target = behind_links(out)
    return target.with_name(f"{target.name}.partial")


def journal_path(out: Path) -> Path:
    """Where the journal lies."""
    path = partial_path(out)
    return path.with_name(f"{path.name}.journal")


def _new_journal_path(out: Path) -> Path:
    """Where it lies while it is rewritten."""
    path = journal_path(out)
    return path.with_name(f"{path.name}.new")


def discard(out: Path) -> None:
    """Take a partial file and its journal away."""
    _new_journal_path(out).unlink(missing_ok=True)
    journal_path(out).unlink(missing_ok=True)
    partial_path(out).unlink(missing_ok=True)


@contextmanager
def partial_file(out: Path, identity: Mapping[str, Any], layout: Layout, resume: bool) -> Iterator[PartialFile]:
    """A file to write, which is kept for --resume where the system ends the work, and else gone if it is not finished.

    identity: what the bytes are a function of; an export is resumed only where it is the same. Raises InvalidArgument
    for a partial file of another export or of no export, EdgeInferError while another process writes it, OSError.
    """
    check_writable(out)
    if out.exists() and not out.is_file():
        raise InvalidArgument(f"{out}: must be a regular file, since it is written in parts")
    path = partial_path(out)
    _new_journal_path(out).exists()  # raises OSError where its name, the longest of all, is too long
    with os.fdopen(os.open(path, _OPENED, 0o666), "r+b", buffering=0) as file:
        _lock(file, path)
        try:
            partial = PartialFile(out, file, layout, identity, resume)
            yield partial
        except (OSError, KeyboardInterrupt, MemoryError, InvalidArgument) as error:
            _discard_if_stale(out)
            _tell_how_to_go_on(error, out)
            raise
        except BaseException:
            discard(out)
            raise


class PartialFile:
    """See partial_file.  done: the hash of each tensor that is written."""

    def __init__(self, out: Path, file: RawIOBase, layout: Layout, identity: Mapping[str, Any], resume: bool) -> None:
        self.done: dict[str, str] = {}
        self._out = out
        self._file = file
        self._layout = layout
        header = {"header": hashlib.sha256(layout.header).hexdigest(), "header_bytes": len(layout.header)}
        self._first = {**identity, **header, "n_bytes": layout.n_bytes}
        self._check_own()
        if resume:
            self._read_journal()
        if not self.done:
            self._begin()

    def write(self, tensors: Sequence[Tensor], progress: Progress) -> None:
        """Write those tensors that are not there yet.  progress: called with the share of the bytes that is done."""
        at = 0
        for tensor in tensors:
            if tensor.name not in self.done:
                self._write(tensor)
            at += tensor.n_bytes
            progress(at / max(1, sum(each.n_bytes for each in tensors)))
        self._file.truncate(self._layout.n_bytes)

    @property
    def path(self) -> Path:
        """Where it is now."""
        return partial_path(self._out)

    def finish(self) -> None:
        """Give the file its name. It must be whole."""
        os.fsync(self._file.fileno())
        check_sources()
        take_over(self.path, self._out)
        self.path.replace(behind_links(self._out))
        journal_path(self._out).unlink(missing_ok=True)

    def _check_own(self) -> None:
        """Raises InvalidArgument for bytes that no journal of an export speaks of: they may be the user's."""
        n_bytes = self._file.seek(0, os.SEEK_END)
        if n_bytes and not self._is_own(next(_records(journal_path(self._out)), {}), n_bytes):
            raise InvalidArgument(
                f"{self.path} is there, and no journal of an export ({journal_path(self._out).name}) belongs to it, so "
                "that it may be a file of yours: move it or remove it, then begin again"
            )

    def _is_own(self, first: Mapping[str, Any], n_bytes: int) -> bool:
        """Whether the bytes begin as the first line of a journal says."""
        n_header, n_whole = first.get("header_bytes"), first.get("n_bytes")
        if not isinstance(n_header, int) or not isinstance(n_whole, int) or n_bytes > n_whole:
            return False
        self._file.seek(0)
        found = self._file.read(n_header) or b""
        # A kill leaves part of a header, a power cut zeros.
        return len(found) < n_header or not any(found) or hashlib.sha256(found).hexdigest() == first.get("header")

    def _begin(self) -> None:
        # In this order there is a journal beside whatever has bytes.
        self._file.truncate(0)
        self._rewrite_journal([self._first])
        self._file.seek(0)
        _write_all(self._file, memoryview(self._layout.header))

    def _write(self, tensor: Tensor) -> None:
        start, digest = self._layout.offsets[tensor.name], hashlib.sha256()
        self._file.seek(start)
        for piece in tensor.pieces():
            data = np.ascontiguousarray(piece).data
            digest.update(data)
            _write_all(self._file, data)
        if (n_bytes := self._file.tell() - start) != tensor.n_bytes:
            raise ValueError(f"tensor {tensor.name} must have {tensor.n_bytes} bytes: found {n_bytes}")
        record = {"name": tensor.name, "type": tensor.type.name, "offset": start, "n_bytes": n_bytes}
        self._append({**record, "sha256": digest.hexdigest()})
        self.done[tensor.name] = digest.hexdigest()

    def _append(self, record: Mapping[str, Any]) -> None:
        with journal_path(self._out).open("ab") as journal:
            journal.write(json.dumps(record).encode() + b"\n")

    def _read_journal(self) -> None:
        """Take over what the journal says and the bytes confirm. Raises InvalidArgument for that of another export."""
        records = list(_records(journal_path(self._out)))
        if not records:
            return
        if differing := _differences(records[0], self._first):
            raise InvalidArgument(
                f"{self.path} is of another export ({', '.join(differing)} differs): remove it, or begin again "
                "without --resume"
            )
        self._file.seek(0)
        if self._file.read(len(self._layout.header)) != self._layout.header:
            return
        for record in records[1:]:
            if not self._confirms(record):
                break
            self.done[record["name"]] = record["sha256"]
        self._rewrite_journal(records)

    def _confirms(self, record: Mapping[str, Any]) -> bool:
        """Whether the file has the bytes that a line of the journal speaks of."""
        name, n_bytes = str(record.get("name")), record.get("n_bytes")
        offset = self._layout.offsets.get(name)
        if offset is None or record.get("offset") != offset:
            return False
        self._file.seek(offset)
        return isinstance(n_bytes, int) and _hash(self._file, n_bytes) == record.get("sha256")

    def _rewrite_journal(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Leave the lines that hold: a torn one at the end would spoil the next."""
        kept = [json.dumps(record).encode() + b"\n" for record in records[: 1 + len(self.done)]]
        new = _new_journal_path(self._out)
        new.write_bytes(b"".join(kept))
        new.replace(journal_path(self._out))


def _discard_if_stale(out: Path) -> None:
    """Raises ModelFileChanged, and leaves nothing, where the source has changed: nobody can go on."""
    try:
        check_sources()
    except ModelFileChanged:
        discard(out)
        raise


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal that are whole."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [key for key in wanted if found.get(key) != wanted[key]]


def _write_all(file: RawIOBase, data: memoryview) -> None:
    """Write all of it: the system may take less at a time."""
    while len(data):
        data = data[file.write(data) or 0 :]


def _hash(file: RawIOBase, n_bytes: int) -> str | None:
    digest = hashlib.sha256()
    while n_bytes > 0:
        piece = file.read(min(n_bytes, _PIECE_BYTES))
        if not piece:
            return None
        digest.update(piece)
        n_bytes -= len(piece)
    return digest.hexdigest()


def _lock(file: RawIOBase, path: Path) -> None:
    """Keep other processes from writing the file. The system gives the lock up with the process."""
    with suppress(ImportError):  # not on Windows
        import fcntl

        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EdgeInferError(f"{path}: another export is writing this file; wait for it, or end it") from error
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise EdgeInferError(f"{path}: another export has just finished this file; begin again to replace it")


def _tell_how_to_go_on(error: BaseException, out: Path) -> None:
    """Name the file in an OSError that has none, and say what --resume does."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(out)
        error.strerror = f"{error.strerror}; what is written stays in {partial_path(out).name}, --resume goes on there"
