"""Sessions on an OpenCL device: near the reference for every model, and of no consequence for the text they draft."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_sessions import Open, difference, differences_to_the_reference, opener, some_tokens
from drafting import FixedCosts, cost_model
from exactness import branch_to
from numpy.typing import NDArray
from packed_dot import with_packed_dot
from tiny_models import ARCHITECTURES, Architecture, write_tiny_model

import edgeinfer
from edgeinfer.backends.opencl import OpenCLBackend, OpenCLDevice, OpenCLModel, OpenCLSession
from edgeinfer.backends.opencl import device as device_module
from edgeinfer.common.errors import (
    BackendLost,
    BudgetExceeded,
    ContextOverflow,
    InvalidArgument,
    UnsupportedModel,
)
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.pipeline import Speculator

FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"]
FORMATS += ["Q2_K", "Q3_K", "MXFP4"]
MODELS = [("llama", format) for format in FORMATS] + [("qwen2", "Q4_0"), ("qwen2", "Q4_K"), ("bitnet-b1.58", "I2_S")]
MODELS += [(name, "F32") for name in ARCHITECTURES[1:]]
SMALL_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")  # for which the reference rounds activations alike


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, opencl_device: OpenCLDevice) -> Open:
    return opener(write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen2.gguf", "qwen2", "F32"), "opencl")


# ---- near the reference ------------------------------------------------------------------------------------------


def differences(path: Path, format: str, rng: np.random.Generator) -> NDArray[np.float64]:
    """See differences_to_the_reference; of all kinds of products, which depend on the number of tokens."""
    activations = "int8" if format in SMALL_BLOCKS else "float32"
    return differences_to_the_reference(path, "opencl", rng, activations, (1, 3, 4, 6, 40))  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture, format", MODELS)
def test_logits_are_near_the_reference(
    architecture: Architecture, format: str, opencl_device: OpenCLDevice, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format)
    errors = differences(path, format, rng)
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
    assert differences(path, format, rng).max() < (3e-4 if format == "F16" else 3e-2)


@pytest.mark.parametrize("format", ["Q4_0", "Q8_0"])
def test_packed_dot_products_give_the_same_logits(
    format: str, opencl_device: OpenCLDevice, tmp_path: Path, rng: np.random.Generator
) -> None:
    tokens = some_tokens(rng, 7)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", format)) as file:
        backend, spec = OpenCLBackend(), read_spec(file)
        plan = backend.plan(file, spec, LoadSettings(64))
        plain, packed = (
            model.session().forward(tokens, logits="all").logits
            for model in (
                backend.load(file, spec, plan, Device(1)),
                OpenCLModel(file, spec, plan, with_packed_dot(opencl_device)),
            )
        )
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
    assert differences(path, shape["tensor_type"], rng).max() < 3e-2


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
            probabilities = log_softmax(session.forward(text).logits[0][:n_vocab])
            best = np.argsort(-probabilities, kind="stable")[:width].tolist()
            candidates += [(reach[node] + probabilities[id], node, id, probabilities[id]) for id in best]
        candidates.sort(key=lambda each: -each[0])
        level = list(range(len(tokens), len(tokens) + width))
        for of_path, node, id, log_p in candidates[:width]:
            reach[len(tokens)] = of_path
            tokens.append(id)
            parents.append(node)
            p.append(float(np.exp(log_p)))
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
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", architecture, "F32", metadata=keys), "opencl")
    prompt, rest, session, alone = some_tokens(rng, 21), some_tokens(rng, 4), open_session(n_batch=8), open_session()
    nodes = session.draft(prompt, n_levels, width, n_vocab=200)
    tokens, parents, p = chosen_on_the_host(alone, prompt.tolist(), n_levels, width, 200)
    # The host adds logarithms: where two nodes are reached as often to seven digits, they may change places.
    assert nodes.tokens.tolist() == tokens and nodes.parents.tolist() == parents
    np.testing.assert_allclose(nodes.p, p, rtol=2e-3)
    for row in range(len(nodes.candidates)):  # behind the prompt, and behind each node that was passed
        text = [*prompt, *(tokens[node] for node in (branch_to(row - 1, parents) if row else []))]
        probabilities = np.exp(log_softmax(alone.forward(text).logits[0][:200]))
        assert nodes.candidates[row, 0] == probabilities.argmax() and (np.diff(nodes.probabilities[row]) <= 0).all()
        np.testing.assert_allclose(nodes.probabilities[row], probabilities[nodes.candidates[row]], rtol=2e-3)
    assert len(nodes.candidates) == (n_levels - 1) * width + 1

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
    decoder = tiny().model.decoder
    n = decoder.spec.n_vocab
    cases = {
        "equal": (np.zeros(n), [0, 1, 2, 3, 4, 5, 6, 7]),
        "ascending": (np.arange(n) / n, list(range(199, 191, -1))),
        "some equal": (np.isin(np.arange(n), [250, 190, 3, 100, 17]) * 5.0, [3, 17, 100, 190, 0, 1, 2, 4]),
        "minus infinity": (np.where(np.arange(n) == 77, 0, -np.inf), [77, 0, 1, 2, 3, 4, 5, 6]),
        "no numbers": (np.full(n, np.nan), [199] * 8),
    }
    for what, (logits, expected) in cases.items():
        device, buffers = decoder.device, decoder.buffers
        device.write(buffers["logits"], logits.astype(np.float32))
        group = [decoder.group, 1]
        places = (buffers[x] for x in ("logits", "candidates", "probabilities", "ids"))
        decoder.launch("top_k", group, group, *places, 0, 200, n, 0)
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
        plan = backend.plan(file, spec, LoadSettings(100, n_batch=32))
        device = OpenCLDevice(backend.info)
        n_before = device.n_allocated
        session = OpenCLModel(file, spec, plan, device).session()
    assert session.memory() == plan.use and device.n_allocated - n_before == plan.use.total
    session.forward([1, 2, 3, 4], [-1, 0, 0, 1], logits="all")
    assert device.n_allocated - n_before == plan.use.total  # the file is closed, and nothing more is taken


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_weights_take_what_they_take_in_the_file(format: str, opencl_device: OpenCLDevice, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", format, n_vocab=304)) as file:
        plan = OpenCLBackend().plan(file, read_spec(file), LoadSettings(64))
        no_scales = 4 * 10 if format == "F16" else 0  # a buffer has 4 bytes at least
        assert plan.use.weights - no_scales == sum(info.n_bytes for info in file.tensors.values())


def test_what_does_not_fit_is_refused_before_it_is_loaded(opencl_device: OpenCLDevice, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")) as file:
        backend, spec = OpenCLBackend(), read_spec(file)
        with pytest.raises(BudgetExceeded, match=r"in one buffer, \d+ too few$"):
            backend.plan(file, spec, LoadSettings(1 << 28))
        with pytest.raises(InvalidArgument, match="KV cache of f16 only: found q8_0"):
            backend.plan(file, spec, LoadSettings(64, cache_type="q8_0"))


def test_a_type_without_a_format_is_refused_by_name(opencl_device: OpenCLDevice, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_K", types={"ffn_down": "IQ4_NL"})
    with (
        ModelFile.open(path) as file,
        pytest.raises(UnsupportedModel, match="ffn_down.weight .* type IQ4_NL, which the"),
    ):
        OpenCLBackend().plan(file, read_spec(file), LoadSettings(64))


def test_a_device_that_fails_is_a_lost_backend(tiny: Open) -> None:
    session = tiny()
    session.model.decoder.group = 1 << 20  # no device has such groups
    with pytest.raises(BackendLost, match="running kernel rms_norm failed: .*use another device") as caught:
        session.forward([1, 2, 3])
    assert caught.value.exit_code == 5 and session.n_past == 0


def test_kernels_that_do_not_build_are_a_lost_backend(
    opencl_device: OpenCLDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32")
    (tmp_path / "common.cl").touch()
    (tmp_path / "decoder.cl").write_text("kernel void rms_norm(global float* x) { x[0] = no_such_name; }")
    monkeypatch.setattr(device_module, "_SOURCES", tmp_path)
    with pytest.raises(BackendLost, match="building common.cl, decoder.cl failed: .*cannot compile this kernel"):
        opener(path, "opencl")()


# ---- what it is for ------------------------------------------------------------------------------------------------


def test_a_drafter_whose_device_fails_ends_drafting_and_not_the_answer(
    opencl_device: OpenCLDevice, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_ctx_train=256)
    with edgeinfer.load(path, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        plain = engine.generate("hello world", max_tokens=40, temperature=0)
        session = opener(path, "opencl")()
        session.model.decoder.group = 1 << 20
        drafter = ModelDrafter(session, engine.tokenizer.n_vocab, cost_model())
        engine.speculator = Speculator(engine.session, [drafter], FixedCosts(), engine.tokenizer.n_vocab, 8)
        drafted = engine.generate("hello world", max_tokens=40, temperature=0)
        engine.speculator.close()
    assert drafted.text == plain.text
    speculation = drafted.timings.speculation
    assert speculation is not None and "running kernel" in speculation.dropped["model"]
