"""`edgeinfer export --to gguf` killed at random moments, and on a disk that gets full at random bytes.

After each fault the output is what was there before, or the whole new file; nothing half-written is taken for whole.
`--resume` then gives the bytes of an export that nothing disturbed.

    python tests/benchmarks/check_export_faults.py MODEL [--type Q4_K_M] [--kills 20] [--full 10] [--seed 0]

MODEL: a GGUF file, or a folder of Hugging Face. A full disk is a file system of that size where one may be mounted
(tmpfs), else a limit on the size of files. Exits with 1 if a run does anything else. One JSON line on stdout, last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine

_OLD = b"what was there before"


@dataclass(frozen=True)
class Export:
    """A command, and what it gives undisturbed."""

    model: Path
    type: str
    sha256: str = ""
    n_bytes: int = 0

    def command(self, out: Path, *more: str) -> list[str]:
        """The command that writes out."""
        arguments = ["export", str(self.model), "--to", "gguf", "--type", self.type, "-o", str(out), "--no-check"]
        return [sys.executable, "-m", "edgeinfer", *arguments, *more]


def undisturbed(export: Export, folder: Path) -> Export:
    """The same with hash and size of its output."""
    out = folder / "whole.gguf"
    subprocess.run(export.command(out), check=True, capture_output=True)
    found = Export(export.model, export.type, hash_of(out), out.stat().st_size)
    out.unlink()
    return found


def hash_of(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def what_is_wrong(export: Export, out: Path) -> str | None:
    """After a fault: what of the output is neither old nor whole; then the same after --resume."""
    if out.stat().st_size == len(_OLD):
        if out.read_bytes() != _OLD:
            return "the old file was changed"
    elif hash_of(out) != export.sha256:
        return "a file that is not whole has the name of the output"
    resumed = subprocess.run(export.command(out, "--resume"), capture_output=True, text=True)
    if resumed.returncode:
        return f"--resume gave {resumed.returncode}: {resumed.stderr[-300:]}"
    if hash_of(out) != export.sha256:
        return "--resume gave other bytes"
    left = [path.name for path in out.parent.iterdir() if ".partial" in path.name]
    return f"{left} are left over" if left else None


def killed(export: Export, folder: Path, n_bytes: int) -> tuple[str, str | None]:
    """Kill an export when it has written so many bytes; gives how far it was, and what is wrong."""
    out, partial, journal = (folder / f"out.gguf{ending}" for ending in ("", ".partial", ".partial.journal"))
    out.write_bytes(_OLD)
    process = subprocess.Popen(export.command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not _is_as_large(partial, n_bytes):
        time.sleep(0.0005)
    process.kill()
    process.wait()
    state = f"{len(journal.read_bytes().splitlines()) - 1} tensors done" if journal.exists() else "renamed"
    return state, what_is_wrong(export, out)


def _is_as_large(path: Path, n_bytes: int) -> bool:
    try:
        return path.stat().st_size >= n_bytes
    except FileNotFoundError:
        return False


@contextmanager
def small_disk(folder: Path, n_bytes: int) -> Iterator[tuple[Path, str]]:
    """A folder on a file system of so many bytes, and its kind; without the right to mount one, a plain folder."""
    place = folder / "small"
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(place)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield place, "tmpfs" if is_mounted else "limit on the size of files"
    finally:
        if is_mounted:
            subprocess.run(["umount", str(place)], check=True)


def filled(export: Export, folder: Path, n_bytes: int) -> tuple[str, str | None]:
    """An export onto a disk with room for so many bytes; then with room for all of it."""
    with small_disk(folder, n_bytes) as (place, kind):
        out = place / "out.gguf"
        out.write_bytes(_OLD)
        is_limited = kind != "tmpfs"

        def limit() -> None:
            if is_limited:
                resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))

        # The plan would refuse a disk that is too small: what fills it comes later, as that of another program does.
        command = [sys.executable, "-c", _WITHOUT_PLAN, *export.command(out)[3:]]
        stopped = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
        if stopped.returncode != 1 or "--resume goes on" not in stopped.stderr:
            return kind, f"exit code {stopped.returncode}: {stopped.stderr[-300:]}"
        if not is_limited:
            subprocess.run(["mount", "-o", f"remount,size={2 * export.n_bytes}", str(place)], check=True)
        wrong = what_is_wrong(export, out)
        for path in place.iterdir():
            path.unlink()
        return kind, wrong


_WITHOUT_PLAN = """
import sys
from edgeinfer import cli
from edgeinfer.exporters import targets
targets.check_room = lambda plan, out: None
sys.argv = ["edgeinfer", *sys.argv[1:]]
cli.main()
"""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--full", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export = undisturbed(Export(options.model, options.type), folder)
        runs: list[dict[str, Any]] = []
        for index in range(options.kills + options.full):
            if is_kill := index < options.kills:
                at = rng.randint(0, export.n_bytes)
                state, wrong = killed(export, folder, at)
            else:
                at = rng.randrange(export.n_bytes // 50, export.n_bytes * 49 // 50)
                state, wrong = filled(export, folder, at)
            runs.append({"fault": "kill" if is_kill else "full", "at": at, "state": state, "wrong": wrong})
            print(runs[-1], file=sys.stderr, flush=True)
    n_wrong = sum(run["wrong"] is not None for run in runs)
    of_export = {"model": options.model.name, "type": options.type, "n_bytes": export.n_bytes}
    found = {"benchmark": "check_export_faults", "seed": options.seed, **of_export, "wrong": n_wrong, "runs": runs}
    print(json.dumps({**found, "machine": machine()}))
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
