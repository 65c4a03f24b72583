"""Models some of whose experts compute on an OpenCL device (PoCL, the CPU, in tests) beside the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import same_bits
from recurrent_models import write_recurrent_model
from tiny_experts import write_tiny_experts
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.opencl import OpenCLDevice, OpenCLExperts, expert_buffers
from edgeinfer.common.errors import BackendLost, BackendUnavailable, BudgetExceeded, InvalidArgument, UnsupportedModel
from edgeinfer.engine import Engine
from edgeinfer.experimental import device_experts as device_experts_module
from edgeinfer.experimental import expert_device
from edgeinfer.experimental.device_experts import DeviceExperts
from edgeinfer.experimental.expert_device import plan_device_experts
from edgeinfer.loading.options import LoadOptions
from edgeinfer.loading.plan import plan_model
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3moe", "F32", {}),
    ("qwen3moe", "Q4_K", {}),
    ("qwen3moe", "Q4_K", {"types": {"ffn_down_exps": "Q6_K"}}),
    ("olmoe", "Q6_K", {}),
    ("olmoe", "Q4_0", {}),
    ("gpt-oss", "MXFP4", {}),
    ("glm4moe", "Q8_0", {"scales": True}),
    ("qwen2moe", "Q8_0", {"fused": True}),
    ("nemotron_h_moe", "Q8_0", {}),  # without gates
    ("nemotron_h_moe+latent", "F32", {}),
    ("nemotron_h_moe+latent", "Q4_0", {"n_latent": 192}),
]
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 259, 12)]
N_TOKENS = 32


@pytest.fixture(autouse=True)
def _device_is_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By measured times PoCL would get none of such small experts. Which ones it has depends on the text alone: uploads
    take no time, and other tests have used none."""
    monkeypatch.setattr(expert_device, "measured_seconds", lambda *arguments: {1: 1e-9})
    monkeypatch.setattr(device_experts_module, "UPLOAD_SHARE", float("inf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def listed(opencl_device: OpenCLDevice) -> str:
    """The name of the device, whose drivers are asked each time."""
    return f"opencl:{opencl_device.info.index}"


@pytest.fixture
def name(listed: str, opencl_device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the device, which is found without asking drivers."""
    monkeypatch.setattr(expert_device, "device_named", lambda name: (opencl_device.info, "the device"))
    return listed


def device_experts_of(engine: Engine) -> DeviceExperts:
    device_experts = engine.device_experts
    assert device_experts is not None
    return device_experts


@contextmanager
def opened(path: Path, name: str | None, **options: Any) -> Iterator[Engine]:
    given = {"expert_device_bytes": "60%"} | options if name else options
    with edgeinfer.load(path, n_ctx=96, n_threads=2, draft="none", expert_device=name, **given) as engine:
        yield engine


def greedy(engine: Engine, tokens: list[int] | None = None) -> tuple[list[int], np.ndarray]:
    """Tokens after the prompt, these or the most probable ones, and the logits that each was chosen from."""
    session, chosen, rows, found = engine.session, [], PROMPT, []
    for i in range(N_TOKENS):
        found.append(session.forward(rows).logits[0])
        session.commit(range(len(rows)))
        chosen.append(int(found[-1].argmax()) if tokens is None else tokens[i])
        rows = chosen[-1:]
    return chosen, np.array(found)


def answer(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, max_tokens=N_TOKENS, temperature=0).tokens)


@pytest.mark.parametrize("architecture, tensor_type, shape", MODELS)
def test_tokens_are_those_of_the_cpu_where_they_lead_clearly(
    architecture: str, tensor_type: str, shape: dict[str, Any], name: str, tmp_path: Path
) -> None:
    write: Any = write_recurrent_model if architecture.startswith("nemotron") else write_tiny_experts
    path = write(tmp_path / "m.gguf", architecture, tensor_type, **shape)
    with opened(path, None) as engine:
        tokens, alone = greedy(engine)
    with opened(path, name) as engine:
        logits = greedy(engine, tokens)[1]
        stats = device_experts_of(engine).stats
    scale = np.abs(alone).max()
    errors = np.abs(logits - alone).max(axis=1) / scale
    # Where weights have blocks of 256, the CPU rounds activations in blocks of 256 and the device in those of 32. That
    # may choose another expert where two are nearly equal.
    most, middle = (
        (1e-4, 1e-5) if tensor_type == "F32" else (0.15, 3e-2) if tensor_type.endswith("_K") else (5e-2, 1e-3)
    )
    assert errors.max() < most and np.median(errors) < middle
    first, second = np.sort(alone, axis=1)[:, :-3:-1].T
    is_clear = first - second > 0.05 * scale
    assert is_clear.sum() > 4 and (logits.argmax(axis=1) == alone.argmax(axis=1))[is_clear].all()
    assert stats.taken > 20 and stats.left > 20


def test_it_works_with_an_expert_cache_and_with_drafts(name: str, tmp_path: Path) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", "qwen3moe", "F32", n_experts=16)
    with opened(path, None) as engine:
        tokens = answer(engine)
    for options in ({"expert_cache": "50%"}, {"draft": "auto"}):
        with edgeinfer.load(
            path, n_ctx=96, n_threads=2, expert_device=name, expert_device_bytes="50%", **{"draft": "none"} | options
        ) as engine:
            assert answer(engine) == tokens
            assert device_experts_of(engine).stats.taken > 20


def test_a_device_that_fails_in_an_answer_is_dropped_and_the_answer_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the CPU's if the device fails before it gave anything, and has all its tokens in any case."""
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q8_0")
    with opened(path, None) as engine:
        tokens = answer(engine)
        engine.session.truncate(0)
        alone = engine.session.forward(PROMPT, logits="all").logits
    whole, n_calls = OpenCLExperts.finish, 0

    def failing(experts: OpenCLExperts) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls > n_good:
            raise BackendLost("it has left the bus")
        return whole(experts)

    monkeypatch.setattr(OpenCLExperts, "finish", failing)
    for n_good in (0, 9):
        n_calls = 0
        with opened(path, name) as engine:
            with pytest.warns(RuntimeWarning, match="the CPU computes all experts from now on: .* has left the bus"):
                found = answer(engine)
            assert len(found) == len(tokens) and n_calls == n_good + 1
            assert n_good or found == tokens
            engine.session.truncate(0)
            assert same_bits(engine.session.forward(PROMPT, logits="all").logits, alone)


def test_an_interrupt_ends_an_answer(name: str, tmp_path: Path) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "F32")
    with opened(path, name) as engine:
        stream = engine.stream(PROMPT, max_tokens=N_TOKENS, temperature=0)
        next(stream)
        assert engine.interrupt()
        list(stream)
        assert stream.completion.finish_reason == "interrupted"
        assert len(answer(engine)) == N_TOKENS


# ---- planning --------------------------------------------------------------------------------------------------------


def test_the_plan_has_what_the_device_then_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", "gpt-oss", "MXFP4")
    held: list[OpenCLExperts] = []
    make: Callable[..., None] = OpenCLExperts.__init__

    def kept(self: OpenCLExperts, *arguments: Any) -> None:
        make(self, *arguments)
        held.append(self)

    monkeypatch.setattr(OpenCLExperts, "__init__", kept)
    with opened(path, name) as engine, opened(path, None) as without:
        use, info = engine.memory_plan.use, expert_device.device_named(name)[0]
        assert held[0].n_slots == 9  # 60 % of 16
        assert use.expert_device == (held[0].n_bytes if info.shares_host_memory else 0)
        assert use.total == without.memory_plan.use.total + use.expert_device
        answer(engine)
        assert use.expert_device in (0, held[0].n_bytes)


def test_sizes_in_bytes(listed: str, tmp_path: Path) -> None:
    name = listed
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q4_0")
    with ModelFile.open(path) as file:
        buffers = expert_buffers(file, read_spec(file), 96, expert_device.device_named(name)[0])
        options = LoadOptions(n_ctx=96, expert_device=name, expert_device_bytes=buffers.total(3) + 7)
        plan = plan_device_experts(plan_model(file, options), options, 1 << 30)
        assert plan is not None and plan.n_slots == 3 and plan.n_bytes == buffers.total(3)
        few = LoadOptions(n_ctx=96, expert_device=name, expert_device_bytes=buffers.total(1) - 1)
        with pytest.raises(InvalidArgument, match=f"--expert-device-bytes {buffers.total(1)} or more"):
            plan_device_experts(plan_model(file, few), few, 1 << 30)


def test_more_than_there_is_room_for_is_refused(name: str, tmp_path: Path) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q4_0")
    with ModelFile.open(path) as file:
        options = LoadOptions(n_ctx=96, expert_device=name, expert_device_bytes="100%")
        planned = plan_model(file, options)
        if expert_device.device_named(name)[0].shares_host_memory:
            with pytest.raises(BudgetExceeded, match="has room for 937 B of experts"):
                plan_device_experts(planned, options, 1000)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"backend": "reference"}, InvalidArgument, "only native computes experts on another device"),
        ({"expert_device": "opencl:99"}, BackendUnavailable, "no such device"),
        ({"expert_device": "onnx:0"}, InvalidArgument, "gpu, gpu:N, opencl:N or None"),
        ({"expert_device": 3}, InvalidArgument, "expert_device"),
        ({"expert_device_bytes": 0}, InvalidArgument, "expert_device_bytes must be at least one byte"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, listed: str, tmp_path: Path
) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q4_0")
    with pytest.raises(error, match=message):
        edgeinfer.load(path, n_ctx=64, **{"expert_device": listed} | options)


def test_models_and_types_without_it_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = write_tiny_model(tmp_path / "dense.gguf", "llama", "Q8_0")
    with pytest.raises(InvalidArgument, match="is no mixture of experts"):
        edgeinfer.load(dense, n_ctx=64, expert_device=name)
    from edgeinfer.backends.opencl import expert_parts
    from edgeinfer.models.gguf import GGMLType

    formats = {kind: found for kind, found in expert_parts.FORMATS.items() if kind != GGMLType.Q4_0}
    monkeypatch.setattr(expert_parts, "FORMATS", formats)
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q4_0")
    with pytest.raises(UnsupportedModel, match=r"ffn_gate_exps.weight .* has type Q4_0, which OpenCL devices lack"):
        edgeinfer.load(path, n_ctx=64, expert_device=name)


def test_nothing_is_asked_where_no_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceExperts, "choose", lambda *arguments: pytest.fail("it was asked"))
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q4_0")
    with opened(path, None) as engine:
        assert engine.device_experts is None and engine.session.model.pass_hook is None  # type: ignore[attr-defined]
        answer(engine)
