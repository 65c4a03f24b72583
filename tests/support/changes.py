"""What other programs do to a file that is in use."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Change: TypeAlias = Callable[[Path, Path], None]  # of a file; the second has other contents of the same size


def let_its_time_pass(path: Path) -> None:
    """Wait until what is written has another time than this file: file systems count it in steps."""
    probe = path.with_name("probe")
    probe.touch()
    while probe.stat().st_mtime_ns <= path.stat().st_ctime_ns:
        time.sleep(0.001)
        probe.touch()
    probe.unlink()


def copy_over(path: Path, other: Path) -> None:
    """As `cp`: the same file, with other bytes."""
    path.write_bytes(other.read_bytes())


def copy_over_with_its_time(path: Path, other: Path) -> None:
    """The same, with the time of the last write set back."""
    stat = path.stat()
    copy_over(path, other)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_a_byte(path: Path, _: Path) -> None:
    """One byte, in place, in the second half."""
    with path.open("r+b") as file:
        file.seek(3 * path.stat().st_size // 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def cut(path: Path, _: Path) -> None:
    """Half of it."""
    os.truncate(path, path.stat().st_size // 2)


def cut_to_nothing(path: Path, _: Path) -> None:
    """As a shell does before `>` writes."""
    os.truncate(path, 0)


def append(path: Path, _: Path) -> None:
    """More at the end."""
    with path.open("ab") as file:
        file.write(b"more")


CHANGES: list[Change] = [copy_over, copy_over_with_its_time, change_a_byte, cut, cut_to_nothing, append]


def rename_over(path: Path, other: Path) -> None:
    """As `mv`, and what safe programs do: another file gets the name."""
    new = path.with_name("new")
    shutil.copy(other, new)
    new.replace(path)


def remove(path: Path, _: Path) -> None:
    """As `rm`."""
    path.unlink()


def move_away(path: Path, _: Path) -> None:
    """As `mv` to another name."""
    path.rename(path.with_name("moved"))


def change_mode(path: Path, _: Path) -> None:
    """As `chmod`."""
    path.chmod(0o600)


def link(path: Path, _: Path) -> None:
    """As `ln`: a second name."""
    os.link(path, path.with_name("linked"))


HARMLESS: list[Change] = [rename_over, remove, move_away, change_mode, link]
