"""Cores, memory and CPU name, as this process may use them.

Limits of containers count: those of the control group (cgroup v2 and v1) are read beside those of the machine. `root`
is where /proc and /sys are found, for the tests.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_STACK = 8 << 20  # bytes of addresses that a thread has for its stack
_HEAP = 64 << 20  # and that the C library sets aside for a thread that allocates memory


def default_n_threads(root: Path = _ROOT) -> int:
    """Threads that a forward pass should use: one per physical core that this process may use.

    Two threads on one core share its vector units. With a CPU quota: as many as whole cores fit into it, as the threads
    of a pass wait for the one that is throttled.
    """
    quota = _cpu_quota(root)
    cores = physical_cores(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def physical_cores(root: Path = _ROOT) -> int:
    """Physical cores among the logical CPUs that this process may run on, at least 1."""
    if not hasattr(os, "sched_getaffinity"):
        import psutil  # type: ignore[import-untyped]

        return int(psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    return len({_core_of(cpu, root) for cpu in os.sched_getaffinity(0)})


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can still take without swapping and without being killed."""
    limits = [_memory_available(root), *_cgroup_memory(root)]
    return max(0, min(limits))


def memory_within_limits(n_threads: int, root: Path = _ROOT) -> int | None:
    """Bytes that this process can still take before `ulimit -d` or `ulimit -v` refuses them, None without such limits.

    n_threads: that it will start, each of which reserves addresses.
    """
    limits = list(_process_limits(root, n_threads))
    return max(0, min(limits)) if limits else None


def machine_available_memory(root: Path = _ROOT) -> int:
    """Bytes that the machine has left, whatever the limits of this process are."""
    return _memory_available(root)


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of the machine's memory."""
    return _meminfo("MemTotal", root)


def memory_stall_seconds(root: Path = _ROOT) -> float:
    """Seconds since the machine started in which a task waited for memory, 0 where the system does not count them."""
    for line in _read(root / "proc/pressure/memory").splitlines():
        kind, *fields = line.split()
        totals = [field.removeprefix("total=") for field in fields if field.startswith("total=")]
        if kind == "some" and totals and totals[0].isdigit():
            return int(totals[0]) / 1e6
    return 0.0


def busy_seconds(root: Path = _ROOT) -> float:
    """CPU seconds that all programs took since the machine started, with what its host took of a virtual machine."""
    for line in _read(root / "proc/stat").splitlines():
        name, *fields = line.split()
        if name == "cpu" and len(fields) >= 8 and all(field.isdigit() for field in fields[:8]):
            user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, fields[:8])
            return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.system)


def cpu_name(root: Path = _ROOT) -> str:
    """Name of the CPU as the maker gives it, or the architecture where the system does not say."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _core_of(cpu: int, root: Path) -> tuple[str, str]:
    """Socket and core, the same for all logical CPUs of one core; its own number if the system does not tell."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    socket, core = _read(topology / "physical_package_id").strip(), _read(topology / "core_id").strip()
    return (socket, core) if core else ("", f"cpu{cpu}")


def _cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time that the control groups allow, None without a limit."""
    quotas = []
    for folder in _cgroup_folders(root, ""):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    for folder in _cgroup_folders(root, "cpu"):
        limit, length = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if limit and length:
            quotas.append(limit / length)
    return min(quotas, default=None)


def _memory_available(root: Path) -> int:
    return _meminfo("MemAvailable", root)


def _meminfo(name: str, root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total if name == "MemTotal" else memory.available)


def _process_limits(root: Path, n_threads: int) -> Iterator[int]:
    """Bytes left under RLIMIT_DATA and RLIMIT_AS, without what threads reserve."""
    status = _read(root / "proc/self/status")
    for line in _read(root / "proc/self/limits").splitlines():
        for name, used_as, of_thread in (
            ("Max data size", "VmData", _STACK),
            ("Max address space", "VmSize", _STACK + _HEAP),
        ):
            value = line.removeprefix(name).split()
            used = re.search(rf"^{used_as}:\s+(\d+) kB", status, re.MULTILINE)
            if line.startswith(name) and value and value[0].isdigit() and used:
                yield int(value[0]) - (int(used[1]) << 10) - n_threads * of_thread


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Bytes left under each limit that applies. Inactive file pages count as free: the kernel reclaims them."""
    for controller, limit_name, usage_name, reclaimable_name in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroup_folders(root, controller):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is None or usage is None:
                continue
            statistics = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
            yield limit - usage + int(statistics.get(reclaimable_name, 0))


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those around it; controller "" is version 2.

    In a container the path may be one that only the host sees; the topmost folder is then the container's own.
    """
    mount = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controller in controllers.split(","):
            inner = mount / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount))
            return


def _number(path: Path) -> int | None:
    """Non-negative integer in a file, None if there is none ("max", -1, no file)."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
