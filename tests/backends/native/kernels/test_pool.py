"""The pool of threads, with more of them than cores: what one does next rests on a phase being over."""

import shutil
import subprocess
from pathlib import Path

from parts import missing

ROOT = Path(__file__).parents[4]


def test_no_thread_leaves_a_phase_before_its_end_or_sleeps_when_it_is_woken(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        missing("compiler", "g++ is needed to build the pool alone")
    native = ROOT / "backends" / "native"
    sources = [Path(__file__).with_name("pool_stress.cpp"), native / "pool.cpp", native / "platform.cpp"]
    command = [compiler, "-O2", "-std=c++20", "-pthread", f"-I{native}", *map(str, sources), "-o", tmp_path / "stress"]
    subprocess.run(command, check=True, capture_output=True)
    run = subprocess.run([tmp_path / "stress"], check=True, capture_output=True, text=True, timeout=280)
    assert run.stdout.strip() == "0"
