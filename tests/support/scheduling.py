"""A plugin of pytest: which process of pytest-xdist runs which files; slow files first, and on after a crash."""

from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_TESTS = Path(__file__).parents[1]
# By the processor time that they take; all others take less. But the process with the one test of the first file
# keeps the third file waiting after it, which is short.
SLOWEST = (
    "backends/native/kernels/test_sanitizers.py",
    "backends/native/kernels/test_other_cpus.py",
    "backends/native/kernels/test_pool.py",
    "hls/test_chain.py",
    "hls/test_netlist.py",
    "hls/test_engines.py",
    "hls/test_csim.py",
    "hls/test_synth.py",
    "edgeinfer/cli/test_cli.py",
    "edgeinfer/test_environment.py",
    "backends/native/test_native.py",
    "backends/llama_cpp/test_llama_cpp.py",
    "edgeinfer/test_engine.py",
    "edgeinfer/training/test_distill.py",
    "backends/test_head_sessions.py",
    "edgeinfer/speculation/test_speculation.py",
    "backends/opencl/test_opencl.py",
    "backends/test_reference.py",
    "edgeinfer/speculation/drafters/test_overlapped.py",
    "repo/test_time_limits.py",
    "repo/test_built_wheel.py",
    "backends/test_draft_sessions.py",
    "repo/test_typing.py",
)


class FileScheduling(LoadFileScheduling):
    """The scheduling of `--dist loadfile` in pytest-xdist 3.8, which goes on after a crash.

    xdist's own gives the test that crashed to the next process, which crashes too, until none is started. It hands out
    files again that are done, and a single test to a process that begins none before it knows the next: both wait for
    ever. And it gives work to processes that are still importing.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """A process has ended. Returns the test in which it crashed, if it did, which is not run again."""
        crashed = None
        left: dict[str, dict[str, bool]] = {}
        for file, tests in self.assigned_work.pop(node).items():
            remaining = [test for test, is_done in tests.items() if not is_done]
            if remaining and crashed is None:
                crashed = remaining.pop(0)
            if remaining:
                left[file] = dict.fromkeys(remaining, False)
        if self.collection is None:
            self.registered_collections.pop(node, None)
        self.workqueue.update(left)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Two tests at least, as a process begins one only when it knows the next."""
        if node not in self.registered_collections:
            return
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first: what begins last should be short."""
    ranks = {file: rank for rank, file in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(_inside_tests(item.path), len(ranks)))


def _inside_tests(path: Path) -> str:
    """Name of a file below the folder `tests`, or its last part elsewhere."""
    return path.relative_to(_TESTS).as_posix() if path.is_relative_to(_TESTS) else path.name
