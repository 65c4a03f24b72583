"""The machine that a profile is for: this one, measured once and kept, or another that the caller describes."""

from __future__ import annotations

import mmap
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeinfer.backends.native import MachineLimits, best_isa, build_id
from edgeinfer.backends.native.busy import Busy
from edgeinfer.common import devices
from edgeinfer.record_cache import read_record, record_folder, record_name, write_record

_KIND, _FORMAT = "machines", 1
_ROUNDS = 2
_MOST = 1e18
_READ_BYTES, _READS = 2 << 20, 24  # about the size of an expert


@dataclass(frozen=True)
class Machine:
    """What a pass is limited by.

    memory_bytes: for the process.  read_bytes_per_second: from memory.  multiply_adds_per_second: of 8-bit integers;
    both None where nothing needs them.  disk_bytes_per_second: of reads of some MB at random places, None where it is
    not known.  given: the names of the figures that the caller gave; the others are of this machine.  is_disturbed:
    other processes had the cores while it was measured, so that it can do more.
    """

    name: str
    n_threads: int
    memory_bytes: int
    read_bytes_per_second: float | None = None
    multiply_adds_per_second: float | None = None
    disk_bytes_per_second: float | None = None
    given: tuple[str, ...] = ()
    is_disturbed: bool = False

    @property
    def is_here(self) -> bool:
        """Whether passes are expected to take as long as on this machine."""
        return not {"bandwidth", "compute"} & set(self.given)


@dataclass(frozen=True)
class Wishes:
    """What a caller says of another machine; None is as here. memory: bytes.  The others: bytes, or multiply-adds of
    8-bit integers, a second.
    """

    memory: int | None = None
    bandwidth: float | None = None
    compute: float | None = None
    disk: float | None = None


def this_machine(n_threads: int, needs_limits: bool) -> Machine:
    """This machine. Its limits are measured if they are needed, in some tenths of a second, and kept.

    What is measured while others have the cores is not kept.
    """
    isa = best_isa()
    key = record_name(_FORMAT, devices.cpu_name(), n_threads, isa, build_id())
    limits, is_disturbed = _limits_in(read_record(record_folder(_KIND), key)), False
    if limits is None and needs_limits:
        limits, is_disturbed = _measured(isa, n_threads)
        if not is_disturbed:
            write_record(record_folder(_KIND), key, vars(limits))
    here = Machine(devices.cpu_name(), n_threads, devices.available_memory(), is_disturbed=is_disturbed)
    if limits is None:
        return here
    read, compute = limits.read_bytes_per_second, limits.int8_multiply_adds_per_second
    return replace(here, read_bytes_per_second=read, multiply_adds_per_second=compute)


def _measured(isa: str, n_threads: int) -> tuple[MachineLimits, bool]:
    """The limits, and whether others had the cores meanwhile."""
    busy = Busy(n_threads)
    found: list[MachineLimits] = []
    busy.seconds(lambda: found.append(MachineLimits.measure(isa, n_threads, _ROUNDS)))
    return found[0], busy.was_disturbed


def described(here: Machine, wishes: Wishes) -> Machine:
    """The machine that a caller describes; what is left out is as here."""
    given = tuple(name for name, value in vars(wishes).items() if value is not None)
    return Machine(
        here.name,
        here.n_threads,
        wishes.memory or here.memory_bytes,
        wishes.bandwidth or here.read_bytes_per_second,
        wishes.compute or here.multiply_adds_per_second,
        wishes.disk or here.disk_bytes_per_second,
        given,
        here.is_disturbed,
    )


def measure_disk(path: Path, seconds: float = 0.1) -> float | None:
    """Bytes a second of reads at random places of a file, past the page cache; None where the system has no such reads.

    The reads of one thread: an expert cache reads with three, which some disks answer faster.
    """
    done, started = 0, time.perf_counter()
    places = random.Random(1)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return None
    try:
        n_places = max(1, os.fstat(descriptor).st_size // _READ_BYTES)
        with mmap.mmap(-1, _READ_BYTES) as buffer, suppress(OSError):
            for _ in range(_READS):
                done += os.preadv(descriptor, [buffer], _READ_BYTES * places.randrange(n_places))
                if time.perf_counter() - started > seconds:
                    break
    finally:
        os.close(descriptor)
    return done / (time.perf_counter() - started) or None


def _limits_in(record: Any) -> MachineLimits | None:
    """What was kept, None for anything else."""
    try:
        limits = MachineLimits(**{name: float(value) for name, value in record.items()})
    except (AttributeError, TypeError, ValueError):
        return None
    return limits if 0 < min(vars(limits).values()) < _MOST else None
