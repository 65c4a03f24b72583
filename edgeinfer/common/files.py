"""Files of the user: names that callers give, the user's folders, and atomic writing."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.file_identity import check_sources

_APPLICATION = "edgeinfer"
_STANDARD_OUTPUTS = (1, 2)
_PIECE_BYTES = 8 << 20  # of a file that is hashed
_BINARY = getattr(os, "O_BINARY", 0)  # on Windows
_OF_MODELS = (b"GGUF", b"edgeinfer-packed")  # what such files begin with
_WRITTEN_INTO_FOLDERS = (".gguf", ".onnx", ".onnx.data", ".litertlm", "manifest.json")  # by exports, and read by none


# ---- The user's folders ----------------------------------------------------------------------------------------------


def home_folder(user: str = "") -> str | None:
    """Home folder of this user, or of the one with that name; None where there is none.

    HOME counts where it is an absolute path, else what the system knows of the user.
    """
    if not user and os.name == "posix" and not os.path.isabs(os.environ.get("HOME", "/")):
        import pwd

        with suppress(KeyError):
            return _absolute(pwd.getpwuid(os.getuid()).pw_dir)
        return None
    return _absolute(os.path.expanduser(f"~{user}"))


def expanded(name: str) -> Path:
    """The file with that name, ~ or ~user in front of it replaced by that home folder; ./~ is a file called ~.

    Expanding the result again changes nothing. Raises LookupError where there is no such home folder.
    """
    if name.startswith("~"):
        user, _, rest = name[1:].replace(os.altsep or os.sep, os.sep).partition(os.sep)
        home = home_folder(user)
        if home is None:
            raise LookupError(f"there is no user {user!r}" if user else "this user has no home folder: set HOME")
        return Path(home, rest.lstrip(os.sep))
    path = Path(name)
    return Path.cwd() / path if str(path).startswith("~") else path  # Path forgets the ./ of ./~


def cache_folder() -> Path | None:
    """Folder for measurements that can be repeated; it need not exist. None if the user has no such folder."""
    import platformdirs

    with suppress(RuntimeError, OSError):  # newer versions raise where there is no home folder
        return _folder(platformdirs.user_cache_path(_APPLICATION))
    return None


def state_folder() -> Path | None:
    """Folder for histories; it need not exist. None if the user has no such folder."""
    import platformdirs

    with suppress(RuntimeError, OSError):
        return _folder(platformdirs.user_state_path(_APPLICATION))
    return None


def data_folder() -> Path | None:
    """Folder for what the user keeps; it need not exist. None if the user has no such folder."""
    import platformdirs

    with suppress(RuntimeError, OSError):
        return _folder(platformdirs.user_data_path(_APPLICATION))
    return None


def _absolute(path: str) -> str | None:
    return path if os.path.isabs(path) else None


def _folder(path: Path) -> Path | None:
    """The folder, if its name does not depend on the working directory: XDG variables and HOME may hold anything."""
    return path if path.is_absolute() else None


# ---- Writing ---------------------------------------------------------------------------------------------------------


def behind_links(path: Path) -> Path:
    """The file that writing to a name would write. Raises OSError for a folder, and for links that lead in a circle."""
    return _target(path)[0]


def check_writable(path: Path) -> None:
    """Raises OSError, which names the obstacle, if `written_whole` could not begin. Changes nothing."""
    target, found = _target(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        return
    if found is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    folder = target.parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "Nothing can be written in this folder", str(folder))


def check_kept(out: Path, written: Iterable[Path], read: Iterable[Path], option: str = "--out") -> None:
    """Raises InvalidArgument about an output, one of whose files is read too: the same file, whatever it is called.

    written: of these, those that exist.  read: files and folders. Devices and pipes may be both.
    """
    found = {}
    for path in written:
        identity = _identity(path)
        if identity is not None:
            found[identity] = path
    for path in read if found else ():
        if _identity(path) in found:
            raise InvalidArgument(
                f"{out}: {option} must be another file than those that are read: would overwrite {path}"
            )


def check_no_model(path: Path, what: str) -> None:
    """Raises InvalidArgument where what is to be written, such as "a conversation", would take the place of a model."""
    if _identity(path) is None or path.is_dir():
        return
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(max(_OF_MODELS, key=len))).startswith(_OF_MODELS):
            raise InvalidArgument(f"{path}: is a model, which {what} must not overwrite: name another file")


def files_read_in(folder: Path) -> Iterator[Path]:
    """The files of a folder that is read, but for what exports write into it; none of what is no folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(_WRITTEN_INTO_FOLDERS):
                yield Path(place, name)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file or a folder, behind links; None where there is none of both."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) else None


@contextmanager
def written_whole(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write into, which gets its name when everything is written; on an error nothing is left behind.

    An existing file keeps its mode and, if the system allows it, its owner; of a symbolic link the target is written.
    What is not a regular file, such as a pipe or /dev/stdout, is written directly.  durable: whether it must survive a
    power cut right after it. Raises OSError, which names the file.
    """
    with _named(path):
        check_writable(path)
        target, found = _target(path)
        if found is not None and (not stat.S_ISREG(found.st_mode) or _standard_output(found) is not None):
            with _opened_in_place(path, found) as file:
                yield file
            check_sources()
            return
        partial = _partial_name(target)
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666), "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            _take_over(found, partial)
            check_sources()
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes in hexadecimal, read some at a time. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file as `written_whole` does."""
    with written_whole(path, durable=durable) as file:
        file.write(data)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A new folder beside a file that is to be written, on the same file system; gone afterwards with all in it.

    Those that a process which was killed has left for the same file are removed first.
    """
    with _named(path):
        check_writable(path)
        folder = _WorkFolder(_target(path)[0])
    try:
        yield folder.path
    finally:
        folder.close()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder in the system's place for temporary files; gone afterwards with all in it.

    Those that a process of this user which was killed has left are removed first.
    """
    import tempfile

    folder = _WorkFolder(Path(tempfile.gettempdir()) / _APPLICATION, mode=0o700)
    try:
        yield folder.path
    finally:
        folder.close()


@contextmanager
def utf8_name(path: Path) -> Iterator[Path]:
    """A name of a file or a folder for libraries whose names are UTF-8: its own, or that of a link in a new folder."""
    if is_utf8(str(path)):
        yield path
        return
    with temporary_folder() as folder:
        # Where the last part can stay, what lies beside the file is found too.
        whole = is_utf8(path.name)
        link = folder / f"link{'' if whole or not is_utf8(path.suffix) else path.suffix}"
        link.symlink_to(os.path.realpath(path.parent if whole else path))
        yield link / path.name if whole else link


def is_utf8(name: str) -> bool:
    """Whether a name of a file is UTF-8, as names need not be."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def whole_folder(path: Path, names: Sequence[str]) -> Iterator[Path]:
    """A folder to write into, which gets its name when everything is in it; on an error nothing is left behind.

    names: patterns of what such a folder holds. One that has nothing else in it is replaced, once the new one is whole.
    What a process that was killed has left is removed first.
    Raises OSError, which names the folder, for one with other files, and as `written_whole` does.
    """
    import shutil

    path = Path(os.path.realpath(path))
    with _named(path):
        check_folder(path, names)
        folder = _WorkFolder(path)
    old = None
    try:
        with _named(path):
            yield folder.path
            check_folder(path, names)
            for written in folder.path.rglob("*"):
                if written.is_file():
                    _flush(written)
            check_sources()
            if path.exists():
                old = _name_beside(path, "replaced")
                path.rename(old)
            folder.path.rename(path)
    except BaseException:
        if old is not None and not path.exists():
            old.rename(path)
        raise
    finally:
        folder.close()
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


class _WorkFolder:
    """A new folder beside a place, which its process holds locked: what nobody holds is of a process that was killed.

    Where the system locks no folders (Windows), those stay.
    """

    def __init__(self, place: Path, mode: int = 0o777) -> None:
        _remove_left_over(place)
        self._lock: int | None = None
        while True:
            self.path = _partial_name(place)
            self.path.mkdir(mode)
            # Between the two calls, another process may take the folder for one that was left.
            with suppress(BlockingIOError, FileNotFoundError):
                self._lock = _locked(self.path)
                if self.path.exists():
                    return
                self._unlock()

    def close(self) -> None:
        """Remove what still has the name."""
        import shutil

        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _locked(folder: Path) -> int | None:
    """The descriptor that keeps other processes from locking a folder, None where the system locks none.

    Raises BlockingIOError where another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _remove_left_over(place: Path) -> None:
    """Remove the work folders beside a place that no process holds, and what whole ones have replaced."""
    import shutil

    with suppress(OSError):  # a folder that can be written need not be readable
        found = list(place.parent.iterdir())
        kinds = ("partial", "replaced") if place.exists() else ("partial",)  # nothing has replaced it where it is gone
        for folder in (path for path in found if any(_is_beside(path, place, kind) for kind in kinds)):
            with suppress(OSError):
                lock = _locked(folder)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def check_folder(path: Path, names: Sequence[str]) -> None:
    """Raises OSError, which names the obstacle, if `whole_folder` could not begin. Changes nothing."""
    if not path.is_dir():
        check_writable(path)
        if path.exists():
            raise NotADirectoryError(errno.ENOTDIR, "This is a file, wanted is a folder", str(path))
        return
    other = [found.name for found in path.iterdir() if not any(fnmatch.fnmatch(found.name, name) for name in names)]
    if other:
        raise FileExistsError(errno.EEXIST, f"This folder has other files, such as {min(other)!r}", str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "Nothing can be written in this folder", str(path.parent))


def _flush(path: Path) -> None:
    """A file, down to the disk."""
    descriptor = os.open(path, os.O_RDWR | _BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_over(written: Path, path: Path) -> None:
    """Give a written file the mode, and where the system allows it the owner, of one that it is to replace."""
    with _named(path):
        _take_over(_target(path)[1], written)


def put_in_place(written: Path, path: Path) -> None:
    """Give a file that is whole the name of another one, whose mode and owner it takes. Raises OSError."""
    take_over(written, path)
    check_sources()
    os.replace(written, path)


def _target(path: Path) -> tuple[Path, os.stat_result | None]:
    """The file that is meant, behind symbolic links, and what is there. Raises OSError for a folder or a loop."""
    found = None
    try:
        found = path.stat()
    except FileNotFoundError:
        pass
    except ValueError as error:  # a null byte, or a character that the file system cannot have
        raise OSError(errno.EINVAL, f"No file can have this name: {error}", repr(str(path))) from None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "This is a folder, wanted is a file", str(path))
    return (Path(os.path.realpath(path)) if path.is_symlink() else path), found


def _standard_output(found: os.stat_result) -> int | None:
    """The descriptor of standard output or error, if that is the file."""
    for descriptor in _STANDARD_OUTPUTS:
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), found):
                return descriptor
    return None


def _opened_in_place(path: Path, found: os.stat_result) -> BinaryIO:
    """A pipe, a device or a standard output, open for writing."""
    descriptor = _standard_output(found)
    if descriptor is not None:
        return os.fdopen(os.dup(descriptor), "wb")
    try:  # a pipe that nobody reads would wait for ever
        opened = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "Nothing reads from it", str(path)) from None
    os.set_blocking(opened, True)
    return os.fdopen(opened, "wb")


def _partial_name(target: Path) -> Path:
    """A name beside a file that nothing has, and that is no longer than names may be."""
    return _name_beside(target, "partial")


def _name_beside(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name:.40}.{kind}-{os.urandom(4).hex()}")


def _is_beside(found: Path, target: Path, kind: str) -> bool:
    """Whether a name is one that _name_beside gives."""
    start, _, number = found.name.rpartition("-")
    return start == f"{target.name:.40}.{kind}" and re.fullmatch("[0-9a-f]{8}", number) is not None


def _take_over(found: os.stat_result | None, written: Path) -> None:
    """Give a written file owner and mode of the one that it replaces."""
    if found is None or not hasattr(os, "chown"):
        return
    for owner, group in ((found.st_uid, -1), (-1, found.st_gid)):
        with suppress(OSError):  # not everybody may give files away
            os.chown(written, owner, group)
    os.chmod(written, stat.S_IMODE(found.st_mode))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Within, an OSError without the name of a file, or with that of a partial one, gets the name of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and ".partial-" not in str(error.filename)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
