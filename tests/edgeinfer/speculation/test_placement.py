"""Where a draft model runs: what names mean, which device is taken, and what happens to those that fail."""

import random
import threading
import time
import warnings
from dataclasses import replace

import pytest
from drafting import FixedCosts, cost_model
from other_vocabulary import write_reordered
from steady_clock import SteadyClock
from tiny_heads import write_tiny_eagle3, write_tiny_head

import edgeinfer
from edgeinfer.backends.native import NativeBackend
from edgeinfer.cli.answering import write_answer
from edgeinfer.cli.terminal import ProgressBar, Writer
from edgeinfer.common import devices
from edgeinfer.common.errors import (
    BackendLost,
    BackendUnavailable,
    BudgetExceeded,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
)
from edgeinfer.loading import plan as load_plan
from edgeinfer.memory.process import Process
from edgeinfer.speculation import open as opening
from edgeinfer.speculation import open_on_device, placement
from edgeinfer.speculation.drafters import watchdog
from edgeinfer.speculation.drafters.head import HeadDrafter
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.drafters.overlapped import OverlappedDrafter, overlapped
from edgeinfer.speculation.drafters.overlapped_draft import OverlappedTree
from edgeinfer.speculation.drafters.watchdog import WatchedDrafter
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.placement import DraftDevice, check_name, devices_named

PROMPT = "hello world, there is the one, there is the one and hello"
GREEDY = {"max_tokens": 60, "temperature": 0.0}


pytestmark = pytest.mark.usefixtures("native")


class Elsewhere:
    """The native engine as if it were another device. fail: what its sessions do before they begin to work.

    sessions: those that were made.
    """

    name = "elsewhere"

    def __init__(self, fail=lambda n_calls: None, slowdown=0.0):
        self.native = NativeBackend(for_drafts=True)
        self.fail, self.slowdown, self.sessions = fail, slowdown, []

    def plan(self, *arguments):
        return self.native.plan(*arguments)

    def load(self, file, spec, plan, device, progress=None):
        model = NativeBackend(for_drafts=True, resident=True).load(file, spec, plan, device)
        session = model.session()
        forward, n_calls = session.forward, 0

        def failing(*arguments, **options):
            nonlocal n_calls
            n_calls += 1
            self.fail(n_calls)
            time.sleep(self.slowdown)
            return forward(*arguments, **options)

        session.forward = failing
        self.sessions.append(session)
        model.session = lambda: session
        return model


def device(backend=None, name="gpu0", **options):
    fields = {"is_gpu": True, "facts": (name,), "n_cores": 0, "shares_memory": False} | options
    return DraftDevice(name, f"the device {name}", backend=backend or Elsewhere(), **fields)


@pytest.fixture
def listed(monkeypatch):
    """listed(*devices): they are all there are; (device, reason) is one that cannot be used."""

    def be(*found, why_none=None):
        pairs = [each if isinstance(each, tuple) else (each, None) for each in found]
        monkeypatch.setattr(placement, "_KINDS", {"opencl": lambda: (pairs, why_none)})

    return be


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    """Devices are not measured, so that each call of a session is one for a draft, but the first."""
    monkeypatch.setattr(open_on_device, "cached_costs", lambda key, measure, **options: cost_model())


@pytest.fixture(scope="module")
def expected(model):
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        return engine.generate(PROMPT, **GREEDY).tokens


@pytest.fixture
def open_engine(model):
    """open_engine(device name): an engine that drafts at no cost with its own model, and warnings."""
    engines = []

    def open_on_device(name="gpu", draft=None, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = edgeinfer.load(model, draft=[str(draft or model)], draft_device=name, **options)
        engines.append(engine)
        engine.tokenizer.stop_ids = frozenset()
        engine.speculator.costs = FixedCosts()
        return engine, [str(warning.message) for warning in caught]

    yield open_on_device
    for engine in engines:
        engine.close()


def drafter_of(engine):
    return engine.speculator.drafters[-1]


# ---- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "cpu", "gpu", "gpu:0", "gpu:12", "opencl:3"])
def test_names_of_devices_are_taken_whether_there_are_any(name):
    check_name(name)


@pytest.mark.parametrize(
    "name", ["", "GPU", "gpu:", "gpu:x", "gpu:-1", "cuda:0", "opencl", "cpu:0", "gpu:0\n", f"gpu:{'9' * 5000}"]
)
def test_other_names_are_refused_with_those_that_there_are(name, model):
    with pytest.raises(InvalidArgument, match="a draft device is one of auto, cpu, gpu, gpu:N, opencl:N"):
        check_name(name)
    with pytest.raises(InvalidArgument, match="draft device"):
        edgeinfer.load(model, draft_device=name)


def test_a_name_means_the_gpu_or_the_device_of_that_number(listed):
    cpu, first, second = device(name="opencl:0", is_gpu=False), device(name="opencl:1"), device(name="opencl:2")
    listed(cpu, first, (second, "broken"))
    assert devices_named("cpu") == []
    assert devices_named("auto") == devices_named("gpu") == devices_named("gpu:0") == [first]
    assert devices_named("opencl:0") == [cpu] and devices_named("opencl:1") == [first]
    with pytest.raises(BackendUnavailable, match=r"the device opencl:2 cannot be used: broken"):
        devices_named("gpu:1")
    for name in ("gpu:2", "opencl:3"):
        with pytest.raises(BackendUnavailable, match="there is no such device; there is opencl:0, the device opencl:0"):
            devices_named(name)
    listed(why_none="no driver")
    with pytest.raises(BackendUnavailable, match="there is no such device; no driver"):
        devices_named("gpu")
    assert devices_named("auto") == []


def test_no_device_is_asked_where_none_is_needed(model, monkeypatch):
    def ask():
        raise AssertionError("the drivers were asked")

    monkeypatch.setattr(placement, "_KINDS", {"opencl": ask})
    for options in ({}, {"draft": "none", "draft_device": "gpu"}, {"draft": str(model), "draft_device": "cpu"}):
        edgeinfer.load(model, **options).close()


@pytest.mark.parametrize(
    "n_cores, n_threads, is_independent", [(0, 8, True), (1, 3, True), (1, 4, False), (4, 1, False)]
)
def test_a_device_of_cpu_cores_is_independent_where_there_are_enough_for_both(
    n_cores, n_threads, is_independent, monkeypatch
):
    monkeypatch.setattr(devices, "physical_cores", lambda: 4)
    assert device(n_cores=n_cores).is_independent(n_threads) == is_independent


# ---- Placing ---------------------------------------------------------------------------------------------------------


def test_a_named_device_drafts_ahead_and_one_of_the_same_cores_in_turns(listed, open_engine, expected):
    for n_cores, kind in ((0, OverlappedDrafter), (10**6, WatchedDrafter)):
        listed(device(n_cores=n_cores))
        engine, notes = open_engine("gpu")
        assert type(drafter_of(engine)) is kind and notes == []
        assert engine.speculator.placements["model"].device.startswith("the device gpu0, ")
        completion = engine.generate(PROMPT, **GREEDY)
        assert completion.tokens == expected and completion.timings.speculation.dropped == {}
        engine.close()


def test_a_device_that_is_missing_is_said_and_the_cpu_drafts(listed, open_engine, expected):
    listed(why_none="no driver is installed")
    engine, notes = open_engine("gpu:1")
    assert notes == ["drafting goes on without gpu:1: there is no such device; no driver is installed"]
    assert type(drafter_of(engine)) is ModelDrafter and engine.speculator.placements["model"].device == "the CPU"
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def _lost(n_calls):
    raise BackendLost("the driver is broken")


def _out_of_memory(n_calls):
    raise MemoryError("out of memory")


@pytest.mark.parametrize("fail, words", [(_lost, "driver is broken"), (_out_of_memory, "out of memory")])
def test_a_device_that_fails_when_it_is_opened_is_said_and_the_cpu_drafts(listed, open_engine, expected, fail, words):
    listed(device(Elsewhere(fail)))
    engine, notes = open_engine("gpu")
    assert notes == [f"drafting goes on without gpu0: {notes[0].partition(': ')[2]}"] and words in notes[0]
    assert type(drafter_of(engine)) is ModelDrafter
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_a_model_that_does_not_fit_on_a_device_drafts_on_the_cpu(listed, open_engine):
    class Small(Elsewhere):
        def plan(self, *arguments):
            raise BudgetExceeded("it has 1 MiB")

    listed(device(Small()))
    engine, notes = open_engine("gpu")
    assert notes == ["drafting goes on without gpu0: it has 1 MiB"] and type(drafter_of(engine)) is ModelDrafter


def test_memory_of_a_device_is_counted_where_it_is_the_machines(listed, model, monkeypatch):
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
    with edgeinfer.load(model, draft=[str(model)], draft_device="cpu") as engine:
        on_cpu = engine.memory_plan.use.drafters
        budget = engine.memory.peak - on_cpu // 2
    for shares_memory in (True, False):
        listed(device(shares_memory=shares_memory))
        with edgeinfer.load(model, draft=[str(model)], draft_device="gpu") as engine:
            assert engine.memory_plan.use.drafters == on_cpu
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with edgeinfer.load(model, draft=[str(model)], draft_device="gpu", budget=budget) as engine:
                assert (engine.speculator is None) == shares_memory
                assert engine.memory_plan.use.drafters == 0
        what = "no draft model (" if shares_memory else "no draft model on the CPU ("
        assert len(caught) == 1 and what in str(caught[0].message)


@pytest.mark.parametrize("own, of_cpu, is_taken", [(1.0, 5.0, True), (3.0, 3.0, True), (9.9, 1.0, False)])
def test_auto_takes_a_gpu_that_beats_the_cpu_by_measured_times(listed, open_engine, monkeypatch, own, of_cpu, is_taken):
    """Milliseconds of a drafted token; one of the target takes ten."""

    def costs_of(milliseconds):
        return cost_model(lambda n: milliseconds * (1.0 + 0.03 * (n - 1)))

    def on_the_cpu(file, session, plan, device, seconds, *facts):
        return costs_of(of_cpu if facts else 10.0)

    monkeypatch.setattr(open_on_device, "cached_costs", lambda key, measure: costs_of(own))
    monkeypatch.setattr(opening, "costs_of", on_the_cpu)
    backend = Elsewhere()
    listed(device(backend))
    engine, notes = open_engine("auto")
    assert type(drafter_of(engine)) is (OverlappedDrafter if is_taken else ModelDrafter) and notes == []
    there, here = f"the device gpu0, {own:.1f} ms a token", f"the CPU, {of_cpu:.1f} ms a token"
    where = f"{there}, rather than {here}" if is_taken else f"{here}, rather than {there}"
    assert engine.speculator.placements["model"].device == where
    if not is_taken:
        with pytest.raises(EdgeInferError, match="closed"):
            backend.sessions[0].forward([1])


def test_a_head_runs_on_the_cpu_where_its_device_has_none(listed, open_engine, model, tmp_path):
    listed(device())
    head = write_tiny_head(tmp_path / "head.gguf", model)
    engine, notes = open_engine("gpu", draft=head)
    assert notes == ["drafting goes on without gpu0: draft heads do not run on the device gpu0"]
    assert type(drafter_of(engine)) is HeadDrafter and engine.speculator.placements["head"].device == "the CPU"


@pytest.mark.parametrize("own, of_cpu, is_taken", [(1.0, 9.0, True), (9.9, 1.0, False)])
def test_auto_measures_a_head_on_a_gpu_as_a_model(
    onnx_provider, listed, open_engine, model, expected, tmp_path, monkeypatch, own, of_cpu, is_taken
):
    """Milliseconds of a pass of the head; one of the target takes ten. ONNX Runtime on the CPU stands for the GPU."""

    def costs_of(milliseconds):
        return cost_model(lambda n: milliseconds * (1.0 + 0.03 * (n - 1)))

    (found, _), *_ = placement._KINDS["onnx"]()[0]
    listed(replace(found, is_gpu=True, n_cores=0, shares_memory=False))
    monkeypatch.setattr(open_on_device, "cached_costs", lambda key, measure: costs_of(own))
    monkeypatch.setattr(opening, "costs_of", lambda file, *_: costs_of(of_cpu if file.path.stem == "head" else 10.0))
    engine, notes = open_engine("auto", draft=write_tiny_head(tmp_path / "head.gguf", model))
    assert notes == [] and isinstance(drafter_of(engine), OverlappedDrafter) == is_taken
    assert engine.speculator.placements["head"].device.startswith(found.title if is_taken else "the CPU, 1")
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


@pytest.mark.parametrize("kind", ["model", "head", "head without rows", "head with taps", "EAGLE-3 head"])
@pytest.mark.parametrize("library, fixture", [("ONNX Runtime", "onnx_provider"), ("OpenCL", "opencl_device")])
def test_drafts_come_from_a_library_whose_device_is_named(
    library, fixture, open_engine, model, expected, tmp_path, kind, request
):
    request.getfixturevalue(fixture)
    listed = placement._KINDS["onnx" if library == "ONNX Runtime" else "opencl"]()[0]
    name = next(device.name for device, _ in listed if device.n_cores)
    path = {
        "model": lambda: model,
        "head": lambda: write_tiny_head(tmp_path / "head.gguf", model),
        "head without rows": lambda: write_tiny_head(
            tmp_path / "head.gguf", model, metadata={"draft-head.output_type": "Q4_0"}, leave_out="output"
        ),
        "head with taps": lambda: write_tiny_head(tmp_path / "head.gguf", model, taps=(0, 1)),
        "EAGLE-3 head": lambda: write_tiny_eagle3(tmp_path / "head.gguf", model),
    }[kind]()
    engine, notes = open_engine(name, draft=path)
    drafter = drafter_of(engine)
    completion = engine.generate(PROMPT, **GREEDY)
    assert completion.tokens == expected and completion.timings.speculation.dropped == {}
    assert completion.timings.speculation.by_drafter[drafter.name].drafted > 0
    if kind == "EAGLE-3 head" or (kind == "head with taps" and library == "OpenCL"):
        assert type(drafter) is HeadDrafter and "heads " in notes[0] and "native engine" in notes[0]
    else:
        assert isinstance(drafter, WatchedDrafter) and notes == []  # it shares the target's cores
        assert library in engine.speculator.placements[drafter.name].device


def test_a_draft_through_text_is_made_in_one_piece_ahead(model, expected, tmp_path):
    """A node of it may be several of the draft model's tokens: there is no level to go on from."""
    order = list(range(291))
    random.Random(3).shuffle(order)
    other = write_reordered(tmp_path / "other.gguf", model, order)
    with edgeinfer.load(model, draft=[str(other)]) as engine:
        engine.tokenizer.stop_ids = frozenset()
        ahead = overlapped(engine.speculator.drafters[-1])
        n_vocab = engine.tokenizer.n_vocab
        engine.speculator = Speculator(engine.session, [ahead], FixedCosts(), n_vocab, 8)
        assert ahead._draft_type is OverlappedTree
        assert engine.generate(PROMPT, **GREEDY).tokens == expected
        ahead.close()


# ---- Devices that fail later -----------------------------------------------------------------------------------------


class Hanging:
    """A call that does not come back before the test ends. For the watchdog a long time passes when it begins, and
    hardly any else: no other call is taken for one that hangs, however slow the machine is."""

    def __init__(self):
        self.clock = SteadyClock()
        self.released = threading.Event()

    def __call__(self, n_calls):
        self.clock.sleep(1e6)
        self.released.wait()
        raise BackendLost("it hung")


@pytest.fixture
def hanging(monkeypatch):
    hang = Hanging()
    monkeypatch.setattr(watchdog, "perf_counter", hang.clock.now)
    monkeypatch.setattr(watchdog, "MIN_TIMEOUT_SECONDS", 0.2)  # after which it looks at the clock
    yield hang
    hang.released.set()


def after(n, fail):
    """Fails from the n-th call on."""
    return lambda n_calls: fail(n_calls) if n_calls > n else None


def until_dropped(engine, expected):
    """Answers, all of which are right, until a drafter was dropped in one: why."""
    for _ in range(300):
        completion = engine.generate(PROMPT, **GREEDY)
        assert completion.tokens == expected
        if completion.timings.speculation.dropped:
            return completion.timings.speculation.dropped
    raise AssertionError("no drafter was dropped")


@pytest.mark.parametrize("n_cores", [0, 10**6], ids=["ahead", "in turns"])
@pytest.mark.parametrize("kind", ["lost", "out of memory", "hangs"])
def test_a_device_that_fails_in_an_answer_is_said_and_the_next_one_is_drafted_on_the_cpu(
    listed, open_engine, expected, hanging, kind, n_cores
):
    fail, words = {
        "lost": (_lost, "the driver is broken"),
        "out of memory": (_out_of_memory, "out of memory"),
        "hangs": (hanging, "the device gpu0 has not answered for"),
    }[kind]
    listed(device(Elsewhere(after(12, fail)), n_cores=n_cores))
    engine, notes = open_engine("gpu")
    assert notes == [] and type(drafter_of(engine)) is (WatchedDrafter if n_cores else OverlappedDrafter)
    dropped = until_dropped(engine, expected)
    assert list(dropped) == ["model"] and words in dropped["model"]
    completion = engine.generate(PROMPT, **GREEDY)
    assert completion.tokens == expected and completion.timings.speculation.dropped == {}
    assert type(drafter_of(engine)) is ModelDrafter and completion.timings.speculation.by_drafter["model"].accepted > 10
    assert engine.speculator.placements["model"].device.startswith("the CPU; it was the device gpu0")


def test_a_device_that_hangs_with_main_memory_has_no_fallback(listed, open_engine, expected, hanging):
    """What it holds cannot be given back: a second draft model might not fit."""
    listed(device(Elsewhere(after(12, hanging)), shares_memory=True))
    engine, _ = open_engine("gpu")
    until_dropped(engine, expected)
    completion = engine.generate(PROMPT, **GREEDY)
    assert completion.tokens == expected and "has not answered" in completion.timings.speculation.dropped["model"]


def test_a_device_that_hangs_does_not_keep_an_engine_from_closing(listed, open_engine, expected, hanging):
    for n_cores in (0, 10**6):
        listed(device(Elsewhere(after(12, hanging)), n_cores=n_cores))
        engine, _ = open_engine("gpu")
        until_dropped(engine, expected)
        engine.close()


class WithoutSessions(Elsewhere):
    """Loads models that make no sessions."""

    def load(self, *arguments):
        self.model = super().load(*arguments)
        self.model.session = lambda: _lost(0)
        return self.model


def test_a_model_that_makes_no_session_is_closed(listed, open_engine, expected, monkeypatch):
    elsewhere, here = WithoutSessions(), WithoutSessions()
    monkeypatch.setattr(opening, "NativeBackend", lambda **options: here)
    listed(device(elsewhere))
    engine, notes = open_engine("gpu")
    assert notes == [f"drafting goes on without {name}: the driver is broken" for name in ("gpu0", "model")]
    for backend in (elsewhere, here):
        with pytest.raises(EdgeInferError, match="this model is closed"):
            backend.model.memory()
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_a_device_that_hangs_when_it_is_opened_is_given_up(listed, open_engine, expected, hanging, monkeypatch):
    monkeypatch.setattr(open_on_device, "_OPENING_SECONDS", 0.2)
    listed(device(Elsewhere(hanging)))
    engine, notes = open_engine("gpu")
    assert len(notes) == 1 and notes[0].startswith("drafting goes on without gpu0: the device gpu0 has not answered")
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_the_command_line_says_in_one_line_that_a_device_failed_in_an_answer(listed, open_engine, expected, capsys):
    listed(device(Elsewhere(after(12, _lost)), n_cores=10**6))
    engine, _ = open_engine("gpu")
    for _ in range(3):
        answer = engine.stream(PROMPT, **GREEDY)
        write_answer(engine, answer, Writer.to_stdout(silent=True), ProgressBar("reading"))
        assert answer.completion.tokens == expected
    assert capsys.readouterr().err == "drafting went on without model: BackendLost: the driver is broken\n"


def test_a_fallback_that_fails_too_ends_drafting_and_no_answer(listed, open_engine, expected, monkeypatch):
    listed(device(Elsewhere(after(12, _lost))))
    engine, _ = open_engine("gpu")
    until_dropped(engine, expected)
    placements = engine.speculator.placements["model"]
    engine.speculator.placements["model"] = replace(placements, fallback=lambda: _lost(0))
    completion = engine.generate(PROMPT, **GREEDY)
    assert completion.tokens == expected and completion.timings.speculation.dropped == {"model": "the driver is broken"}
    completion = engine.generate(PROMPT, **GREEDY)
    assert completion.tokens == expected and completion.timings.speculation.dropped == {}


REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 2, "repeat_penalty": 1.2},
]


@pytest.fixture(scope="module")
def plain_tokens(model):
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        return [engine.generate(PROMPT, max_tokens=40, **request).tokens for request in REQUESTS]


def random_failure(rng, *ways):
    """Fails now and then, in these ways; once it is lost it stays so."""
    probabilities = [rng.random() * 0.1 for _ in ways]
    lost = []

    def fail(n_calls):
        for way, of_way in zip(ways, probabilities, strict=True):
            is_lasting = way is _lost or isinstance(way, Hanging)
            if n_calls > 1 and rng.random() < (0.1 * of_way if is_lasting else of_way):
                lost.extend([way] if is_lasting else [])
                way(n_calls)
        if lost:
            lost[0](n_calls)

    return fail


def _interrupted(n_calls):  # as when a draft was stopped, but too late
    raise Interrupted("injected")


def _wrong(n_calls):
    raise ValueError("injected")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_at_random_the_text_is_that_of_plain_decoding(seed, listed, open_engine, plain_tokens, hanging):
    """Ten answers each."""
    rng = random.Random(seed)
    for n_cores in (0, 10**6):
        slowdown = rng.choice([0.0, 0.0, 0.001])
        ways = [_lost, _out_of_memory, _wrong, hanging, *([] if n_cores else [_interrupted])]
        listed(device(Elsewhere(random_failure(rng, *ways), slowdown), n_cores=n_cores))
        engine, _ = open_engine("gpu")
        for _ in range(5):
            which = rng.randrange(len(REQUESTS))
            completion = engine.generate(PROMPT, max_tokens=40, **REQUESTS[which])
            assert completion.tokens == plain_tokens[which]
        engine.close()
