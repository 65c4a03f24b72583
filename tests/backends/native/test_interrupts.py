"""Interrupts and Ctrl-C at awkward moments, rows that are asked for again, and states that are not a decoder's own."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from exactness import same_bits
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.base import Rows
from edgeinfer.backends.native import NativeBackend, NativeModel, NativeSession, _core, load_head, plan_head
from edgeinfer.common.errors import Interrupted
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile

N_CTX = 4096


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", "llama", "Q8_0", n_ctx_train=N_CTX)


def load(path: Path, n_ctx: int = N_CTX, n_batch: int = N_CTX) -> NativeModel:
    backend = NativeBackend(tuned=False)
    file = ModelFile.open(path)
    spec = read_spec(file)
    return backend.load(file, spec, backend.plan(file, spec, LoadSettings(n_ctx, n_batch=n_batch)), Device(1))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[NativeModel]:
    loaded = load(path)
    yield loaded
    loaded.close()


def some(rng: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 291, n)]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[0] * 20_000, [1, 0, 1], [2, 2], [0, 2, 1, 0]])
def test_a_row_may_be_asked_for_again(model: NativeModel, rng: np.random.Generator, rows: list[int]) -> None:
    tokens = some(rng, 3)
    every = model.session().forward(tokens, logits="all").logits
    assert same_bits(model.session().forward(tokens, logits=rows).logits, every[rows])
    alone = model.session().forward(tokens[:1], logits=[0, 0, 0]).logits
    assert same_bits(alone, every[[0, 0, 0]])


def test_a_row_of_a_head_may_be_asked_for_again(path: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    target = load(path, 64, 64)
    with ModelFile.open(write_tiny_head(tmp_path / "head.gguf", path)) as file:
        spec = read_head(file)
        head = load_head(
            file, spec, target, plan_head(file, spec, LoadSettings(64, n_batch=64, n_threads=1)), Device(1)
        )
    features = rng.standard_normal((2, spec.n_embd), dtype=np.float32)
    every = head.session().forward([5, 6], features, logits="all").logits
    assert same_bits(head.session().forward([5, 6], features, logits=[1, 1, 0]).logits, every[[1, 1, 0]])


# ---- interrupts ------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_pass_leaves_nothing_pending(model: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.session()
    session.forward([1, 2, 3])

    class Interrupting:
        def forward_lists(self, *arguments: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(model, "decoder", Interrupting)
    with pytest.raises(KeyboardInterrupt):
        session.forward([4, 5, 6])
    monkeypatch.undo()
    with pytest.raises(Exception, match="rows 0..-1"):
        session.commit([0])
    assert session.n_past == 0 and session.reuse_prefix([1, 2, 3]) == 0


def test_a_slow_handler_of_ctrl_c_is_heard(model: NativeModel, rng: np.random.Generator) -> None:
    """Passes look for signals every 40 ms; what the handler raised in 60 is not lost the next time."""
    tokens = some(rng, N_CTX)

    def handler(number: int, frame: FrameType | None) -> None:
        time.sleep(0.06)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            for _ in range(50):  # whatever the machine, one is running when the signal comes
                model.session().forward(tokens)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ended_by_one_interrupt(sessions: list[NativeSession], tokens: list[int]) -> list[str]:
    """How passes of texts ended that were begun again and again in threads of their own until an interrupt came."""
    ended: list[str] = []
    over, begun = threading.Event(), threading.Barrier(len(sessions) + 1)

    def run(session: NativeSession) -> None:
        begun.wait()
        try:
            while not over.is_set():
                session.forward(tokens)
            ended.append("whole")
        except Interrupted:
            ended.append("interrupted")

    threads = [threading.Thread(target=run, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(0.05)  # one runs, one waits, if the machine lets them
    sessions[1].interrupt()
    over.set()
    for thread in threads:
        thread.join()
    return ended


def test_an_interrupt_is_heard_by_a_text_that_waits_for_the_model(model: NativeModel, rng: np.random.Generator) -> None:
    tokens = some(rng, N_CTX)
    sessions = [model.session(N_CTX), model.session(N_CTX)]
    for _ in range(100):  # until a text was running and another one waiting when the interrupt came
        if ended_by_one_interrupt(sessions, tokens) == ["interrupted", "interrupted"]:
            break
    else:
        pytest.fail("one interrupt never ended the pass that ran and the one that waited")
    assert len(sessions[0].forward([1]).logits) == 1  # and it is over then
    outputs = model.forward([Rows(session, [1, 2]) for session in sessions])  # for several texts too
    assert [output.logits.shape for output in outputs] == [(1, 291), (1, 291)]


def test_an_interrupt_between_two_passes_of_a_batch_is_heard(
    path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(path, n_batch=64)
    session, decoder = model.session(), model.decoder()

    class AfterTheFirst:
        interrupts = decoder.interrupts

        def forward(self, *arguments: Any) -> bool:
            whole = decoder.forward(*arguments)
            decoder.interrupt()
            return whole

    monkeypatch.setattr(model, "decoder", AfterTheFirst)
    with pytest.raises(Interrupted):
        session.forward(some(rng, 300), logits=[0, 299])
    monkeypatch.undo()
    assert session.n_past == 0


# ---- the states of other decoders ------------------------------------------------------------------------------------


def config_of(n_layers: int, n_ctx: int = 64, window: int = 0) -> _core.DecoderConfig:
    config = _core.DecoderConfig(n_vocab=291, n_logits=291, n_embd=96, n_ctx=n_ctx, n_batch=32, norm_epsilon=1e-5)
    for _ in range(n_layers):
        attention = _core.AttentionConfig(
            n_in=96,
            n_heads=4,
            n_kv_heads=2,
            head_dim=24,
            rope=-1,
            query_scales=0,
            window=window,
            soft_cap=0.0,
            qk_norm=_core.QKNorm.none,
            key_bias=False,
        )
        config.add_layer(attention, _core.DenseConfig(n_ff=96, activation=_core.Activation.silu))
    return config


def test_a_decoder_refuses_the_state_of_another_model(model: NativeModel) -> None:
    for other, n_ctx in ((config_of(1), 64), (config_of(2, n_ctx=100_000), 100_000)):
        state = _core.SequenceState(other, _core.KvType.f16, n_ctx)
        out = np.empty((1, 291), dtype=np.float32)
        assert model.decoder().forward_lists([(state, [1], None, [], True, (), None, None)], out) is None


def test_a_state_keeps_only_rows_that_were_made(rng: np.random.Generator) -> None:
    state = _core.SequenceState(config_of(2), _core.KvType.f16, 64)
    for rows in ([5], list(range(40)), [0], [2**31 - 1], [1, 1], [-1]):
        with pytest.raises(ValueError, match="no such row"):
            state.commit(rows)
    with pytest.raises(ValueError, match="no such position"):
        state.resume(state.park(), -1)


def test_a_window_longer_than_any_text_is_none() -> None:
    plain, windowed = config_of(2), config_of(2, window=2**31 - 1)
    assert windowed.kv_bytes(_core.KvType.f16, 64) == plain.kv_bytes(_core.KvType.f16, 64)
    assert _core.SequenceState(windowed, _core.KvType.f16, 64).n_past == 0
