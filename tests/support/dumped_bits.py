"""tests/backends/native/kernels/dump_bits.cpp: how it is built, and what it prints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_dump(name: str, *configure: str) -> Path:
    """The program, built in build/<name> with these options of CMake."""
    build = ROOT / "build" / name
    options = ["-DEI_DUMP_BITS=ON", "-DCMAKE_BUILD_TYPE=Release", "-DEI_SETS=all", *configure]
    subprocess.run(["cmake", "-S", ROOT / "backends", "-B", build, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "-j", "2"], check=True, capture_output=True)
    return build / "native" / "dump_bits"


def built_objects() -> list[Path]:
    """Those of the engine that is installed from this tree; none if it is not. A file that was moved leaves its own."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    targets = (ROOT / "build").glob(f"{version}-*/native/CMakeFiles/ei_*.dir")
    objects = (path for target in targets for path in target.rglob("*.o") if source_of(path, target).exists())
    return sorted(objects)


def source_of(path: Path, target: Path) -> Path:
    """Of an object file in the folder of its target."""
    return ROOT / "backends" / "native" / path.relative_to(target).with_suffix("")


def link_dump(program: Path, compiler: str, objects: Iterable[Path]) -> Path:
    """The program with the kernels that the installed engine has, which need not be compiled again."""
    source = ROOT / "tests" / "backends" / "native" / "kernels" / "dump_bits.cpp"
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-pthread", f"-I{ROOT / 'backends' / 'native'}"]
    subprocess.run([compiler, *options, source, *objects, "-o", program], check=True, capture_output=True)
    return program


def hashes_of(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """{instruction set: {what: hash}} of the lines that it prints."""
    hashes: dict[str, dict[str, str]] = {}
    for line in lines:
        isa, what, value = line.split()
        hashes.setdefault(isa, {})[what] = value
    return hashes
