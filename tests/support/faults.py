"""Processes whose reads of files fail: see faulty_reads.c, which is preloaded into them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from parts import missing

SOURCE = Path(__file__).with_name("faulty_reads.c")
SUPPORT = SOURCE.parent


def compile_faults(folder: Path) -> Path:
    """The library to preload; skips the test where there is no compiler, or no Linux."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        missing("compiler", "reads are made to fail by a library that a C compiler makes for Linux")
    library = folder / "faulty_reads.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment_of(library: Path, files: str, reads: str = "", past_the_cache: bool = True) -> dict[str, str]:
    """The environment of a process whose reads of files with such names fail."""
    preloaded = f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()
    faults = {"LD_PRELOAD": preloaded, "FAULTY_FILES": files, "FAULTY_READS": reads}
    if not past_the_cache:
        faults["FAULTY_DIRECT"] = "1"
    return os.environ | faults | {"PYTHONPATH": str(SUPPORT)}
