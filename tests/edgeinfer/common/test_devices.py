"""Cores and memory, read from made-up /proc and /sys trees."""

import os

import pytest

from edgeinfer.common import devices


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Four cores of two threads, all allowed; 8 GiB available; version 2 control groups without limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for cpu in range(8):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", "0")
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", str(cpu % 4))
    write(tmp_path, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/shell\n")
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: Some  CPU 9000\n")
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_two_threads_of_one_core_count_once(machine):
    assert devices.physical_cores(machine) == devices.default_n_threads(machine) == 4


def test_equal_core_numbers_of_two_sockets_are_two_cores(machine):
    for cpu in range(4):
        write(machine, f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", "1")
    assert devices.physical_cores(machine) == 8


def test_only_cores_that_the_process_may_use_count(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4})  # 0 and 4 share a core
    assert devices.physical_cores(machine) == 2


def test_without_a_topology_each_cpu_is_a_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert devices.physical_cores(tmp_path) == 3


@pytest.mark.parametrize("quota, n_threads", [("max 100000", 4), ("270000 100000", 2), ("50000 100000", 1)])
def test_a_cpu_quota_limits_the_threads_to_whole_cores(machine, quota, n_threads):
    write(machine, "sys/fs/cgroup/user.slice/cpu.max", quota)
    assert devices.default_n_threads(machine) == n_threads


def test_a_version_1_quota_counts_too(machine):
    write(machine, "proc/self/cgroup", "4:cpu,cpuacct:/box\n")
    write(machine, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "300000\n")
    write(machine, "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    assert devices.default_n_threads(machine) == 3
    write(machine, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1\n")
    assert devices.default_n_threads(machine) == 4


def test_without_limits_the_available_memory_is_the_machines(machine):
    assert devices.available_memory(machine) == 8 << 30


def test_the_tightest_control_group_on_the_way_up_decides(machine):
    for folder, limit in (("user.slice/shell", 6 << 30), ("user.slice", 4 << 30)):
        write(machine, f"sys/fs/cgroup/{folder}/memory.max", str(limit))
        write(machine, f"sys/fs/cgroup/{folder}/memory.current", str(1 << 30))
    assert devices.available_memory(machine) == 3 << 30
    write(machine, "sys/fs/cgroup/user.slice/memory.stat", f"anon 5\ninactive_file {1 << 29}\n")
    assert devices.available_memory(machine) == (3 << 30) + (1 << 29)


def test_a_container_finds_its_limit_where_the_hosts_path_is_hidden(machine):
    write(machine, "proc/self/cgroup", "0::/docker/0123abc\n")
    write(machine, "sys/fs/cgroup/memory.max", str(2 << 30))
    write(machine, "sys/fs/cgroup/memory.current", "0")
    assert devices.available_memory(machine) == 2 << 30


def test_a_version_1_memory_limit_counts_and_its_huge_number_is_none(machine):
    write(machine, "proc/self/cgroup", "9:memory:/box\n")
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(9223372036854771712))
    write(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", "0")
    assert devices.available_memory(machine) == 8 << 30
    write(machine, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", str(1 << 30))
    write(machine, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", str(1 << 29))
    assert devices.available_memory(machine) == 1 << 29


def test_more_used_than_allowed_leaves_nothing(machine):
    write(machine, "sys/fs/cgroup/memory.max", "100")
    write(machine, "sys/fs/cgroup/memory.current", "500")
    assert devices.available_memory(machine) == 0


def test_the_name_of_the_cpu_is_cleaned(machine):
    assert devices.cpu_name(machine) == "Some CPU 9000"


def test_this_machine_has_a_core_memory_and_a_name():
    assert 1 <= devices.default_n_threads() <= devices.physical_cores() <= (os.cpu_count() or 1)
    assert devices.available_memory() > 1 << 20
    assert devices.cpu_name()


def test_the_memory_of_the_machine_is_read_whatever_the_limits_are(machine):
    write(machine, "sys/fs/cgroup/user.slice/memory.max", "1000")
    write(machine, "sys/fs/cgroup/user.slice/memory.current", "1000")
    assert devices.machine_available_memory(machine) == 8 << 30 and devices.total_memory(machine) == 16 << 30
    assert devices.memory_stall_seconds(machine) == 0
    lines = ["some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000", "full avg10=0.00 avg60=0.00 avg300=0.00 total=7"]
    write(machine, "proc/pressure/memory", "\n".join(lines))
    assert devices.memory_stall_seconds(machine) == 2.5


def test_limits_of_the_process_leave_what_it_has_not_taken_and_threads_do_not_reserve(machine):
    assert devices.memory_within_limits(2, machine) is None
    write(machine, "proc/self/status", "Name: python\nVmSize: 2097152 kB\nVmData: 1048576 kB\n")
    limits = "Max data size {} unlimited bytes\nMax stack size 8388608 unlimited bytes\n"
    limits += "Max address space {} unlimited bytes\n"
    write(machine, "proc/self/limits", limits.format("unlimited", "unlimited"))
    assert devices.memory_within_limits(2, machine) is None
    write(machine, "proc/self/limits", limits.format(3 << 30, "unlimited"))
    assert devices.memory_within_limits(2, machine) == (2 << 30) - 2 * (8 << 20)
    write(machine, "proc/self/limits", limits.format(3 << 30, 3 << 30))
    assert devices.memory_within_limits(2, machine) == (1 << 30) - 2 * (72 << 20)
    write(machine, "proc/self/limits", limits.format(1000, "unlimited"))
    assert devices.memory_within_limits(2, machine) == 0
