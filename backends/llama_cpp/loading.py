"""Loading a model into a process of llama.cpp, with extra buffers or, where it crashes with them, without."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgeinfer.backends.base import Progress
from edgeinfer.backends.llama_cpp.process import Ended, Process
from edgeinfer.common import devices
from edgeinfer.common.errors import BackendCrashed, warn
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import MemoryUse
from edgeinfer.models import ModelSizes
from edgeinfer.record_cache import read_record, record_folder, write_record

_KIND = "llama.cpp"  # of what is remembered


@dataclass(frozen=True)
class Wanted:
    """What is to be loaded: a file, absolute, its name in messages, how, and in which buffers."""

    path: str
    name: str
    settings: LoadSettings
    extra_buffers: bool = True

    def on(self, process: Process, progress: Progress | None) -> Loaded:
        """Load it. Raises what llama.cpp says of it, and Ended; the process is of no use then."""

        def report() -> None:
            if progress is not None:
                progress(min(process.shared.share, 0.99))

        options = self.path, self.name, self.extra_buffers, asdict(self.settings)
        try:
            reply = process.ask("load", *options, meanwhile=report)
        except BaseException:
            process.close()
            raise
        return Loaded(self, process, sizes_of(reply["sizes"]), MemoryUse(*reply["bytes"]))


@dataclass(frozen=True)
class Loaded:
    """A model in a process, as it was wanted."""

    wanted: Wanted
    process: Process
    sizes: ModelSizes
    use: MemoryUse


def load(wanted: Wanted, process: Process, progress: Progress | None = None) -> Loaded:
    """Load a model; where llama.cpp crashes with extra buffers, with a RuntimeWarning without them.

    That is remembered for this llama-cpp-python on this CPU. Raises UnsupportedModel, BudgetExceeded, BackendCrashed.
    """
    try:
        return wanted.on(process, progress)
    except Ended as end:
        crash = end
        if not (end.is_fault and wanted.extra_buffers):
            raise crashed(wanted.name, "while it loaded the model", end) from end
    try:
        loaded = replace(wanted, extra_buffers=False).on(Process(), progress)
    except Ended as end:
        raise crashed(wanted.name, "while it loaded the model", end) from end
    remember_crash(process.build)
    warn(
        f"llama.cpp crashes on this machine with its extra buffers (AMX, repacked weights): {crash}; "
        "it runs without them, more slowly"
    )
    return loaded


def crashed(name: object, when: str, end: Ended) -> BackendCrashed:
    """The error that says that llama.cpp ended its process."""
    return BackendCrashed(f"{name}: llama.cpp crashed {when}: {end}; it cannot run this file here")


def sizes_of(record: dict[str, Any]) -> ModelSizes:
    """Sizes as a reply has them."""
    return ModelSizes(**record)


# ---- What is remembered ----------------------------------------------------------------------------------------------


def uses_extra_buffers(build: str) -> bool:
    """Whether llama.cpp is to use extra buffers: unless it crashed with them on this CPU."""
    record = read_record(record_folder(_KIND), _key(build))
    return not (isinstance(record, dict) and record.get("extra_buffers") is False)


def remember_crash(build: str) -> None:
    """Note that it crashed with them; where that cannot be written, it is found out each time."""
    record = {"extra_buffers": False, "build": build, "cpu": devices.cpu_name()}
    write_record(record_folder(_KIND), _key(build), record)


def _key(build: str) -> str:
    return hashlib.sha256(repr((build, devices.cpu_name())).encode()).hexdigest()[:32]
