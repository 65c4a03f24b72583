"""The content of a model file as a hash, which is computed once for a file and known from then on."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable

from edgeinfer.common.file_identity import identity_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.gguf_reader.mapping import read_at
from edgeinfer.record_cache import read_record, record_folder, record_name, write_record

_AT_ONCE_BYTES = 16 << 20  # files of so much are hashed when they are opened
_PIECE_BYTES = 1 << 20
# A file that was written to so short a time ago may be written to again with the same times: its hash is not kept.
_SETTLED_NS = 2_000_000_000
_KIND = "contents"


class ModelContent:
    """The hash of all bytes of a model's files.  value: None as long as it is not known."""

    def __init__(self, file: ModelFile) -> None:
        self._watches = file.watches()
        self._identities = [identity_of(os.fstat(watch.descriptor)) for watch in self._watches]
        self._key = record_name("sha256 of files", [tuple(identity) for identity in self._identities])
        self.value: str | None = None
        found = read_record(record_folder(_KIND), self._key)
        if isinstance(found, dict) and isinstance(found.get("sha256"), str):
            self.value = found["sha256"]
        elif sum(identity.n_bytes for identity in self._identities) <= _AT_ONCE_BYTES:
            self.compute()

    def compute(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Read the files and set the value, unless that is not wanted any more.

        Raises OSError, ModelFileChanged if somebody has written to a file.
        """
        digest = hashlib.sha256()
        newest = max(max(identity.mtime_ns, identity.ctime_ns) for identity in self._identities)
        is_settled = time.time_ns() - newest > _SETTLED_NS
        for watch, identity in zip(self._watches, self._identities, strict=True):
            digest.update(identity.n_bytes.to_bytes(8, "little"))
            at = 0
            while at < identity.n_bytes:
                if not is_wanted():
                    return
                data = read_at(watch.descriptor, _PIECE_BYTES, at)
                if not data:
                    watch.check()
                    raise EOFError(f"{watch.path}: ends at {at}")
                digest.update(data)
                at += len(data)
        for watch in self._watches:
            watch.check()
        self.value = digest.hexdigest()
        if is_settled:
            write_record(record_folder(_KIND), self._key, {"sha256": self.value})

    def close(self) -> None:
        """Close the files."""
        for watch in self._watches:
            watch.close()
