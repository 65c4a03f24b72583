"""What sessions for drafts have in common, on OpenCL and on ONNX Runtime: passes, trees, misuse, and of no consequence
for the text.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_sessions import Kind, Open, difference, opener, some_tokens
from drafting import FixedCosts, cost_model
from exactness import LEAVES, TREE, branch_to, decode_one_by_one, prefill
from interrupts import interrupted_every
from peer import clear_choices
from tiny_models import Architecture, write_tiny_model

import edgeinfer
from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.errors import ContextOverflow, EdgeInferError, Interrupted, ShapeError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.calibration import measure_costs
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.pipeline import Speculator


@pytest.fixture
def tiny(kind: Kind, tmp_path: Path) -> Open:
    return opener(write_tiny_model(tmp_path / "qwen2.gguf", "qwen2", "F32"), kind)


def test_passes_however_cut_agree(tiny: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(rng, 60)
    expected = tiny().forward(tokens, logits="all").logits
    assert difference(decode_one_by_one(tiny(), tokens), expected) < 1e-4
    assert difference(tiny(n_batch=7).forward(tokens, logits="all").logits, expected) < 1e-4
    session = tiny()
    prefill(session, tokens[:50], 13)
    assert difference(session.forward(tokens[50:], logits="all").logits, expected[50:]) < 1e-4
    session.truncate(20)
    assert difference(session.forward(tokens[20:], logits="all").logits, expected[20:]) < 1e-4


@pytest.mark.parametrize("architecture, window", [("qwen2", None), ("gemma2", 20), ("gemma2", 3)])
def test_branches_of_a_tree_are_chains_and_can_be_kept(
    architecture: Architecture, window: int | None, kind: Kind, tmp_path: Path, rng: np.random.Generator
) -> None:
    keys = {f"{architecture}.attention.sliding_window": window}
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", architecture, "F32", metadata=keys), kind)
    session, alone = open_session(), open_session()
    prompt, nodes, rest = (some_tokens(rng, n) for n in (30, len(TREE), 3))
    prefill(session, prompt, 30)
    prefill(alone, prompt, 30)
    of_tree = session.forward(nodes, TREE, logits="all").logits
    for leaf in LEAVES:
        branch = branch_to(leaf, TREE)
        assert difference(of_tree[branch], decode_one_by_one(alone, nodes[branch])) < 1e-4
        follow = alone.forward(rest, logits="all").logits
        alone.truncate(30)
        session.forward(nodes, TREE)
        session.commit(branch)
        assert session.n_past == 30 + len(branch)
        assert difference(session.forward(rest, logits="all").logits, follow) < 1e-4
        session.truncate(30)


def test_logits_come_for_the_rows_asked_for(kind: Kind, tiny: Open, rng: np.random.Generator) -> None:
    tokens, session = some_tokens(rng, 40), tiny(n_batch=16)
    everything = session.forward(tokens, logits="all").logits
    of_rows = difference(session.forward(tokens, logits=[37, 0, 3]).logits, everything[[37, 0, 3]])
    assert of_rows <= (0.0 if kind == "opencl" else 1e-5)
    assert session.forward(tokens, logits=[]).logits.shape == (0, session.spec.n_vocab)
    assert session.forward(tokens).hidden is None and session.n_past == 0


def test_no_prefix_is_reused(tiny: Open) -> None:
    session = tiny()
    prefill(session, np.arange(9, dtype=np.int32), 9)
    assert session.reuse_prefix(range(9)) == 0 and session.n_past == 0


def test_misuse_is_refused(tiny: Open) -> None:
    session = tiny()
    for tokens in ([], [[1, 2]], [0.5], [-1], [session.spec.n_vocab]):
        with pytest.raises(ShapeError):
            session.forward(tokens)
    with pytest.raises(ContextOverflow):
        session.forward([1] * 300)
    with pytest.raises(ShapeError, match="one batch of 128"):
        session.forward([1] * 200, [-1] * 200)
    session.forward([1, 2, 3], [-1, 0, 0])
    with pytest.raises(ShapeError, match="row 2 follows row 0"):
        session.commit([0, 1, 2])
    session.commit([0, 2])
    with pytest.raises(ShapeError):
        session.commit([0])
    with pytest.raises(ShapeError):
        session.truncate(3)
    session.close()
    for call in (lambda: session.forward([1]), lambda: session.commit([]), lambda: session.memory()):
        with pytest.raises(EdgeInferError, match="closed"):
            call()


def test_another_thread_can_stop_a_pass(kind: Kind, tmp_path: Path, rng: np.random.Generator) -> None:
    session = opener(write_tiny_model(tmp_path / "m.gguf", "llama", "F32", n_layers=8), kind)()
    tokens = some_tokens(rng, 100)
    prefill(session, tokens[:10], 10)
    with interrupted_every(0.0005, session), pytest.raises(Interrupted):
        for _ in range(10_000):  # until an interrupt comes while a pass runs
            session.forward(tokens)
    assert session.n_past == 10 and np.isfinite(session.forward(tokens[:5]).logits).all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_it_drafts_changes_no_text(temperature: float, kind: Kind, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_ctx_train=256)
    options: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 4}
    with edgeinfer.load(path, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        plain = engine.generate("hello world, there is the one", **options)
        drafter = ModelDrafter(opener(path, kind)(), engine.tokenizer.n_vocab, cost_model())
        engine.speculator = Speculator(engine.session, [drafter], FixedCosts(), engine.tokenizer.n_vocab, 8)
        drafted = engine.generate("hello world, there is the one", **options)
        engine.speculator.close()
    assert drafted.text == plain.text and drafted.tokens == plain.tokens
    speculation = drafted.timings.speculation
    assert (
        speculation is not None and speculation.by_drafter["model"].accepted > 10
    )  # the same model: it is often right


def test_its_passes_can_be_timed_as_those_of_any_session(tiny: Open) -> None:
    session = tiny()
    curve = measure_costs(session, 0.3)
    assert curve.near[1] > 0 and session.n_past == 0


@pytest.mark.parametrize("kind", ["opencl", "onnx contrib"], indirect=True)
def test_the_default_model_chooses_as_the_native_engine_does(default_model: Path, kind: Kind) -> None:
    text = (Path(__file__).parents[1] / "benchmarks" / "sample.txt").read_text()
    with edgeinfer.load(default_model, backend=kind.split()[0], n_ctx=256) as engine:
        tokens = engine.tokenize(text)[:60]
        ours = engine.session.forward(tokens, logits="all").logits
        assert engine.generate("The capital of France is", max_tokens=3, temperature=0).text.startswith(" Paris")
    with ModelFile.open(default_model) as file:
        native, spec = NativeBackend(), read_spec(file)
        session = native.load(file, spec, native.plan(file, spec, LoadSettings(256)), Device(2)).session()
        theirs = session.forward(tokens, logits="all").logits
    clear = clear_choices(theirs)
    assert clear.sum() > 30
    assert np.mean(ours.argmax(axis=1)[clear] == theirs.argmax(axis=1)[clear]) > 0.97
