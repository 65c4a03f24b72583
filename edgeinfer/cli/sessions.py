"""Named conversations: one file each in the user's state folder, readable for its owner only."""

from __future__ import annotations

import os
import re
import time
import unicodedata
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.common.files import state_folder

if TYPE_CHECKING:
    from edgeinfer.chat import Conversation

_NAME = re.compile(r"\w[\w.-]{0,59}")
_UNNAMED = ".last"  # the conversation without a name
_ENDING = ".jsonl"


class Session:
    """The file of a named conversation, held by one process at a time. A context manager.

    shown: what it is called in messages.  Raises InvalidArgument for a name that no session may have, EdgeInferError if
    another process holds it or there is no folder for it, OSError.
    """

    def __init__(self, name: str) -> None:
        self.name = name if name == _UNNAMED else _checked_name(name)
        self.shown = "the last conversation" if name == _UNNAMED else f"the session {self.name}"
        self._begins_anew = False
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / f"{self.name}{_ENDING}"
        self._lock = _locked(folder / f".{self.name}.lock", self.shown)
        self._stamp = _stamp(self._path)

    def load(self, conversation: Conversation) -> None:
        """Give a conversation the messages of the session, if there are any. Raises InvalidArgument if it is damaged.

        Then the file is left as it is.
        """
        if self._stamp is None or self._begins_anew:
            return
        try:
            conversation.load(self._path)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{self.shown} cannot be read, and is left as it is: {error}. Mend or move that file, or "
                "take another name"
            ) from error

    def save(self, conversation: Conversation) -> None:
        """Write the conversation atomically. Raises EdgeInferError if another program wrote it meanwhile."""
        if _stamp(self._path) != self._stamp:
            raise EdgeInferError(
                f"{self._path} was changed by another program and is not overwritten: /save FILE keeps this "
                "conversation in another file"
            )
        os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))  # the file that replaces it gets its mode
        conversation.save(self._path)
        self._stamp = _stamp(self._path)

    def begin_anew(self) -> None:
        """Let the next conversation take the place of the one in the file, once it has a message."""
        self._begins_anew = True

    @property
    def is_unnamed(self) -> bool:
        """Whether it is that of the last conversation without a name."""
        return self.name == _UNNAMED

    def close(self) -> None:
        """Unlock the session for other processes."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def last_session() -> Session:
    """The session that was written last, with or without a name. Raises EdgeInferError if there is none."""
    written = {}
    with suppress(FileNotFoundError):
        for path in _folder().iterdir():
            name = path.name.removesuffix(_ENDING)
            is_session = path.name.endswith(_ENDING) and (name == _UNNAMED or _NAME.fullmatch(name))
            if is_session and path.is_file():
                written[name] = path.stat().st_mtime_ns
    if not written:
        raise EdgeInferError("there is no conversation yet that --resume could go on with")
    return Session(max(written, key=lambda name: written[name]))


def unnamed_session() -> Session | None:
    """Where a conversation without a name is kept for --resume; None where that cannot be, as in a second chat."""
    try:
        session = Session(_UNNAMED)
    except (EdgeInferError, OSError):
        return None
    session.begin_anew()
    return session


def session_lines() -> list[str]:
    """A line about each session, the newest first: its name, its messages, and when it was written."""
    found = []
    with suppress(FileNotFoundError):
        for path in _folder().iterdir():
            name = path.name.removesuffix(_ENDING)
            if path.name.endswith(_ENDING) and _NAME.fullmatch(name) and path.is_file():
                n_messages = sum(1 for line in path.read_bytes().splitlines() if line.strip())
                found.append((path.stat().st_mtime, name, n_messages))
    width = max((len(name) for _, name, _ in found), default=0)
    return [
        f"{name:<{width}}  {n_messages:>4} message{' ' if n_messages == 1 else 's'}  "
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(written))}"
        for written, name, n_messages in sorted(found, key=lambda each: (-each[0], each[1]))
    ]


def _checked_name(name: str) -> str:
    name = unicodedata.normalize("NFC", name)
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"the name of a session has 1 to 60 letters, digits, _ - or ., and begins with a letter or a digit: "
            f"found {name!r:.80}"
        )
    return name


def _folder() -> Path:
    folder = state_folder()
    if folder is None:
        raise EdgeInferError("sessions cannot be kept: this user has no home folder, set HOME or XDG_STATE_HOME")
    return folder / "sessions"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file is written; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _locked(path: Path, shown: str) -> int | None:
    """The descriptor of the session's lock; None if the system locks no files.

    Raises EdgeInferError if another process has it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        by = f" (process {owner})" if owner else ""
        raise EdgeInferError(f"{shown} is open in another chat{by}: end that, or take another name") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor
