"""Experts that something beside the CPU computes: their outputs come to the right rows, and failures do no harm."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from exactness import same_bits
from numpy_experts import NumpyExperts
from tiny_experts import EXPERT_ARCHITECTURES, ExpertArchitecture, write_tiny_experts

from edgeinfer.backends.base import Rows
from edgeinfer.backends.native import NativeBackend, NativeModel
from edgeinfer.common.errors import Interrupted
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

Tokens = np.ndarray


def load(file: ModelFile, n_threads: int = 2, is_cached: bool = False) -> NativeModel:
    backend, spec = NativeBackend(tuned=False), read_spec(file)
    cache = backend.expert_sizes(file, spec).least if is_cached else None
    settings = LoadSettings(128, n_batch=64, n_threads=n_threads, expert_cache=cache, parallel=4)
    plan = backend.plan(file, spec, settings)
    return backend.load(file, spec, plan, Device(n_threads))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return ModelFile.open(write_tiny_experts(tmp_path_factory.mktemp("tiny") / "m.gguf", "qwen2moe", "F32"))


def some(rng: np.random.Generator, n: int) -> Tokens:
    return rng.integers(0, 291, n).astype(np.int32)


def logits_of(model: NativeModel, tokens: Tokens, each: int) -> np.ndarray:
    """Of all rows, in passes of so many."""
    session, found = model.session(), []
    for first in range(0, len(tokens), each):
        rows = tokens[first : first + each]
        found.append(session.forward(rows, logits="all").logits)
        session.commit(range(len(rows)))
    session.close()
    return np.concatenate(found)


@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_what_the_tier_gives_takes_the_place_of_what_the_cpu_gives(
    architecture: ExpertArchitecture, tmp_path: Path, rng: np.random.Generator
) -> None:
    tokens = some(rng, 21)
    with ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", architecture, "F32")) as file:
        model = load(file)
        alone = logits_of(model, tokens, 7)
        for takes in (lambda layer, expert: expert % 2 == 0, lambda *_: True, lambda *_: False):
            for each in (1, 21):
                device_experts = NumpyExperts(file, model.spec, takes)
                model.set_expert_device(device_experts)
                found = logits_of(model, tokens, each)
                assert np.abs(found - alone).max() < 1e-4 * np.abs(alone).max()
                assert bool(device_experts.calls) == takes(0, 0)
        model.set_expert_device(None)
        assert same_bits(logits_of(model, tokens, 7), alone)


def test_outputs_are_added_with_their_weights(file: ModelFile, rng: np.random.Generator) -> None:
    """An expert whose outputs are doubled changes the logits: they are the device's, not the CPU's."""

    class Doubled(NumpyExperts):
        def finish(self) -> Any:
            return 2 * self._outputs

    model, tokens = load(file), some(rng, 9)
    alone = logits_of(model, tokens, 9)
    model.set_expert_device(Doubled(file, model.spec))
    assert np.abs(logits_of(model, tokens, 9) - alone).max() > 0.1


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("each", [1, 16])
def test_the_cpu_computes_what_a_failed_device_took(
    each: int, is_cached: bool, file: ModelFile, rng: np.random.Generator
) -> None:
    tokens, model = some(rng, 16), load(file, is_cached=is_cached)
    alone = logits_of(model, tokens, 16)
    for takes in (lambda layer, expert: expert % 2 == 0, lambda *_: True):
        model.set_expert_device(NumpyExperts(file, model.spec, takes, fails=lambda call: True))
        assert same_bits(logits_of(model, tokens, each), alone)
    later = NumpyExperts(file, model.spec, fails=lambda call: call % 2 == 1)
    model.set_expert_device(later)
    assert np.abs(logits_of(model, tokens, each) - alone).max() < 1e-4 * np.abs(alone).max()
    assert len(later.calls) > 1


def test_the_bits_do_not_depend_on_threads_and_on_the_cache(file: ModelFile, rng: np.random.Generator) -> None:
    tokens, found = some(rng, 30), []
    for n_threads, is_cached in ((1, False), (2, False), (2, True)):
        model = load(file, n_threads, is_cached)
        model.set_expert_device(NumpyExperts(file, model.spec))
        found += [logits_of(model, tokens, 30)]
        model.close()
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


def test_texts_may_run_together(file: ModelFile, rng: np.random.Generator) -> None:
    model = load(file)
    texts = [some(rng, n) for n in (3, 1, 5)]
    model.set_expert_device(NumpyExperts(file, model.spec))
    together = model.forward([Rows(model.session(), tokens, logits="all") for tokens in texts])
    for tokens, output in zip(texts, together, strict=True):
        alone = model.session().forward(tokens, logits="all").logits
        assert np.abs(output.logits - alone).max() < 1e-4 * np.abs(alone).max()


def test_what_a_tier_raises_ends_the_pass(file: ModelFile, rng: np.random.Generator) -> None:
    model, tokens = load(file), some(rng, 5)
    alone = logits_of(model, tokens, 5)
    session = model.session()
    for device_experts in (
        NumpyExperts(file, model.spec, raises=OSError("broken")),
        NumpyExperts(file, model.spec, takes=lambda *_: 1 // 0),  # type: ignore[arg-type]
    ):
        model.set_expert_device(device_experts)
        with pytest.raises((OSError, ZeroDivisionError), match="broken|zero"):
            session.forward(tokens)
        assert session.n_past == 0
    model.set_expert_device(None)
    assert same_bits(session.forward(tokens, logits="all").logits, alone)


def test_rows_of_another_shape_are_refused(file: ModelFile, rng: np.random.Generator) -> None:
    class Cut(NumpyExperts):
        def finish(self) -> Any:
            return self._outputs[1:]

    model = load(file)
    model.set_expert_device(Cut(file, model.spec))
    with pytest.raises(ValueError, match="another shape"):
        model.session().forward(some(rng, 4))


def stopped_by(stop: Callable[[NativeModel], None], file: ModelFile, error: type[BaseException]) -> None:
    """A pass is stopped while its device computes; the next one gives what it has to."""
    model = load(file)
    tokens = np.arange(6, dtype=np.int32)
    alone = logits_of(model, tokens, 6)
    begun, stopped = threading.Event(), threading.Event()

    class Slow(NumpyExperts):
        def finish(self) -> Any:
            begun.set()
            assert stopped.wait(60)
            return super().finish()

    def stop_when_begun() -> None:
        begun.wait(60)
        stop(model)
        stopped.set()

    model.set_expert_device(Slow(file, model.spec))
    stopping = threading.Thread(target=stop_when_begun)
    stopping.start()
    session = model.session()
    with pytest.raises(error):
        session.forward(tokens)
    stopping.join()
    model.set_expert_device(NumpyExperts(file, model.spec))
    found = session.forward(tokens, logits="all").logits
    assert np.abs(found - alone).max() < 1e-4 * np.abs(alone).max()


def test_an_interrupt_stops_a_pass(file: ModelFile) -> None:
    stopped_by(lambda model: model.interrupt(), file, Interrupted)


def test_ctrl_c_stops_a_pass(file: ModelFile) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        stopped_by(lambda _: signal.raise_signal(signal.SIGINT), file, KeyboardInterrupt)
    finally:
        signal.signal(signal.SIGINT, before)


def asked_while_a_pass_runs(file: ModelFile, ask: Callable[[NativeModel], Any]) -> Any:
    """What it gives; it waits for the pass, which needs the interpreter meanwhile."""
    model, seen = load(file), []
    begun = threading.Event()

    class Asked(NumpyExperts):
        def finish(self) -> Any:
            begun.set()
            time.sleep(0.05)
            return super().finish()

    model.set_expert_device(Asked(file, model.spec))
    asking = threading.Thread(target=lambda: begun.wait() and seen.append(ask(model)))
    asking.start()
    model.session().forward(np.arange(4, dtype=np.int32))
    asking.join(60)
    return seen[0]


def test_routing_may_be_asked_for_while_a_pass_runs(file: ModelFile) -> None:
    assert asked_while_a_pass_runs(file, lambda model: model.routing()).shape[1] == 4
    assert asked_while_a_pass_runs(file, lambda model: model.decoder().expert_union()) > 1


def test_what_matrices_read_may_be_recorded_while_a_pass_runs(file: ModelFile) -> None:
    def ask(model: NativeModel) -> Any:
        model.record_inputs(True)
        return model.input_squares()

    squares = asked_while_a_pass_runs(file, ask)
    assert squares and not any(counts.any() for _, counts in squares.values())


def test_what_down_reads_in_a_device_is_not_recorded(file: ModelFile) -> None:
    tokens, model, found = np.arange(9, dtype=np.int32), load(file), []
    for takes in (lambda layer, expert: False, lambda layer, expert: layer == 0 and expert % 2 == 0):
        model.set_expert_device(NumpyExperts(file, model.spec, takes))
        model.record_inputs(True)
        logits_of(model, tokens, 9)
        found.append({name: squares for name, squares in model.input_squares().items() if "blk.0" in name})
    alone, both = found
    assert alone.keys() == both.keys()
    for name, (sums, counts) in alone.items():
        of_cpu = np.arange(len(counts)) % 2 == 1 if "ffn_down_exps" in name else np.full(len(counts), True)
        assert counts[of_cpu].any() and same_bits(both[name][1], np.where(of_cpu, counts, 0))
        assert same_bits(both[name][0], np.where(of_cpu[:, None], sums, 0)), name
