"""llama.cpp that runs a mapped model with a steered page cache: the strongest that it does without changes.

Its experts are mapped without read-ahead (MADV_RANDOM), and from its callback the kernel is told to read those that a
layer has chosen (MADV_WILLNEED). The callback is C, see steering.c, and compiled with `cc`.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.models.gguf import ModelFile

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from late import Late  # noqa: E402

if TYPE_CHECKING:
    import llama_cpp
else:
    llama_cpp = Late("llama_cpp")

PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
PAGE = 4096


@dataclass(frozen=True)
class Slices:
    """Where a tensor of experts lies in a file."""

    layer: int
    part: int  # of PARTS, or len(PARTS) for the router
    file: str
    offset: int
    n_experts: int
    n_bytes: int  # of one expert


def expert_slices(path: Path) -> list[Slices]:
    """All experts and routers of a model."""
    found = []
    with ModelFile.open(path) as file:
        for name, info in file.tensors.items():
            _, _, rest = name.partition("blk.")
            layer, _, role = rest.removesuffix(".weight").partition(".")
            if role in (*PARTS, "ffn_gate_inp"):
                part = PARTS.index(role) if role in PARTS else len(PARTS)
                n = info.shape[0]
                place = str(file.paths[info.part].resolve())
                found.append(Slices(int(layer), part, place, info.offset, n, info.n_bytes // n))
    return found


def expert_bytes(slices: Sequence[Slices]) -> int:
    return sum(s.n_experts * s.n_bytes for s in slices if s.part < len(PARTS))


def compile_steering(folder: Path) -> Path:
    """The library made of steering.c, in a folder."""
    library, source = folder / "steering.so", Path(__file__).with_name("steering.c")
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return library


class Steering:
    """The callback, and what it needs to know. n_predicted: experts of the next layer that are read ahead."""

    def __init__(self, library: Path, n_predicted: int = 0) -> None:
        self.n_predicted = n_predicted
        self.library = ctypes.CDLL(str(library))
        self.callback: Any = llama_cpp.ggml_backend_sched_eval_callback(("steer", self.library))

    def start(self, slices: Sequence[Slices]) -> None:
        """Once the model is mapped."""
        starts = mapped_files()
        system = ctypes.CDLL(None, use_errno=True)
        for s in slices:
            address = starts(s.file, s.offset)
            if s.part == len(PARTS):
                self.library.steer_router(s.layer, ctypes.c_void_p(address))
                self.library.steer_sizes(s.n_experts, self.n_predicted)
                continue
            self.library.steer_slices(s.layer, s.part, ctypes.c_void_p(address), ctypes.c_size_t(s.n_bytes))
            first = address // PAGE * PAGE
            length = ctypes.c_size_t(address + s.n_experts * s.n_bytes - first)
            if system.madvise(ctypes.c_void_p(first), length, mmap.MADV_RANDOM):
                raise SystemExit(f"madvise: error {ctypes.get_errno()}")


def mapped_files() -> Any:
    """(file, offset) to the address at which this process has mapped it."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *names = line.split(maxsplit=5)
        if names:
            first, last = (int(end, 16) for end in span.split("-"))
            maps.append((names[0], int(offset, 16), first, last))

    def address_of(file: str, offset: int) -> int:
        for name, start, first, last in maps:
            if name == file and start <= offset < start + last - first:
                return first + offset - start
        raise SystemExit(f"{file} is not mapped at {offset}")

    return address_of
