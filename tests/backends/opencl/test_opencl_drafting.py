"""Draft models and draft heads on an OpenCL device, as `load` puts them there: the same text, whatever it does."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting import FixedCosts, cost_model
from steady_clock import steady_machine
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.opencl import OpenCLDevice
from edgeinfer.backends.opencl import device as device_module
from edgeinfer.common import devices
from edgeinfer.common.types import Nodes
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.head import HeadDrafter
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.drafters.overlapped import OverlappedDrafter
from edgeinfer.speculation.drafters.watchdog import WatchedDrafter

PROMPT = "hello world, there is the one, there is the one and hello"
Open = Callable[..., tuple[edgeinfer.Engine, list[str]]]


@pytest.fixture(scope="module", autouse=True)
def _steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A driver that compiles kernels for long in an answer does not hang."""
    with steady_machine(), pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("costs")  # which are not for other tests
        patch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: folder)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama", "Q8_0", n_ctx_train=256)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[edgeinfer.Engine]:
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        yield engine


@pytest.fixture(scope="module")
def files(model: Path, plain: edgeinfer.Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model itself, and a head that is mostly right on what it writes."""
    text = [*plain.tokenize(PROMPT), *plain.generate(PROMPT, max_tokens=60, temperature=0.0).tokens]
    head = write_tiny_head(tmp_path_factory.mktemp("head") / "head.gguf", model, [text])
    return {"model": model, "head": head}


@pytest.fixture
def open_engine(model: Path, files: dict[str, Path], opencl_device: OpenCLDevice) -> Iterator[Open]:
    """An engine that drafts with the model itself, or with a head, on that device, and the warnings."""
    opened = []

    def open_on_device(kind: str = "model") -> tuple[edgeinfer.Engine, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            name = f"opencl:{opencl_device.info.index}"
            engine = edgeinfer.load(model, n_threads=1, draft=[str(files[kind])], draft_device=name)
        opened.append(engine)
        engine.tokenizer.stop_ids = frozenset()
        assert engine.speculator is not None
        engine.speculator.costs = FixedCosts()
        return engine, [str(warning.message) for warning in caught]

    yield open_on_device
    for engine in opened:
        engine.close()


def drafter_of(engine: edgeinfer.Engine) -> Any:
    assert engine.speculator is not None
    return engine.speculator.drafters[-1]


@pytest.mark.parametrize("n_cores", [1, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_what_is_drafted_there_changes_no_text(
    kind: str,
    n_cores: int,
    temperature: float,
    open_engine: Open,
    plain: edgeinfer.Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With cores enough for both it drafts ahead."""
    monkeypatch.setattr(devices, "physical_cores", lambda root=None: n_cores)
    engine, notes = open_engine(kind)
    drafter = drafter_of(engine)
    if drafter._drafter.session.model.decoder.device.is_cpu:
        assert isinstance(drafter, OverlappedDrafter if n_cores == 64 else WatchedDrafter)
    options: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 4}
    for prompt in (PROMPT, PROMPT + " again"):
        completion = engine.generate(prompt, **options)
        assert completion.tokens == plain.generate(prompt, **options).tokens
        assert completion.timings.speculation is not None and completion.timings.speculation.dropped == {}
    assert notes == []


@pytest.mark.parametrize("n_cores", [1, 64])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_drafts_that_the_device_makes_by_itself_change_no_text(
    kind: str, n_cores: int, open_engine: Open, plain: edgeinfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "physical_cores", lambda root=None: n_cores)
    monkeypatch.setattr("edgeinfer.speculation.pipeline._MAX_WAIT", 1e6)
    engine, _ = open_engine(kind)
    drafter, asked = drafter_of(engine)._drafter, []
    assert drafter._device_drafting is not None, "what its own drafts cost was not measured"
    let_chains_pay(drafter, asked)
    for prompt in (PROMPT, PROMPT + " again"):
        completion = engine.generate(prompt, max_tokens=60, temperature=0.0)
        assert completion.tokens == plain.generate(prompt, max_tokens=60, temperature=0.0).tokens
        assert completion.timings.speculation is not None
        if kind == "model" or prompt == PROMPT:  # the head knows that text alone
            assert completion.timings.speculation.by_drafter[kind].accepted > 10
    assert max(asked) > 1


def let_chains_pay(drafter: Any, asked: list[int]) -> None:
    """Have chains made on the device, by what they seem to cost; asked: how many levels."""
    draft, drafter._device_drafting = (
        drafter.session.draft,
        DeviceDrafting(drafter.session, cost_model(lambda n: 0.5 + 0.1 * n)),
    )
    drafter._costs = cost_model()
    for costs in (drafter._costs, drafter._device_drafting.costs):
        costs.observe = lambda n, n_past, milliseconds: None

    def counted(*arguments: Any, **options: Any) -> Nodes:
        nodes: Nodes = draft(*arguments, **options)
        asked.append(len(set(nodes.parents.tolist())))
        return nodes

    drafter.session.draft = counted


@pytest.mark.parametrize("kind", ["model", "chains of model", "head", "chains of head"])
def test_a_device_that_is_lost_in_an_answer_leaves_the_cpu(
    kind: str, open_engine: Open, plain: edgeinfer.Engine
) -> None:
    engine, _ = open_engine(kind.removeprefix("chains of "))
    expected = plain.generate(PROMPT, max_tokens=40, temperature=0.0).tokens
    if kind.startswith("chains"):
        let_chains_pay(drafter_of(engine)._drafter, [])
    drafter_of(engine)._drafter.session.model.decoder.group = 1 << 20  # no device has such groups
    reasons: list[str] = []
    for _ in range(100):
        completion = engine.generate(PROMPT, max_tokens=40, temperature=0.0)
        assert completion.tokens == expected and completion.timings.speculation is not None
        reasons += completion.timings.speculation.dropped.values()
        if type(drafter_of(engine)) in (ModelDrafter, HeadDrafter):
            break
    assert len(reasons) == 1 and "running kernel" in reasons[0]


def test_kernels_that_do_not_build_leave_the_cpu(
    open_engine: Open, plain: edgeinfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "common.cl").touch()
    (tmp_path / "decoder.cl").write_text("kernel void rms_norm(global float* x) { x[0] = no_such_name; }")
    monkeypatch.setattr(device_module, "_SOURCES", tmp_path)  # the device is asked in a process that has the true ones
    engine, notes = open_engine()
    assert len(notes) == 1 and "the driver cannot compile this kernel" in notes[0]
    _drafts_on_the_cpu(engine, plain)


def test_a_device_out_of_memory_leaves_the_cpu(
    open_engine: Open, plain: edgeinfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = OpenCLDevice.buffer
    monkeypatch.setattr(OpenCLDevice, "buffer", lambda self, n_bytes: buffer(self, 64 * self.info.memory_bytes))
    engine, notes = open_engine()
    assert len(notes) == 1 and "out of memory" in notes[0]
    _drafts_on_the_cpu(engine, plain)


def _drafts_on_the_cpu(engine: edgeinfer.Engine, plain: edgeinfer.Engine) -> None:
    assert type(drafter_of(engine)) is ModelDrafter
    completion = engine.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert completion.tokens == plain.generate(PROMPT, max_tokens=40, temperature=0.0).tokens
    assert completion.timings.speculation is not None
    assert completion.timings.speculation.by_drafter["model"].accepted > 10
