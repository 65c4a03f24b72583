"""Compiles an engine with Verilator and the C++ compiler, and keeps the library in the user's folder for caches."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.common.errors import BackendUnavailable, SimulationError
from edgeinfer.common.files import written_whole
from edgeinfer.hls.compiler import build_folder, cpp_compiler
from edgeinfer.hls.cycles import TIMINGS
from edgeinfer.hls.geometry import Geometry

HERE = Path(__file__).parent
RTL = HERE.parent / "rtl"
TOPS = {"base3": "ei_engine_g5", "g3x5": "ei_engine_g3", "2bit": "ei_engine_add"}
SECONDS = 300  # for a compiler
_COMPILE = ("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-w", "-DVM_COVERAGE=0", "-DVM_SC=0", "-DVM_TRACE=0")


@dataclass(frozen=True)
class Parameters:
    """Of the Verilog modules: a geometry, and what sizes it is made for."""

    geometry: Geometry
    acc_bits: int
    max_steps: int
    max_tiles: int

    @property
    def verilog(self) -> dict[str, int]:
        """Parameters of the top module."""
        return {
            "ROWS": self.geometry.rows,
            "TABLES": self.geometry.tables,
            "ACC_BITS": self.acc_bits,
            "MAX_STEPS": self.max_steps,
            "MAX_TILES": self.max_tiles,
        }

    @property
    def driver(self) -> dict[str, int]:
        """Macros of driver.cpp."""
        code = self.geometry.code
        return {
            "ROWS": self.geometry.rows,
            "TABLES": self.geometry.tables,
            "TRITS": code.n_trits,
            "INDEX_BITS": code.n_bits,
            "ACC_BITS": self.acc_bits,
            "FILL": TIMINGS[code.name].step,
        }


def library(parameters: Parameters) -> Path:
    """The shared library of an engine, compiled if it is not there yet.

    Raises BackendUnavailable where Verilator or a C++ compiler is missing, SimulationError where they fail.
    """
    verilator, compiler = _command("verilator", "verilator"), cpp_compiler()
    version = _output([verilator, "--version"])
    sources = sorted([*RTL.glob("*.sv"), HERE / "driver.cpp"])
    choices = [parameters.geometry.encoding, parameters.verilog, parameters.driver]
    facts = [version, _output([*compiler, "--version"]), *choices, *(path.read_bytes() for path in sources)]
    folder = build_folder("rtl")
    path = folder / f"{_name(facts)}.so"
    if not path.exists():
        runtime = _runtime(folder, verilator, compiler, version)
        with tempfile.TemporaryDirectory(prefix="edgeinfer-rtl-") as work:
            built = _build(Path(work), parameters, verilator, compiler, runtime)
            with written_whole(path, durable=False) as file:
                file.write(built.read_bytes())
    return path


def check_tools() -> None:
    """Raises BackendUnavailable where Verilator or a C++ compiler is missing."""
    _command("verilator", "verilator")
    cpp_compiler()


def _build(work: Path, parameters: Parameters, verilator: str, compiler: Sequence[str], runtime: Path) -> Path:
    """The library, in a folder of its own."""
    top = TOPS[parameters.geometry.encoding]
    values = [f"-G{name}={value}" for name, value in parameters.verilog.items()]
    flags = ["--cc", "-O3", "--assert", "--prefix", "Vengine", "-Mdir", str(work), "-y", str(RTL), "--top-module", top]
    _run([verilator, *flags, *values, str(RTL / f"{top}.sv")])
    everything = work / "everything.cpp"
    sources = [HERE / "driver.cpp", *sorted(work.glob("Vengine*.cpp"))]
    everything.write_text("".join(f'#include "{source}"\n' for source in sources))
    macros = [f"-D{name}={value}" for name, value in parameters.driver.items()]
    include = [f"-I{work}", *_includes(verilator)]
    built = work / "engine.so"
    _run([*compiler, "-O2", *_COMPILE, *macros, *include, "-shared", "-o", str(built), str(everything), str(runtime)])
    return built


def _runtime(folder: Path, verilator: str, compiler: Sequence[str], version: str) -> Path:
    """Verilator's own C++, compiled once."""
    path = folder / f"{_name([version, _output([*compiler, '--version']), _COMPILE])}.o"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="edgeinfer-rtl-") as work:
            includes = _includes(verilator)
            root = Path(includes[0].removeprefix("-I"))
            source, built = Path(work) / "runtime.cpp", Path(work) / "runtime.o"
            names = ("verilated.cpp", "verilated_threads.cpp")
            source.write_text("".join(f'#include "{root / name}"\n' for name in names if (root / name).exists()))
            _run([*compiler, "-O0", *_COMPILE, *includes, "-c", "-o", str(built), str(source)])
            with written_whole(path, durable=False) as file:
                file.write(built.read_bytes())
    return path


def _includes(verilator: str) -> list[str]:
    """Folders of Verilator's headers."""
    root = os.environ.get("VERILATOR_ROOT") or _output([verilator, "--getenv", "VERILATOR_ROOT"]).strip()
    return [f"-I{root}/include", f"-I{root}/include/vltstd"]


def _command(name: str, package: str) -> str:
    """Where a command is. Raises BackendUnavailable, which says what to install."""
    found = shutil.which(name)
    if found is None:
        raise BackendUnavailable(f"the Verilog engine needs {name}, which is not installed: apt install {package}")
    return found


def _output(command: Sequence[str]) -> str:
    return _run(command).stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Raises SimulationError with what the command said where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise SimulationError(f"{command[0]} must be done in {SECONDS} s: it was not and was ended") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise SimulationError(f"{command[0]} failed with status {done.returncode}:\n{said}")
    return done


def _name(facts: Sequence[object]) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
