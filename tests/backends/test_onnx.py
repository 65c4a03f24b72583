"""Sessions on ONNX Runtime: near the reference for every model, and of no consequence for the text they draft."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import FixedCosts, cost_model
from exactness import LEAVES, TREE, branch_to, decode_one_by_one, prefill
from numpy.typing import NDArray
from peer import clear_choices
from tiny_models import ARCHITECTURES, Architecture, write_tiny_model

import edgeinfer
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.onnx import OnnxBackend, OnnxSession, ProviderInfo, choose_provider
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.drafters.model import ModelDrafter
from edgeinfer.errors import (
    BackendLost,
    ContextOverflow,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.gguf import ModelFile
from edgeinfer.models import read_spec
from edgeinfer.speculation.cost import measure_costs
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.types import Device

FLOATS = ["F32", "F16", "BF16"]
BLOCKS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "Q2_0"]
MODELS = [("llama", format) for format in FLOATS + BLOCKS] + [("qwen2", "Q4_0"), ("qwen2", "Q4_K")]
MODELS += [(name, "F32") for name in ARCHITECTURES[1:]] + [("bitnet-b1.58", "I2_S"), ("phi3", "Q8_0")]
Open = Callable[..., OnnxSession]

pytestmark = pytest.mark.usefixtures("onnx_provider")


def opener(path: Path, style: str = "contrib", n_ctx: int = 256) -> Open:
    """open_session(n_batch=) for a model file."""
    file = ModelFile.open(path)
    spec = read_spec(file)
    backend = OnnxBackend(replace(choose_provider("CPU"), style=style))

    def open_session(n_batch: int = 128) -> OnnxSession:
        return backend.load(file, spec, backend.plan(file, spec, n_ctx, n_batch), Device(1))

    return open_session


def some_tokens(rng: np.random.Generator, n: int) -> NDArray[np.int32]:
    return rng.integers(0, 259, n).astype(np.int32)


def difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The largest, as a share of the largest value."""
    return float(np.abs(a - b).max() / np.abs(b).max())


# ---- near the reference ----------------------------------------------------------------------------------------------


def differences_to_the_reference(path: Path, style: str, rng: np.random.Generator) -> NDArray[np.float64]:
    """Of the logits and hidden states of each token of some texts, the last one longer than the windows."""
    file = ModelFile.open(path)
    spec = read_spec(file)
    oracle = ReferenceBackend()
    reference = oracle.load(file, spec, oracle.plan(file, spec, 256, 128), Device(1))
    session = opener(path, style)()
    errors: list[float] = []
    for n in (1, 3, 40):
        tokens = some_tokens(rng, n)
        a, b = (each.forward(tokens, logits="all", hidden=(0, -1)) for each in (session, reference))
        assert a.hidden is not None and b.hidden is not None
        c, d = (each.forward(tokens, logits=(), hidden=True) for each in (session, reference))
        assert c.hidden is not None and d.hidden is not None
        for ours, theirs in zip([a.logits, *a.hidden, *c.hidden], [b.logits, *b.hidden, *d.hidden], strict=True):
            errors.extend(np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max())
    return np.array(errors)


@pytest.mark.parametrize("architecture, format", MODELS)
def test_logits_are_near_the_reference(
    architecture: Architecture, format: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format)
    errors = differences_to_the_reference(path, "contrib", rng)
    # The reference rounds its cache to f16; ONNX Runtime rounds what it multiplies with codes to int8.
    assert errors.max() < (1e-3 if format in FLOATS else 6e-2)


@pytest.mark.parametrize("architecture, format", MODELS)
def test_graphs_of_the_standard_alone_are_nearer_still(
    architecture: Architecture, format: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Weights are kept exactly, and nothing else is rounded."""
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format)
    assert differences_to_the_reference(path, "plain", rng).max() < 1e-3


@pytest.mark.parametrize("style", ["contrib", "plain"])
@pytest.mark.parametrize(
    "shape",
    [
        {"tensor_type": "Q4_1", "n_heads": 1, "n_kv_heads": 1, "n_embd": 96, "head_dim": 96, "tied": True},
        {"tensor_type": "F16", "n_heads": 4, "n_kv_heads": 4, "n_embd": 96, "head_dim": 10, "n_ff": 100},
        {"tensor_type": "Q8_0", "n_heads": 7, "n_kv_heads": 1, "n_embd": 160, "head_dim": 32, "tied": True},
        {"tensor_type": "Q6_K", "head_dim": 64, "types": {"attn_v": "Q8_0", "ffn_up": "F16"}, "output_biases": True},
    ],
)
def test_odd_shapes_are_near_the_reference(
    shape: dict[str, Any], style: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", **shape)
    assert differences_to_the_reference(path, style, rng).max() < (1e-3 if style == "plain" else 6e-2)


def test_of_several_contexts_the_longer_one_has_its_own_rotation(tmp_path: Path, rng: np.random.Generator) -> None:
    """phi3 turns by other frequencies in a session of more positions than it was first trained with."""
    keys = {"phi3.rope.scaling.original_context_length": 100}
    path = write_tiny_model(tmp_path / "m.gguf", "phi3", "F32", rope_freqs=True, metadata=keys)
    assert differences_to_the_reference(path, "contrib", rng).max() < 1e-3


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["contrib", "plain"])
def style(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def tiny(style: str, tmp_path: Path) -> Open:
    return opener(write_tiny_model(tmp_path / "qwen2.gguf", "qwen2", "F32"), style)


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
    architecture: Architecture, window: int | None, style: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    keys = {f"{architecture}.attention.sliding_window": window}
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", architecture, "F32", metadata=keys), style)
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


def test_logits_come_for_the_rows_asked_for(tiny: Open, rng: np.random.Generator) -> None:
    tokens, session = some_tokens(rng, 40), tiny(n_batch=16)
    everything = session.forward(tokens, logits="all").logits
    assert difference(session.forward(tokens, logits=[37, 0, 3]).logits, everything[[37, 0, 3]]) < 1e-5
    assert session.forward(tokens, logits=[]).logits.shape == (0, session.spec.n_vocab)
    assert session.forward(tokens).hidden is None and session.n_past == 0


def test_nothing_is_recalled(tiny: Open) -> None:
    session = tiny()
    prefill(session, np.arange(9, dtype=np.int32), 9)
    assert not session.is_exact and session.recall(range(9)) == 0 and session.n_past == 0


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


# ---- memory and failures ---------------------------------------------------------------------------------------------


def test_another_cache_is_refused(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")) as file:
        backend, spec = OnnxBackend(), read_spec(file)
        with pytest.raises(InvalidArgument, match="no KV cache of q8_0"):
            backend.plan(file, spec, 64, cache_type="q8_0")


def test_a_type_without_a_rule_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_K", types={"ffn_down": "Q2_K"})
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match="ffn_down.weight: tensor type Q2_K is"):
        OnnxBackend().plan(file, read_spec(file), 64)


def test_a_graph_that_a_provider_cannot_run_is_refused(tmp_path: Path, onnx_provider: ProviderInfo) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32")
    with ModelFile.open(path) as file:
        backend, spec = OnnxBackend(onnx_provider), read_spec(file)
        plan = backend.plan(file, spec, 64)
        wrong = replace(spec, n_kv_heads=4)  # keys of another width than the cache
        with pytest.raises((UnsupportedModel, BackendLost), match="ONNX Runtime: .* failed"):
            backend.load(file, wrong, plan, Device(1)).forward([1, 2, 3])


def test_a_pass_that_runs_stops_before_its_next_operator(tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny()
    expected = session.forward([1, 2, 3]).logits
    program = session._open()

    class Interrupting:
        """As if the call came just behind the beginning of the pass."""

        def __init__(self, session: Any) -> None:
            self._session = session

        def run_with_iobinding(self, *arguments: Any) -> None:
            program.interrupt()
            self._session.run_with_iobinding(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(program, "_session", Interrupting(program._session))
        with pytest.raises(Interrupted):
            session.forward([1, 2, 3])
    assert session.n_past == 0 and difference(session.forward([1, 2, 3]).logits, expected) < 1e-6


def test_another_thread_can_stop_a_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    session = opener(write_tiny_model(tmp_path / "m.gguf", "llama", "F32", n_layers=8))()
    tokens = some_tokens(rng, 100)
    prefill(session, tokens[:10], 10)
    stopped = threading.Event()

    def keep_stopping() -> None:
        while not stopped.wait(0.0005):
            session.interrupt()

    thread = threading.Thread(target=keep_stopping)
    thread.start()
    try:
        with pytest.raises(Interrupted):
            for _ in range(50):
                session.forward(tokens)
    finally:
        stopped.set()
        thread.join()
    assert session.n_past == 10 and np.isfinite(session.forward(tokens[:5]).logits).all()


# ---- what it is for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_it_drafts_changes_no_text(temperature: float, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_ctx_train=256)
    options: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 4}
    with edgeinfer.load(path, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        plain = engine.generate("hello world, there is the one", **options)
        drafter = ModelDrafter(opener(path)(), engine.tokenizer.n_vocab, cost_model())
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


def test_the_default_model_chooses_as_the_native_engine_does(default_model: Path) -> None:
    text = (Path(__file__).parents[1] / "benchmarks" / "sample.txt").read_text()
    with edgeinfer.load(default_model, backend="onnx", n_ctx=256) as engine:
        tokens = engine.tokenize(text)[:60]
        ours = engine.session.forward(tokens, logits="all").logits
        assert engine.generate("The capital of France is", max_tokens=3, temperature=0).text.startswith(" Paris")
    with ModelFile.open(default_model) as file:
        native, spec = NativeBackend(), read_spec(file)
        session = native.load(file, spec, native.plan(file, spec, 256), Device(2))
        theirs = session.forward(tokens, logits="all").logits
    clear = clear_choices(theirs)
    assert clear.sum() > 30
    assert np.mean(ours.argmax(axis=1)[clear] == theirs.argmax(axis=1)[clear]) > 0.97
