"""Every run of tests ends, and names the test that crashed or did not come back."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
from scheduling import SLOWEST, pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]
HELPERS = """
import ctypes, os, time
import pytest

def hang_in(library):
    # A mutex that is locked twice: no signal ends it, as one would end pause() and sleep().
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

def keep_the_lock():
    hang_in(ctypes.PyDLL(None))

def release_the_lock():
    hang_in(ctypes.CDLL(None))
"""
# What tests do, and whether the process ends with them. Limits are short for what hangs, and else such that a machine
# may do something else for seconds.
ENDINGS = {
    "aborts": ("os.abort()", True),
    "segfaults": ("ctypes.string_at(8)", True),
    "exits": ("os._exit(0)", True),
    "is_killed": ("os.kill(os.getpid(), 9)", True),
    "hangs_in_python": ("time.sleep(600)", False),
    "hangs_in_native_code_that_keeps_the_lock": ("keep_the_lock()", True),
    "hangs_in_native_code_that_releases_the_lock": ("release_the_lock()", True),
}
N_AT_ONCE = 4
Result: TypeAlias = tuple[int, str]  # exit status and output
Run: TypeAlias = Future[Result]
PASSES = "def test_passes_{}(): pass\n"


def run_suite(folder: Path, files: dict[str, str], *options: str) -> Result:
    """Exit status and output of a run of these files with the settings of this project, and shorter limits."""
    for name, text in files.items():
        (folder / name).write_text(HELPERS + text)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    for plugin in ("xdist.plugin", "pytest_timeout", "time_limits", "scheduling", "no:cacheprovider"):
        command += ["-p", plugin]
    command += ["-rA", "--color=no", *options, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in ("ADDOPTS", "PLUGINS", "TIMEOUT", "XDIST_WORKER", "XDIST_WORKER_COUNT"):
        environment.pop(f"PYTEST_{name}", None)
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    return run.returncode, run.stdout + run.stderr


def suite(files: dict[str, str], *options: str) -> pytest.MarkDecorator:
    """Of a test: the files and options of the run whose end it looks at."""
    return pytest.mark.suite(files, *options)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """The runs of all tests of this file, some at the same time: mostly they wait for a limit."""
    items = [item for item in request.session.items if item.path == request.path]
    suites = {item.name: mark.args for item in items if (mark := item.get_closest_marker("suite"))}
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        yield {name: pool.submit(run_suite, tmp_path_factory.mktemp("suite"), *args) for name, args in suites.items()}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def result(request: pytest.FixtureRequest, started: dict[str, Run]) -> Result:
    """Of the run of this test."""
    return started[request.node.name].result()


def in_processes(n: int) -> list[str]:
    return ["-n", str(n), "--dist", "loadfile", "--no-loadscope-reorder"]


def outcomes(output: str, outcome: str) -> list[str]:
    """The tests of the summary with this outcome, FAILED for instance; one that is reported twice is there twice."""
    return sorted(re.findall(rf"^{outcome} (\S+)", output, re.MULTILINE))


def with_endings() -> str:
    text = ""
    for name, (what, ends_the_process) in ENDINGS.items():
        # In Python, pytest-timeout needs some of what comes after its limit.
        seconds = (2 if ends_the_process else 20) if "hangs" in name else 60
        text += f"@pytest.mark.timeout({seconds})\ndef test_{name}(): {what}\n{PASSES.format('after_' + name)}"
    return text


@suite(
    {"test_a.py": PASSES.format(1) + PASSES.format(2), "test_b.py": with_endings(), "test_c.py": PASSES.format(1)},
    *in_processes(2),
    "--timeout=60",
)
def test_a_test_that_ends_its_process_is_a_failure_and_the_others_are_run(result: Result) -> None:
    status, output = result
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert outcomes(output, "FAILED") == sorted(f"test_b.py::test_{name}" for name in ENDINGS), output
    passed = ["test_a.py::test_passes_1", "test_a.py::test_passes_2", "test_c.py::test_passes_1"]
    passed += [f"test_b.py::test_passes_after_{name}" for name in ENDINGS]
    assert outcomes(output, "PASSED") == sorted(passed), output
    for name, (_, ends_the_process) in ENDINGS.items():
        assert (f"crashed while running 'test_b.py::test_{name}'" in output) is ends_the_process, name
    # The stacks of faulthandler.
    assert "Fatal Python error: Aborted" in output and "Fatal Python error: Segmentation fault" in output
    assert re.search(r"Timeout \(0:00:03\)!\nThread .*\n(.*\n)*?.* in test_hangs_in_native_code_that_keeps_", output)


PASSING = {f"test_{i}.py": PASSES.format(1) + PASSES.format(2) for i in range(4)}
CRASHING = {f"test_{i}.py": "def test_aborts(): os.abort()\n" + PASSES.format(1) for i in range(4, 8)}
OF_ONE_TEST = {"test_8.py": PASSES.format(1), "test_9.py": "def test_aborts(): os.abort()\n"}


@suite(PASSING | CRASHING | OF_ONE_TEST, *in_processes(2))
def test_processes_that_both_crash_leave_no_test_behind(result: Result) -> None:
    """pytest-xdist's own loadfile waits for ever: for files that are done, and for a file of one test."""
    status, output = result
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert outcomes(output, "FAILED") == [f"{file}::test_aborts" for file in [*CRASHING, "test_9.py"]], output
    assert len(outcomes(output, "PASSED")) == 4 * 2 + 4 + 1, output


def with_fixtures_that_crash() -> str:
    fixtures = ["os.abort(); yield", "yield; os.abort()", "keep_the_lock(); yield", "yield; keep_the_lock()"]
    text = PASSES.format(1)
    for i, fixture in enumerate(fixtures):
        text += f"@pytest.fixture\ndef crashing_{i}(): {fixture}\ndef test_{i}(crashing_{i}): pass\n"
    # A failure takes the limits of pytest-timeout away, so that a debugger can look at it.
    return text + "def test_fails(crashing_3): assert False\n" + PASSES.format(2)


@suite({"test_a.py": with_fixtures_that_crash()}, *in_processes(1), "--timeout=8", "--max-worker-restart=5")
def test_a_fixture_that_ends_its_process_names_its_test(result: Result) -> None:
    status, output = result
    assert status == pytest.ExitCode.TESTS_FAILED, output
    for name in ("test_0", "test_1", "test_2", "test_3", "test_fails"):
        assert f"crashed while running 'test_a.py::{name}'" in output, output
    assert {"test_a.py::test_passes_1", "test_a.py::test_passes_2"} <= set(outcomes(output, "PASSED")), output


def with_module(module: str, *processes: str) -> pytest.MarkDecorator:
    files = {"test_a.py": PASSES.format(1), "test_b.py": f"{module}\n{PASSES.format(1)}"}
    return suite(files, *processes, "--timeout=8")


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(None, marks=with_module("keep_the_lock()", *in_processes(2), "--max-worker-restart=1")),
        pytest.param(None, marks=with_module("os.abort()")),
        pytest.param(None, marks=with_module("keep_the_lock()")),
    ],
    ids=["hangs in one of 2 processes", "crashes", "hangs"],
    indirect=True,
)
def test_a_module_that_ends_the_process_or_hangs_is_named(result: Result) -> None:
    status, output = result
    assert status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), output
    assert re.search(r'test_b.py", line \d+ in <module>', output), output


CRASHES_ONCE = "import pathlib\ntry: pathlib.Path('crashed').touch(exist_ok=False)\nexcept FileExistsError: pass\n"


@suite({"test_a.py": CRASHES_ONCE + "else: os.abort()\n" + PASSES.format(1)}, *in_processes(1))
def test_a_crash_without_a_test_is_a_failure(result: Result) -> None:
    """Once, while modules are imported; then all tests pass."""
    status, output = result
    assert status == pytest.ExitCode.TESTS_FAILED and outcomes(output, "PASSED") == ["test_a.py::test_passes_1"], output
    assert "Test processes crashed outside of a test: 1" in output


def with_a_hang(hang: str, *processes: str) -> pytest.MarkDecorator:
    files = {"test_a.py": PASSES.format(1) + f"def test_hangs(): {hang}\n", "test_b.py": PASSES.format(1)}
    return suite(files, *processes, "--timeout=0", "--session-timeout=30")


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(None, marks=with_a_hang("keep_the_lock()", *in_processes(2))),
        pytest.param(None, marks=with_a_hang("time.sleep(600)")),
        pytest.param(None, marks=with_a_hang("release_the_lock()")),
    ],
    ids=["2 processes, native", "python", "native"],
    indirect=True,
)
def test_the_whole_run_has_a_limit(result: Result) -> None:
    status, output = result
    assert status == pytest.ExitCode.INTERRUPTED, output
    assert re.search(r"The run takes too long .* Running: test_a.py::test_hangs \(for \d+ s\)", output), output


def test_slow_files_are_run_first() -> None:
    assert all((ROOT / "tests" / file).exists() for file in SLOWEST)
    files = ["models/test_gguf.py", *reversed(SLOWEST), "models/test_spec.py", "models/test_gguf.py"]
    items = [SimpleNamespace(path=ROOT / "tests" / file) for file in files]
    pytest_collection_modifyitems(items)
    after = ["models/test_gguf.py", "models/test_spec.py", "models/test_gguf.py"]
    assert [item.path for item in items] == [ROOT / "tests" / file for file in [*SLOWEST, *after]]


LONGER = "@pytest.mark.timeout(60)\ndef test_takes_longer(): ctypes.PyDLL(None).usleep(8_000_000)\n"
SHORTER = "@pytest.mark.timeout(1)\ndef test_takes_too_long(): keep_the_lock()\n"


@suite({"test_a.py": LONGER + SHORTER}, *in_processes(1), "--timeout=4")
def test_a_test_can_have_a_limit_of_its_own(result: Result) -> None:
    status, output = result
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert outcomes(output, "PASSED") == ["test_a.py::test_takes_longer"], output
    assert outcomes(output, "FAILED") == ["test_a.py::test_takes_too_long"], output
