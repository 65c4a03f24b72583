"""CMAKE_ARGS to compile llama-cpp-python with, the peer of tests and benchmarks, so that it runs on this CPU.

    CMAKE_ARGS="$(python tests/support/peer_build.py)" pip install llama-cpp-python==0.3.36

Where the CPU has AMX they keep llama.cpp from using it, as its matrix products there crash (0.3.36, GCC 12): ggml
compiles them wherever -march=native defines __AMX_INT8__, which its own options (GGML_AMX_INT8) do not change. Else
they are what CMAKE_ARGS is already.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

_FLAG = "-mno-amx-int8"


def cmake_args(cpuinfo: str, given: str, compiler: str = "cc") -> str:
    """The arguments for a CPU that Linux describes so, after those that are given."""
    if not has_amx(cpuinfo) or not _knows_flag(compiler):
        return given
    return f"{given} -DCMAKE_C_FLAGS={_FLAG} -DCMAKE_CXX_FLAGS={_FLAG}".strip()


def has_amx(cpuinfo: str) -> bool:
    """Whether a CPU that Linux describes so multiplies matrices of int8 by AMX."""
    return re.search(r"^flags\b.*\bamx_int8\b", cpuinfo, re.MULTILINE) is not None


def this_cpu() -> str:
    """What Linux says of this machine's CPU; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text(errors="replace") if path.exists() else ""


def _knows_flag(compiler: str) -> bool:
    """Whether the compiler has the flag: one that does not has no AMX either."""
    command = [compiler, _FLAG, "-x", "c", "-E", os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def main() -> None:
    """Print them for this machine."""
    print(cmake_args(this_cpu(), os.environ.get("CMAKE_ARGS", ""), os.environ.get("CC", "cc")))


if __name__ == "__main__":
    main()
