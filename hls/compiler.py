"""C++ of high-level synthesis, compiled by the C++ compiler of this machine and kept in the user's cache."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

from edgeinfer.common.errors import BackendUnavailable
from edgeinfer.common.files import cache_folder

FOLDER = Path(__file__).parent
INCLUDE = FOLDER / "include"
# Floats are rounded after each operation, as the hardware does it. Pragmas, and labels of loops, are for synthesis.
_FLAGS = ("-std=c++14", "-O1", "-ffp-contract=off")
_STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-label")
_VENDOR_TYPES = "templates/vivado/ap_types"
_SUFFIXES = {"-shared": ".so"}


class Headers(Enum):
    """Where ap_int and hls::stream come from: this package, or the vendor's headers that hls4ml contains."""

    OWN = "own"
    VENDOR = "vendor"


def vendor_headers() -> Path | None:
    """Folder of the vendor's ap_int.h in an installed hls4ml, which is not imported; None without it."""
    spec = importlib.util.find_spec("hls4ml")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (found := Path(folder) / _VENDOR_TYPES).is_dir():
            return found
    return None


def build_library(
    sources: Sequence[Path],
    headers: Headers = Headers.OWN,
    defines: Mapping[str, object] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """A shared library of the sources, for ctypes. See build_program."""
    return build_program(sources, headers, defines, ("-shared", "-fPIC", *flags))


def build_program(
    sources: Sequence[Path],
    headers: Headers = Headers.OWN,
    defines: Mapping[str, object] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """A program of the sources, compiled when it is not in the cache yet.

    defines: macros. flags: of the compiler, behind those that all have.
    Raises BackendUnavailable without a compiler or without the headers, and with what the compiler says where it fails.
    """
    compiler, text = cpp_compiler(), _headers_flags(headers)
    macros = [f"-D{name}={value}" for name, value in sorted((defines or {}).items())]
    command = [*compiler, *_FLAGS, *text, f"-I{INCLUDE}", *macros, *flags, *map(str, sources)]
    name = _key(command, sources) + next((end for flag, end in _SUFFIXES.items() if flag in flags), "")
    built = build_folder("hls") / name
    return built if built.is_file() else _compile(command, built)


def build_folder(kind: str) -> Path:
    """Where builds are kept, which is there: of this process alone where the user's cannot be written."""
    folder = cache_folder()
    if folder is not None:
        with suppress(OSError):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            if os.access(folder / kind, os.W_OK | os.X_OK):
                return folder / kind
    return _own_folder(kind)


def load_library(path: Path) -> ctypes.CDLL:
    """A library that was built. Raises BackendUnavailable for one that cannot be loaded, such as after a power cut."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(
            f"{path} must be a library for this machine: {error}; delete it, and it is compiled again"
        ) from error


@functools.cache
def _own_folder(kind: str) -> Path:
    own = tempfile.mkdtemp(prefix=f"edgeinfer-{kind}-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def cpp_compiler() -> list[str]:
    """The command of the C++ compiler, which CXX may name with arguments. Raises BackendUnavailable without one."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in (named, ["g++"], ["clang++"], ["c++"]):
        if command and shutil.which(command[0]):
            return command
    raise BackendUnavailable(
        "a C++ compiler is needed to run the C++ of the FPGA kernels: found neither g++ nor clang++; install one "
        "(Debian, Ubuntu: apt install g++) or name it in CXX"
    )


def _headers_flags(headers: Headers) -> list[str]:
    if headers is Headers.OWN:
        return list(_STRICT)
    folder = vendor_headers()
    if folder is None:
        raise BackendUnavailable(
            "the vendor's ap_int.h comes with hls4ml, which is not installed: pip install --no-deps hls4ml==1.3.0"
        )
    return ["-w", "-DEI_VENDOR_TYPES", "-isystem", str(folder)]  # templates of theirs warn within functions of ours


def _key(command: Sequence[str], sources: Sequence[Path]) -> str:
    """Name of a build: of the compiler, its arguments, and all files that it may read."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(repr((command, sys.platform)).encode() + version)
    for path in sorted(
        {*sources, *INCLUDE.rglob("*.hpp"), *(FOLDER / "src").glob("*.?pp"), *(FOLDER / "tb").glob("*.?pp")}
    ):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _compile(command: Sequence[str], target: Path) -> Path:
    """The target, whole or not at all: two processes may compile the same one."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        run = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
        if run.returncode:
            raise BackendUnavailable(f"{shlex.join(command)} failed:\n{run.stderr[-4000:]}")
        os.replace(built, target)
    return target
