"""Sessions on an OpenCL device: near the reference for every model, and of no consequence for the text they draft."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import FixedCosts, cost_model
from exactness import LEAVES, TREE, branch_to, decode_one_by_one, prefill
from numpy.typing import NDArray
from packed_dot import with_packed_dot
from peer import clear_choices
from tiny_models import ARCHITECTURES, Architecture, write_tiny_model

import edgeinfer
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.opencl import OpenCLBackend, OpenCLDevice, OpenCLSession
from edgeinfer.backends.opencl import device as device_module
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.drafters.model import ModelDrafter
from edgeinfer.errors import (
    BackendLost,
    BudgetExceeded,
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

FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"]
MODELS = [("llama", format) for format in FORMATS] + [("qwen2", "Q4_0"), ("qwen2", "Q4_K"), ("bitnet-b1.58", "I2_S")]
MODELS += [(name, "F32") for name in ARCHITECTURES[1:]]
SMALL_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # for which the reference rounds activations alike
Open = Callable[..., OpenCLSession]


def opener(path: Path, n_ctx: int = 256) -> Open:
    """open_session(n_batch=) for a model file."""
    file = ModelFile.open(path)
    spec = read_spec(file)
    backend = OpenCLBackend()

    def open_session(n_batch: int = 128) -> OpenCLSession:
        return backend.load(file, spec, backend.plan(file, spec, n_ctx, n_batch), Device(1))

    return open_session


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, opencl_device: OpenCLDevice) -> Open:
    return opener(write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen2.gguf", "qwen2", "F32"))


def some_tokens(rng: np.random.Generator, n: int) -> NDArray[np.int32]:
    return rng.integers(0, 259, n).astype(np.int32)


def difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The largest, as a share of the largest value."""
    return float(np.abs(a - b).max() / np.abs(b).max())


# ---- near the reference ------------------------------------------------------------------------------------------


def differences_to_the_reference(path: Path, format: str, rng: np.random.Generator) -> NDArray[np.float64]:
    """Of the logits and hidden states of each token of some texts, the last one longer than the windows."""
    file = ModelFile.open(path)
    spec = read_spec(file)
    oracle = ReferenceBackend("int8" if format in SMALL_BLOCKS else "float32")
    reference = oracle.load(file, spec, oracle.plan(file, spec, 256, 128), Device(1))
    session = opener(path)()
    errors: list[float] = []
    for n in (1, 3, 4, 6, 40):
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
    architecture: Architecture, format: str, opencl_device: OpenCLDevice, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format)
    errors = differences_to_the_reference(path, format, rng)
    # The cache is rounded to f16, activations of quantised matrices to int8: a step of a rounding moves what follows.
    assert errors.max() < (3e-4 if format in ("F32", "F16", "BF16") else 3e-2)
    if format in SMALL_BLOCKS:
        assert np.median(errors) < 1e-4


@pytest.mark.parametrize("format", ["Q4_1", "F16"])
def test_groups_as_on_a_gpu_are_near_the_reference(
    format: str,
    opencl_device: OpenCLDevice,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OpenCLDevice, "is_cpu", False)
    path = write_tiny_model(tmp_path / "m.gguf", "gemma2", format)
    assert differences_to_the_reference(path, format, rng).max() < (3e-4 if format == "F16" else 3e-2)


@pytest.mark.parametrize("format", ["Q4_0", "Q8_0"])
def test_packed_dot_products_give_the_same_logits(
    format: str, opencl_device: OpenCLDevice, tmp_path: Path, rng: np.random.Generator
) -> None:
    tokens = some_tokens(rng, 7)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", format)) as file:
        backend, spec = OpenCLBackend(), read_spec(file)
        plan = backend.plan(file, spec, 64)
        plain = backend.load(file, spec, plan, Device(1)).forward(tokens, logits="all").logits
        packed = OpenCLSession(file, spec, plan, with_packed_dot(opencl_device)).forward(tokens, logits="all").logits
    assert difference(packed, plain) < 1e-4


@pytest.mark.parametrize(
    "shape",
    [
        {"tensor_type": "Q4_1", "n_heads": 1, "n_kv_heads": 1, "n_embd": 96, "head_dim": 96},
        {"tensor_type": "F16", "n_heads": 4, "n_kv_heads": 4, "n_embd": 96, "head_dim": 10, "n_ff": 100},
        {"tensor_type": "Q8_0", "n_heads": 7, "n_kv_heads": 1, "n_embd": 160, "head_dim": 32, "tied": True},
        {"tensor_type": "Q6_K", "head_dim": 64, "types": {"attn_v": "Q8_0", "ffn_up": "F16"}, "output_biases": True},
    ],
)
def test_odd_shapes_are_near_the_reference(
    shape: dict[str, Any], opencl_device: OpenCLDevice, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", **shape)
    assert differences_to_the_reference(path, shape["tensor_type"], rng).max() < 3e-2


# ---- the cache ---------------------------------------------------------------------------------------------------


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
    architecture: Architecture,
    window: int | None,
    opencl_device: OpenCLDevice,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    keys = {f"{architecture}.attention.sliding_window": window}
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", architecture, "F32", metadata=keys))
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
    assert np.array_equal(session.forward(tokens, logits=[37, 0, 3]).logits, everything[[37, 0, 3]])
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
    with pytest.raises(EdgeInferError, match="closed"):
        session.forward([1])


# ---- trees chosen on the device ----------------------------------------------------------------------------------


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def chosen_on_the_host(
    session: OpenCLSession, prompt: list[int], n_levels: int, width: int, n_vocab: int
) -> tuple[list[int], list[int], list[float]]:
    """(tokens, parents, p) of the tree, with a pass from the beginning for each node."""
    tokens: list[int] = []
    parents: list[int] = []
    p: list[float] = []
    reach = {-1: 0.0}
    level = [-1]
    for _ in range(n_levels):
        candidates = []
        for node in level:
            text = prompt + [tokens[row] for row in (branch_to(node, parents) if node >= 0 else [])]
            chances = log_softmax(session.forward(text).logits[0][:n_vocab])
            best = np.argsort(-chances, kind="stable")[:width].tolist()
            candidates += [(reach[node] + chances[id], node, id, chances[id]) for id in best]
        candidates.sort(key=lambda each: -each[0])
        level = list(range(len(tokens), len(tokens) + width))
        for of_path, node, id, chance in candidates[:width]:
            reach[len(tokens)] = of_path
            tokens.append(id)
            parents.append(node)
            p.append(float(np.exp(chance)))
    return tokens, parents, p


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("architecture, n_levels, width", [("qwen2", 6, 1), ("qwen2", 5, 3), ("gemma2", 5, 8)])
def test_a_tree_is_what_the_host_would_choose(
    architecture: Architecture,
    n_levels: int,
    width: int,
    is_cpu: bool,
    opencl_device: OpenCLDevice,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OpenCLDevice, "is_cpu", is_cpu)
    keys = {f"{architecture}.attention.sliding_window": 4 if architecture == "gemma2" else None}
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", architecture, "F32", metadata=keys))
    prompt, rest, session, alone = some_tokens(rng, 21), some_tokens(rng, 4), open_session(n_batch=8), open_session()
    nodes = session.draft(prompt, n_levels, width, n_vocab=200)
    tokens, parents, p = chosen_on_the_host(alone, prompt.tolist(), n_levels, width, 200)
    # The host adds logarithms: where two nodes are reached as often to seven digits, they may change places.
    assert nodes.tokens.tolist() == tokens and nodes.parents.tolist() == parents
    np.testing.assert_allclose(nodes.p, p, rtol=2e-3)

    leaf = (n_levels - 1) * width - 1  # the last node that was passed on
    path = branch_to(leaf, parents)
    session.commit([*range(21), *(21 + node for node in path)])
    assert session.n_past == 21 + len(path)
    expected = alone.forward([*prompt, *(tokens[node] for node in path), *rest]).logits
    assert difference(session.forward(rest).logits, expected) < 1e-4


@pytest.mark.parametrize("is_cpu", [True, False])
def test_of_equals_the_first_comes_first_and_nothing_is_beyond_the_vocabulary(
    is_cpu: bool, tiny: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenCLDevice, "is_cpu", is_cpu)
    decoder = tiny()._open()
    n = decoder.spec.n_vocab
    cases = {
        "equal": (np.zeros(n), [0, 1, 2, 3, 4, 5, 6, 7]),
        "ascending": (np.arange(n) / n, list(range(199, 191, -1))),
        "some equal": (np.isin(np.arange(n), [250, 190, 3, 100, 17]) * 5.0, [3, 17, 100, 190, 0, 1, 2, 4]),
        "minus infinity": (np.where(np.arange(n) == 77, 0, -np.inf), [77, 0, 1, 2, 3, 4, 5, 6]),
        "no numbers": (np.full(n, np.nan), [199] * 8),
    }
    for what, (logits, expected) in cases.items():
        device, buffers = decoder.device, decoder._buffers
        device.write(buffers["logits"], logits.astype(np.float32))
        group = [decoder._group, 1]
        decoder._run("likeliest", group, group, *(buffers[x] for x in ("logits", "candidates", "chances")), 200, n)
        assert device.read(buffers["candidates"], np.empty(8, dtype=np.int32)).tolist() == expected, what


def test_trees_that_do_not_fit_are_refused(tiny: Open) -> None:
    session = tiny()
    with pytest.raises(ContextOverflow):
        session.draft([1] * 250, 8)
    assert session.draft([1] * 250, 7).tokens.shape == (7,) and session.n_past == 0
    for n_levels, width in [(0, 1), (129, 1), (17, 8), (1, 9), (1, 0)]:
        with pytest.raises(InvalidArgument, match=f"levels of 1..8 nodes, 128 in all: found {n_levels} of {width}"):
            session.draft([1], n_levels, width)
    with pytest.raises(InvalidArgument, match=r"levels of 1\.\.4 nodes"):
        tiny(n_batch=4).draft([1], 2, 8)
    for n_vocab in (7, 10**6):
        with pytest.raises(InvalidArgument, match="n_vocab must be in 8"):
            session.draft([1], 1, n_vocab=n_vocab)
    assert session.draft([1], 4, 4, n_vocab=8).tokens.max() < 8


# ---- memory and failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture, format", [("qwen2", "Q4_K"), ("phi3", "F16"), ("gemma3", "Q8_0"), ("llama", "I2_S")]
)
def test_the_plan_is_what_the_session_takes(
    architecture: Architecture, format: str, opencl_device: OpenCLDevice, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format)
    with ModelFile.open(path) as file:
        backend, spec = OpenCLBackend(), read_spec(file)
        plan = backend.plan(file, spec, 100, 32)
        device = OpenCLDevice(backend.info)
        n_before = device.n_allocated
        session = OpenCLSession(file, spec, plan, device)
    assert session.memory() == plan.use and device.n_allocated - n_before == plan.use.total
    session.forward([1, 2, 3, 4], [-1, 0, 0, 1], logits="all")
    assert device.n_allocated - n_before == plan.use.total  # the file is closed, and nothing more is taken


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_weights_take_what_they_take_in_the_file(format: str, opencl_device: OpenCLDevice, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", format, n_vocab=304)) as file:
        plan = OpenCLBackend().plan(file, read_spec(file), 64)
        no_scales = 4 * 10 if format == "F16" else 0  # a buffer has 4 bytes at least
        assert plan.use.weights - no_scales == sum(info.n_bytes for info in file.tensors.values())


def test_what_does_not_fit_is_refused_before_it_is_loaded(opencl_device: OpenCLDevice, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")) as file:
        backend, spec = OpenCLBackend(), read_spec(file)
        with pytest.raises(BudgetExceeded, match="in one buffer; use a smaller model, or a smaller context than"):
            backend.plan(file, spec, 1 << 28)
        with pytest.raises(InvalidArgument, match="KV cache of f16 only: found q8_0"):
            backend.plan(file, spec, 64, cache_type="q8_0")


def test_a_type_without_a_format_is_refused_by_name(opencl_device: OpenCLDevice, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_K", types={"ffn_down": "Q2_K"})
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match="ffn_down.weight .* type Q2_K, which the"):
        OpenCLBackend().plan(file, read_spec(file), 64)


def test_another_thread_can_stop_a_pass(opencl_device: OpenCLDevice, tmp_path: Path, rng: np.random.Generator) -> None:
    session = opener(write_tiny_model(tmp_path / "m.gguf", "llama", "F32", n_layers=8))()
    tokens = some_tokens(rng, 100)
    prefill(session, tokens[:10], 10)
    stopped = threading.Event()

    def keep_stopping() -> None:
        while not stopped.wait(0.001):
            session.interrupt()

    thread = threading.Thread(target=keep_stopping)
    thread.start()
    try:
        with pytest.raises(Interrupted):
            session.forward(tokens)
    finally:
        stopped.set()
        thread.join()
    assert session.n_past == 10 and np.isfinite(session.forward(tokens[:5]).logits).all()


def test_a_device_that_fails_is_a_lost_backend(tiny: Open) -> None:
    session = tiny()
    decoder = session._open()
    decoder._group = 1 << 20  # no device has such groups
    with pytest.raises(BackendLost, match="running kernel rms_norm failed: .*use another device") as caught:
        session.forward([1, 2, 3])
    assert caught.value.exit_code == 5 and session.n_past == 0


def test_kernels_that_do_not_build_are_a_lost_backend(
    opencl_device: OpenCLDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32")
    (tmp_path / "decoder.cl").write_text("kernel void rms_norm(global float* x) { x[0] = no_such_name; }")
    monkeypatch.setattr(device_module, "_SOURCES", tmp_path)
    with pytest.raises(BackendLost, match="building decoder.cl failed: .*cannot compile this kernel"):
        opener(path)()


# ---- what it is for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_it_drafts_changes_no_text(
    temperature: float, opencl_device: OpenCLDevice, tmp_path: Path, rng: np.random.Generator
) -> None:
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


def test_a_drafter_whose_device_fails_ends_drafting_and_not_the_answer(
    opencl_device: OpenCLDevice, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_ctx_train=256)
    with edgeinfer.load(path, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        plain = engine.generate("hello world", max_tokens=40, temperature=0)
        session = opener(path)()
        session._open()._group = 1 << 20
        drafter = ModelDrafter(session, engine.tokenizer.n_vocab, cost_model())
        engine.speculator = Speculator(engine.session, [drafter], FixedCosts(), engine.tokenizer.n_vocab, 8)
        drafted = engine.generate("hello world", max_tokens=40, temperature=0)
        engine.speculator.close()
    assert drafted.text == plain.text
    speculation = drafted.timings.speculation
    assert speculation is not None and "running kernel" in speculation.dropped["model"]


def test_the_default_model_chooses_as_the_native_engine_does(default_model: Path, opencl_device: OpenCLDevice) -> None:
    text = (Path(__file__).parents[1] / "benchmarks" / "sample.txt").read_text()
    with edgeinfer.load(default_model, backend="opencl", n_ctx=256) as engine:
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
