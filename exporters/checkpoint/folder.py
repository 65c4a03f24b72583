"""The folder of a checkpoint: its files are found by name, and nothing outside of it is read.

A link is followed where it leads to a file of the folder, or, in the cache of Hugging Face's hub, to the repository's
own blobs (models--OWNER--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH).
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from edgeinfer.common.arguments import check_file_name, human_bytes
from edgeinfer.common.errors import ModelFileError, ModelNotFound
from edgeinfer.exporters.checkpoint.json_text import parsed

MAX_TEXT_BYTES = 16 << 20  # of a configuration; a vocabulary or an index may have more
_MOST_SHOWN = 8


class Folder:
    """A folder with the files of a model.

    path: as the user named it.  read: the files that were read until now, in order, for the record.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ModelNotFound where there is no such folder, InvalidArgument."""
        self.path = check_file_name("folder", path)
        if not self.path.is_dir():
            what = "is a file" if self.path.exists() else "there is no such folder"
            raise ModelNotFound(f"{self.path}: {what}; name the folder that has config.json and .safetensors files")
        self._homes = [os.path.realpath(self.path)]
        snapshots = os.path.dirname(self._homes[0])
        if os.path.basename(snapshots) == "snapshots":
            self._homes.append(os.path.join(os.path.dirname(snapshots), "blobs"))
        self.read: list[Path] = []

    def __contains__(self, name: str) -> bool:
        return _is_plain(name) and os.path.lexists(self.path / name)

    def names(self, pattern: str = ".*") -> list[str]:
        """Names of the entries that a regular expression matches as a whole, in order. Raises ModelFileError."""
        try:
            return sorted(name for name in os.listdir(self.path) if re.fullmatch(pattern, name))
        except OSError as error:
            raise ModelFileError(f"{self.path}: cannot be read: {error.strerror}") from error

    def shown(self) -> str:
        """What is in it, for a message."""
        names = self.names()
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        return (", ".join(names[:_MOST_SHOWN]) + more) or "nothing"

    def file(self, name: str, called_by: str = "") -> Path:
        """The path of a regular file in the folder, which counts as read from now on.

        called_by: the file that gives the name, for messages. Raises ModelNotFound, ModelFileError.
        """
        by = f" (named by {called_by})" if called_by else ""
        if not _is_plain(name):
            raise ModelFileError(f"{self.path}: {name!r:.80}{by} must be the name of a file in this folder")
        path = self.path / name
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if os.path.islink(path):
                raise ModelNotFound(f"{path}{by}: is a link to {os.readlink(path)}: {error.strerror}") from None
            raise ModelNotFound(f"{path}{by}: {error.strerror}; the folder has {self.shown()}") from None
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            raise ModelFileError(f"{path}{by}: must be a regular file")
        target = os.path.realpath(path)
        if not self._is_inside(target):
            raise ModelFileError(
                f"{path}{by}: leads out of the folder, to {target}, and is not read; put the file itself there"
            )
        if path not in self.read:
            self.read.append(path)
        return path

    def text(self, name: str, most_bytes: int = MAX_TEXT_BYTES) -> bytes:
        """The bytes of a small file. Raises ModelNotFound, ModelFileError, also for more than most_bytes."""
        path = self.file(name)
        try:
            with open(path, "rb") as file:
                found = file.read(min(os.fstat(file.fileno()).st_size, most_bytes) + 1)  # allocates as much
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
        if len(found) > most_bytes:
            raise ModelFileError(f"{path}: must be at most {human_bytes(most_bytes)}: found more")
        return found

    def json(self, name: str, most_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any]:
        """The object in a file. Raises ModelNotFound, ModelFileError."""
        return parsed(self.text(name, most_bytes), str(self.path / name))

    def optional_json(self, name: str) -> dict[str, Any]:
        """The object in a file, an empty one where there is none. Raises ModelFileError."""
        return self.json(name) if name in self else {}

    def inner(self, name: str) -> Folder | None:
        """The folder of that name in this one; None where there is none, or a link."""
        path = self.path / name
        if not path.is_dir() or path.is_symlink():
            return None
        folder = Folder(path)
        folder._homes += self._homes[1:]
        folder.read = self.read
        return folder

    def _is_inside(self, target: str) -> bool:
        return os.path.dirname(target) in self._homes


def _is_plain(name: str) -> bool:
    """Whether it can only be an entry of the folder itself."""
    return name.isprintable() and name not in ("", ".", "..") and not re.search(r"[/\\:]", name)
