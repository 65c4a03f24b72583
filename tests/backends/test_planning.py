"""Plans of contexts that no machine holds: refused by arithmetic, in little memory, with what would fit."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.onnx import ProviderInfo
from edgeinfer.backends.opencl import OpenCLDevice
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.common.settings import LoadSettings
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_CTX = 2**31 - 1
GIB = 1 << 30

# Loads models in a process of its own, which gets little memory beyond what it has, and writes what came of each.
CHILD = """
import json, resource, sys
import edgeinfer
from edgeinfer.common import devices
from edgeinfer.loading.backend_choice import open_backend
from edgeinfer.common.settings import LoadSettings

backend, paths, options = json.loads(sys.argv[1])
devices.available_memory = lambda: 1 << 30
open_backend(backend)
options = {"n_threads": 2, **options}  # each thread has a stack, and machines have any number of cores
edgeinfer.load(paths[0], backend=backend, n_ctx=64, draft="none", n_threads=2).close()  # libraries take their memory
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), resource.RLIM_INFINITY))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = []
for path in paths:
    try:
        edgeinfer.load(path, backend=backend, **options).close()
        found.append(["loaded", ""])
    except (Exception, MemoryError) as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps([found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


def outcomes(backend: str, paths: list[Path], **options: object) -> tuple[list[list[str]], int]:
    """(error and message) of each model, and by how many bytes memory grew."""
    arguments = json.dumps([backend, list(map(str, paths)), options])
    done = subprocess.run([sys.executable, "-c", CHILD, arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found, kibibytes = json.loads(done.stdout.splitlines()[-1])
    return found, kibibytes << 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind of rotation and of queries that grow, in their fastest way."""
    folder = tmp_path_factory.mktemp("models")
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    grows = {"mistral3.attention.temperature_scale": 0.1, "mistral3.rope.scaling.original_context_length": 1}
    short = {"original_context_length": 100}
    return {
        "plain": write_tiny_model(folder / "plain.gguf", "llama", "Q4_0"),
        "linear": write_tiny_model(folder / "linear.gguf", "llama", "Q4_0", rope_scaling={"factor": 4.0}),
        "yarn": write_tiny_model(folder / "yarn.gguf", "llama", "Q4_0", rope_scaling=yarn),
        "llama3": write_tiny_model(folder / "llama3.gguf", "llama", "Q4_0", rope_freqs=True),
        "longrope": write_tiny_model(folder / "longrope.gguf", "phi3", "Q4_0", rope_freqs=True, rope_scaling=short),
        "windows": write_tiny_model(folder / "windows.gguf", "gemma3", "Q4_0"),
        "grows": write_tiny_model(folder / "grows.gguf", "mistral3", "Q4_0", metadata=grows),
    }


def assert_refused(backend: str, paths: list[Path], **options: object) -> None:
    found, n_grown = outcomes(backend, paths, **{"draft": "none", "n_ctx": N_CTX, **options})
    for kind, message in found:
        assert kind == "BudgetExceeded", (kind, message)
        assert f"at n_ctx {N_CTX}" in message and "too few: n_ctx " in message and " fits (-c " in message
    assert len(found) == len(paths) and n_grown < GIB // 4


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_context_that_no_memory_holds_is_refused_with_what_fits(backend: str, models: dict[str, Path]) -> None:
    assert_refused(backend, list(models.values()))


def test_the_longest_context_takes_more_than_half_of_it(models: dict[str, Path]) -> None:
    """Numbers near the largest int do not wrap around."""
    backend = NativeBackend()
    with ModelFile.open(models["plain"]) as file:
        longest, half = (
            backend.plan(file, read_spec(file), LoadSettings(n_ctx)).use.kv_cache for n_ctx in (N_CTX, 1 << 30)
        )
    assert longest == pytest.approx(2 * half, rel=1e-6)


def test_so_it_is_with_q8_0_and_large_batches(models: dict[str, Path]) -> None:
    large = write_tiny_model(models["plain"].with_name("large.gguf"), "llama", "Q4_0", head_dim=32)
    assert_refused("native", [large], cache_type="q8_0", n_batch=N_CTX, n_threads=16)


def test_so_it_is_on_onnx_runtime(models: dict[str, Path], onnx_provider: ProviderInfo) -> None:
    assert_refused("onnx", list(models.values()))


def test_so_it_is_on_opencl(models: dict[str, Path], opencl_device: OpenCLDevice) -> None:
    assert_refused("opencl", [models["plain"], models["longrope"], models["grows"]])


def test_so_it_is_with_llama_cpp(models: dict[str, Path], llama_cpp: ModuleType) -> None:
    assert_refused("llama.cpp", [models["plain"], models["windows"]])


def test_so_it_is_with_a_draft_model_or_a_head(models: dict[str, Path]) -> None:
    head = write_tiny_head(models["plain"].with_name("head.gguf"), models["plain"])
    for draft in (models["plain"], head):
        assert_refused("native", [models["plain"]], draft=["suffix", "recycling", str(draft)])


def test_what_is_said_to_fit_loads(models: dict[str, Path]) -> None:
    [(_, message)], _ = outcomes("native", [models["grows"]], draft="none", n_ctx=N_CTX)
    fitting = int(message.split("(-c ")[1].split(")")[0])
    assert fitting > 100_000
    [(kind, _)], _ = outcomes("native", [models["plain"]], draft="none", n_ctx=4096)
    assert kind == "loaded"


def test_query_scales_are_as_many_as_differ(models: dict[str, Path]) -> None:
    with ModelFile.open(models["plain"]) as plain, ModelFile.open(models["grows"]) as grows:
        assert len(QueryScales.of(read_spec(plain).layers[0].mixer, N_CTX).values) == 1
        assert len(QueryScales.of(read_spec(grows).layers[0].mixer, 1000).values) == 1000
