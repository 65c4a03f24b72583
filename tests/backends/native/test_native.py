"""The C++ engine: exact by construction, equal to the reference within rounding, and hard to misuse."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from exactness import LEAVES, TREE, branch_to, comparisons, decode_one_by_one, prefill, same_bits
from interrupts import interrupted_every
from peer import clear_choices, llama_cpp_logits
from tiny_models import (
    ARCHITECTURES,
    BLOCK_256_TYPES,
    TERNARY_TYPES,
    UNKNOWN_TO_LLAMA_CPP,
    Architecture,
    write_tiny_model,
)

from edgeinfer.backends.native import NativeBackend, NativeSession, _core, available_isas, top_k
from edgeinfer.backends.native.backend import faster_bits
from edgeinfer.backends.native.packing.packed import LAYOUT, packed_path
from edgeinfer.backends.native.weights import BASE_THREE
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import (
    BackendUnavailable,
    ContextOverflow,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
    InvalidGGUF,
    ModelFileError,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
FORMATS += ["TQ1_0", "TQ2_0", "I2_S", "Q2_0", "MXFP4"]
# Every format in two architectures, every architecture in a format of each kind.
MODELS = [(architecture, format) for architecture in ("llama", "qwen2") for format in FORMATS]
MODELS += [(name, format) for name in ARCHITECTURES[2:] for format in ("F32", "Q8_0", "Q4_K")]
MODELS += [(name, "I2_S") for name in ARCHITECTURES if name.startswith("bitnet")]
TOLERANCE = {"F32": 1e-3, "Q4_K": 0.04}  # of the spread of the logits; measured: 4e-4 and 2.5e-2
Open = Callable[..., NativeSession]


def opener(path: Path, n_ctx: int = 256, cache_type: CacheType = "f16") -> Open:
    """open_session(n_threads=, isa=, n_batch=) for a model file."""
    file = ModelFile.open(path)
    spec = read_spec(file)
    backend = NativeBackend()

    def open_session(n_threads: int = 2, isa: str | None = None, n_batch: int = 128) -> NativeSession:
        plan = backend.plan(
            file, spec, LoadSettings(n_ctx, n_batch=n_batch, n_threads=n_threads, cache_type=cache_type)
        )
        return backend.load(file, spec, plan, Device(n_threads, isa)).session()

    return open_session


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen2.gguf", "qwen2", "Q4_K"))


def whole_heads(format: str) -> int:
    """Size of a head that a q8_0 cache can hold, and whose heads together the format can."""
    return 64 if format in BLOCK_256_TYPES + TERNARY_TYPES else 32


def some_tokens(open_session: Open, n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, open_session().spec.n_vocab, n).astype(np.int32)


@pytest.mark.parametrize("architecture, format", MODELS)
def test_the_bits_depend_on_nothing_but_the_text(
    format: str, architecture: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", architecture, format))
    tokens = some_tokens(open_session, 100, rng)
    differing = [what for what, equal in comparisons(open_session, available_isas(), tokens) if not equal]
    assert differing == []


@pytest.mark.parametrize(
    "shape",
    [
        {"tensor_type": "Q4_1", "n_heads": 1, "n_kv_heads": 1, "n_embd": 96, "head_dim": 96},
        {"tensor_type": "Q5_0", "n_heads": 6, "n_kv_heads": 2, "n_embd": 96, "head_dim": 16},
        {"tensor_type": "Q8_0", "n_heads": 7, "n_kv_heads": 1, "n_embd": 160, "head_dim": 32, "tied": True},
        {"tensor_type": "F16", "n_heads": 4, "n_kv_heads": 4, "n_embd": 96, "head_dim": 10, "n_ff": 100},
        {"tensor_type": "Q6_K", "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "types": {"attn_v": "Q8_0"}},
    ],
)
def test_odd_shapes_are_exact_too(shape: dict[str, object], tmp_path: Path, rng: np.random.Generator) -> None:
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", **shape))
    tokens = some_tokens(open_session, 100, rng)
    differing = [what for what, equal in comparisons(open_session, available_isas(), tokens) if not equal]
    assert differing == []


@pytest.mark.parametrize("architecture, format", [("qwen2", "Q4_K"), ("gemma2", "Q8_0"), ("phi3", "F32")])
@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
def test_long_texts_are_exact_too(
    architecture: str, format: str, cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Over several segments of the cache, and at the edge of one."""
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format, head_dim=whole_heads(format))
    open_session = opener(path, 640, cache_type)
    for n_tokens in (128 + 16 + 5, 600):
        tokens = some_tokens(open_session, n_tokens, rng)
        differing = [what for what, equal in comparisons(open_session, available_isas(), tokens) if not equal]
        assert differing == []


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
@pytest.mark.parametrize("architecture, format", MODELS)
def test_logits_equal_the_reference(
    format: str, architecture: str, cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format, head_dim=whole_heads(format))
    file = ModelFile.open(path)
    spec = read_spec(file)
    oracle = ReferenceBackend(activations="int8")
    plan = oracle.plan(file, spec, LoadSettings(256, n_batch=128, cache_type=cache_type))
    reference = oracle.load(file, spec, plan, Device(1)).session()
    session = opener(path, cache_type=cache_type)()
    errors: dict[int, list[float]] = {4: [], 40: []}
    for n in [4] * 24 + [40]:  # the last one is longer than the windows
        tokens = rng.integers(0, spec.n_vocab, n).astype(np.int32)
        a = session.forward(tokens, logits="all", hidden=(0, -1))
        b = reference.forward(tokens, logits="all", hidden=(0, -1))
        c, d = session.forward(tokens, hidden=True), reference.forward(tokens, hidden=True)
        assert a.hidden is not None and b.hidden is not None and c.hidden is not None and d.hidden is not None
        for ours, theirs in zip([a.logits, *a.hidden, *c.hidden], [b.logits, *b.hidden, *d.hidden], strict=True):
            errors[n].extend(np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max())
    # Both round activations to int8 and the cache to f16 or int8. Sums that differ in their last bit tip such a
    # rounding over now and then: by one step of 1/127, or of 1/2048 with floats only; a step of I2_S is that of the
    # largest in a whole token. All other rows differ by float32's rounding.
    assert np.mean(np.array(errors[4]) < 5e-6) > 0.6
    only_floats = format in ("F32", "F16", "BF16") and cache_type == "f16"
    steps_are_large = format == "I2_S" or cache_type == "k6v4"  # those of its values are 1/8 of the largest
    assert np.max(errors[4] + errors[40]) < (1e-3 if only_floats else 8e-2 if steps_are_large else 3e-2)


# Windows of 20 positions, as the tiny gemma2 and gemma3 have too.
OPTIONS: dict[str, dict[str, Any]] = {"olmo2": {"n_layers": 4, "metadata": {"olmo2.attention.sliding_window": 20}}}


@pytest.mark.parametrize("format", ["F32", "Q4_K"])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in UNKNOWN_TO_LLAMA_CPP])
def test_200_tokens_agree_with_llama_cpp_where_the_choice_is_clear(
    llama_cpp: ModuleType, tmp_path: Path, rng: np.random.Generator, architecture: Architecture, format: str
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format, **OPTIONS.get(architecture, {}))
    session, tokens = opener(path)(), rng.integers(0, 259, 200).astype(np.int32)
    head = session.forward(tokens[:15], logits="all").logits
    session.commit(range(15))
    over_the_edge = decode_one_by_one(session, tokens[15:30])  # of the windows
    ours = np.concatenate([head, over_the_edge, session.forward(tokens[30:], logits="all").logits])
    theirs = llama_cpp_logits(llama_cpp, path, tokens)
    clear = clear_choices(theirs)
    assert clear.mean() > 0.3
    assert np.array_equal(ours.argmax(axis=1)[clear], theirs.argmax(axis=1)[clear])
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < TOLERANCE[format] * theirs.std()


def test_hidden_states_are_the_residual_stream(tiny: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(tiny, 9, rng)
    whole = tiny().forward(tokens, hidden=(0, 1, -1)).hidden
    chunked = tiny(n_batch=4).forward(tokens, hidden=(0, 1, -1)).hidden
    assert whole is not None and chunked is not None
    assert whole.shape == (3, 9, tiny().spec.n_embd)
    assert same_bits(whole, chunked)
    assert not same_bits(whole[0], whole[1])
    assert same_bits(whole[1], whole[2])


def test_features_are_the_same_bits_in_any_cut_and_in_trees(tiny: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(tiny, 13, rng)
    whole = tiny().forward(tokens, hidden=True).hidden
    chunked = tiny(n_batch=4).forward(tokens, logits=(), hidden=True).hidden
    assert whole is not None and chunked is not None
    assert whole.shape == (1, 13, tiny().spec.n_embd) and same_bits(whole, chunked)
    tree = tiny().forward(tokens, TREE, hidden=True).hidden
    assert tree is not None
    for leaf in LEAVES:
        branch = branch_to(leaf, TREE)
        session, rows = tiny(), []
        for token in tokens[branch]:
            one = session.forward([token], hidden=True).hidden
            assert one is not None
            rows.append(one[0])
            session.commit([0])
        assert same_bits(tree[0, branch], np.concatenate(rows))


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])  # the second with windows
def test_a_tree_grown_from_pass_to_pass_has_the_bits_of_its_texts_alone(
    architecture: Architecture, cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Three texts side by side, token by token, over the edge of a segment of the cache."""
    path = write_tiny_model(tmp_path / "m.gguf", architecture, "Q4_K", head_dim=64)
    session = opener(path, 640, cache_type)(n_batch=400)
    prompt, texts = some_tokens(lambda: session, 70, rng), some_tokens(lambda: session, 120, rng).reshape(3, 40)
    prefill(session, prompt, 64)
    first = session.forward(texts[:, :20].ravel(), [-1 if i % 20 == 0 else i - 1 for i in range(60)], logits=[19, 59])
    rows, logits = [19, 39, 59], [first.logits]
    for step in range(20, 40):
        n = 3 * step
        logits.append(session.forward(texts[:, step], rows, n_pending=n, logits="all").logits)
        rows = [n, n + 1, n + 2]
    path_of_second = [*range(20, 40), *range(61, 120, 3)]
    session.commit(path_of_second)
    after = session.forward(prompt[:3], logits="all").logits
    for number, text in enumerate(texts):
        session.truncate(70)
        alone = decode_one_by_one(session, text)
        assert same_bits(alone[20:], np.stack([each[number] for each in logits[1:]]))
        if number != 1:
            assert same_bits(alone[19], logits[0][number // 2])
        else:
            assert same_bits(session.forward(prompt[:3], logits="all").logits, after)
    for n_pending in (4, -1):
        session.forward(prompt[:3])
        with pytest.raises(ShapeError, match=r"3 rows are pending, n_pending must be in 0\.\.3: found"):
            session.forward([1], n_pending=n_pending)
    session.truncate(0)
    session.forward(np.ones(399, dtype=np.int32), [-1] * 399)
    with pytest.raises(ShapeError, match="a tree must fit into one batch of 400 tokens: found 401"):
        session.forward([1, 1], [0, 1], n_pending=399)
    session.truncate(0)
    session.forward(np.ones(639, dtype=np.int32))
    with pytest.raises(ContextOverflow):
        session.forward([1, 1], n_pending=639)


def test_logits_come_for_the_rows_asked_for(tiny: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(tiny, 9, rng)
    session = tiny(n_batch=4)
    everything = session.forward(tokens, logits="all").logits
    assert same_bits(session.forward(tokens, logits=[7, 0, 3]).logits, everything[[7, 0, 3]])
    assert session.forward(tokens, logits=[]).logits.shape == (0, session.spec.n_vocab)
    assert session.n_past == 0


def test_logits_that_somebody_has_are_not_overwritten(tiny: Open, rng: np.random.Generator) -> None:
    session = tiny()
    looks: list[Callable[[np.ndarray], Any]] = [lambda logits: logits, lambda logits: logits[1:][0], memoryview]
    for part in looks:
        kept = part(session.forward([1, 2, 3, 4], logits="all").logits)
        before = np.array(kept)
        for tokens in ([5, 6, 7], [8, 9]):
            session.forward(tokens, logits="all")
        assert same_bits(np.array(kept), before)
    del kept
    places = {session.forward([1, token], logits="all").logits.ctypes.data for token in range(5)}
    assert len(places) == 1  # nobody has them: their memory is used again


def test_a_dropped_batch_leaves_no_trace(tiny: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(tiny, 40, rng)
    session = tiny()
    prefill(session, tokens[:20], 20)
    session.forward(tokens[20:40])
    session.commit([])
    assert session.n_past == 20
    fresh = tiny()
    prefill(fresh, tokens[:20], 20)
    assert same_bits(session.forward(tokens[:3]).logits, fresh.forward(tokens[:3]).logits)


def test_misuse_is_refused(tiny: Open) -> None:
    session = tiny()
    for tokens in ([], [[1, 2]], [0.5], [-1], [session.spec.n_vocab]):
        with pytest.raises(ShapeError):
            session.forward(tokens)
    with pytest.raises(ShapeError, match="row 1 has parent 1"):
        session.forward([1, 2], [-1, 1])
    with pytest.raises(ContextOverflow, match="300 tokens do not fit into a context of 256"):
        session.forward([1] * 300)
    with pytest.raises(ShapeError, match="one batch of 128"):
        session.forward([1] * 200, [-1] * 200)
    session.forward([1, 2, 3], [-1, 0, 0])
    with pytest.raises(ShapeError, match="row 2 follows row 0, but the path comes from row 1"):
        session.commit([0, 1, 2])
    session.commit([0, 2])
    with pytest.raises(ShapeError):
        session.commit([0])  # nothing is left to commit
    with pytest.raises(ShapeError):
        session.truncate(3)
    session.close()
    with pytest.raises(EdgeInferError, match="closed"):
        session.forward([1])


def test_an_unknown_instruction_set_is_an_error(tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_ISA", "mmx")
    with pytest.raises(BackendUnavailable, match="EDGEINFER_ISA=mmx is no instruction set that .*scalar"):
        tiny()
    monkeypatch.setenv("EDGEINFER_ISA", "scalar")
    assert tiny().model.isa == "scalar"


def test_another_thread_can_stop_a_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    open_session = opener(write_tiny_model(tmp_path / "m.gguf", n_layers=8, tensor_type="Q8_0"), n_ctx=4096)
    session = open_session(n_threads=1, isa="scalar")
    tokens = rng.integers(0, session.spec.n_vocab, 4000).astype(np.int32)
    prefill(session, tokens[:10], 10)
    with interrupted_every(0.001, session), pytest.raises(Interrupted):
        for _ in range(50):  # the first one, unless the machine keeps the other thread from its core
            session.forward(tokens)
    assert session.n_past == 10
    fresh = open_session(n_threads=1)
    prefill(fresh, tokens[:10], 10)
    assert same_bits(session.forward(tokens[:5]).logits, fresh.forward(tokens[:5]).logits)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
def test_the_plan_is_what_the_session_takes(cache_type: CacheType, tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "Q4_K")
    session = opener(path, 400, cache_type)(n_threads=3)
    with ModelFile.open(path) as file:
        plan = NativeBackend().plan(
            file, session.spec, LoadSettings(400, n_batch=128, n_threads=3, cache_type=cache_type)
        )
    assert session.memory().kv_cache == 0
    prefill(session, rng.integers(0, session.spec.n_vocab, 150).astype(np.int32), 150)
    assert session.memory().kv_cache == plan.use.kv_cache / 2  # 2 of 4 segments
    prefill(session, rng.integers(0, session.spec.n_vocab, 250).astype(np.int32), 250)
    page = 1 << 21  # memory comes in pages, at most huge ones
    for planned, used in zip(vars(plan.use).values(), vars(session.memory()).values(), strict=True):
        assert planned <= used < planned + page


@pytest.mark.parametrize("format", ["F32", "F16"])
def test_for_drafts_large_matrices_are_those_of_a_q4_0_file(format: str, tmp_path: Path) -> None:
    rounded = NativeBackend(for_drafts=True)
    with (
        ModelFile.open(write_tiny_model(tmp_path / "large.gguf", "qwen2", format, n_vocab=300)) as large,
        ModelFile.open(write_tiny_model(tmp_path / "q4_0.gguf", "qwen2", "Q4_0", n_vocab=300)) as small,
    ):
        spec = read_spec(large)
        plan = rounded.plan(large, spec, LoadSettings(64))
        model = rounded.load(large, spec, plan, Device(2))
        expected = NativeBackend().load(small, spec, NativeBackend().plan(small, spec, LoadSettings(64)), Device(1))
        assert plan.use == rounded.plan(large, spec, LoadSettings(64)).use and plan.use.weights < large.n_bytes
        if format == "F32":
            assert np.array_equal(model.weights().data, expected.weights().data)
        else:  # its floats were rounded before
            tokens = np.arange(40)
            a, b = (one.session().forward(tokens, logits="all").logits for one in (model, expected))
            assert 0 < np.abs(a - b).max() < 0.2 * np.abs(b).max()


def test_for_drafts_the_packed_weights_beside_a_model_are_not_taken(tmp_path: Path) -> None:
    path, rounded = write_tiny_model(tmp_path / "m.gguf", "qwen2", "F16"), NativeBackend(for_drafts=True)
    with ModelFile.open(path) as file:
        spec, tokens = read_spec(file), np.arange(40)
        plan = rounded.plan(file, spec, LoadSettings(64))
        alone = rounded.load(file, spec, plan, Device(1)).session().forward(tokens).logits
        NativeBackend().pack(file, spec, packed_path(path))
        assert same_bits(rounded.load(file, spec, plan, Device(1)).session().forward(tokens).logits, alone)


def test_for_drafts_the_first_tokens_alone_get_logits(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.backends.native.weights.DRAFT_TOKENS", 100)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "gemma2", "Q4_0", n_vocab=300)) as file:
        spec, tokens = read_spec(file), rng.integers(0, 300, 40)
        whole, part = (
            backend.load(
                file, spec, backend.plan(file, spec, LoadSettings(64, n_batch=16, n_threads=2)), Device(2)
            ).session()
            for backend in (NativeBackend(), NativeBackend(for_drafts=True))
        )
        assert part.spec.n_logits == 100 and whole.spec.n_logits == 300
        assert part.memory().weights < whole.memory().weights
        for rows in ("last", "all", [3, 20]):
            assert same_bits(
                part.forward(tokens, logits=rows).logits, whole.forward(tokens, logits=rows).logits[:, :100]
            )


def test_a_q8_0_cache_takes_a_little_over_half_and_changes_little(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "F32", head_dim=64)
    sessions = [opener(path, cache_type=cache_type)() for cache_type in ("f16", "q8_0")]
    tokens = rng.integers(0, sessions[0].spec.n_vocab, 200).astype(np.int32)
    whole, rounded = (session.forward(tokens, logits="all").logits for session in sessions)
    assert 0 < np.abs(whole - rounded).max() < 0.02 * np.abs(whole).max()
    sizes = [session.memory().kv_cache for session in sessions]
    assert sizes[1] == sizes[0] * 9 / 16
    odd = write_tiny_model(tmp_path / "odd.gguf", tensor_type="F16", n_heads=4, n_kv_heads=4, n_embd=96, head_dim=10)
    with pytest.raises(InvalidArgument, match="heads of a multiple of 32 numbers: found 10; use f16"):
        opener(odd, cache_type="q8_0")()


def with_large_key_biases(path: Path) -> Path:
    """The model with two biases of each head 300 times as large, as Qwen 2.5 has some."""
    data = path.read_bytes()
    with ModelFile.open(path) as file:
        for layer in range(2):
            bias = np.frombuffer(file.data(f"blk.{layer}.attn_k.bias").tobytes(), np.float32)
            larger = bias.copy()
            larger.reshape(-1, 64)[:, [3, 40]] *= 300
            data = data.replace(bias.tobytes(), larger.tobytes())
    target = path.with_name("large.gguf")
    target.write_bytes(data)
    return target


def test_a_k6v4_cache_takes_a_third_and_does_not_suffer_from_key_biases(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "F32", head_dim=64)
    tokens, changes = rng.integers(0, 200, 200).astype(np.int32), []
    for model in (path, with_large_key_biases(path)):
        sessions = [opener(model, cache_type=cache_type)() for cache_type in ("f16", "k6v4")]
        whole, rounded = (session.forward(tokens, logits="all").logits for session in sessions)
        changes.append(np.abs(whole - rounded).mean() / whole.std())
        sizes = [session.memory().kv_cache for session in sessions]
        assert sizes[1] == sizes[0] * 84 / 256
    assert 0 < changes[0] < 0.05 and changes[1] < 3 * changes[0]
    odd = write_tiny_model(tmp_path / "odd.gguf", tensor_type="F16", n_heads=4, n_kv_heads=4, n_embd=96, head_dim=10)
    with pytest.raises(InvalidArgument, match="a k6v4 KV cache needs heads of a multiple of 32 numbers: found 10"):
        opener(odd, cache_type="k6v4")()


def test_parked_texts_are_found_again(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "Q4_K")
    open_session = opener(path, n_ctx=1024)
    session = open_session()
    start = some_tokens(open_session, 150, rng)
    texts = [np.concatenate([start, some_tokens(open_session, n, rng)]) for n in (120, 200, 60)]
    ends = some_tokens(open_session, 9, rng)

    def complete(text: np.ndarray) -> tuple[int, np.ndarray]:
        n_found = session.reuse_prefix(text[:-1])
        assert session.n_past == n_found
        prefill(session, text[n_found:], len(text))
        return n_found, session.forward(ends, logits="all").logits

    def alone(text: np.ndarray) -> np.ndarray:
        fresh = open_session()
        prefill(fresh, text, len(text))
        return fresh.forward(ends, logits="all").logits

    expected = [alone(text) for text in texts]
    n_found, logits = zip(*(complete(texts[i]) for i in (0, 1, 2, 0, 2, 1)), strict=True)
    assert n_found == (0, 150, 150, len(texts[0]) - 1, len(texts[2]) - 1, len(texts[1]) - 1)
    for i, of_text in zip((0, 1, 2, 0, 2, 1), logits, strict=True):
        assert same_bits(of_text, expected[i])
    assert (
        session.memory().kv_cache
        <= open_session.__closure__[0]
        .cell_contents.plan(ModelFile.open(path), session.spec, LoadSettings(1024))
        .use.kv_cache
    )

    # A text that needs the whole cache pushes the others out, the one used longest ago first.
    long = some_tokens(open_session, 1000, rng)
    assert complete(long)[0] == 0
    assert same_bits(complete(texts[0])[1], expected[0])
    assert session.reuse_prefix([]) == 0


def test_parked_texts_and_a_changing_one_keep_out_of_each_others_way(tmp_path: Path) -> None:
    """Random walks over texts with common beginnings, against a session that computes everything."""
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "Q8_0")
    open_session = opener(path, n_ctx=512)
    session, fresh = open_session(), open_session()
    rng = np.random.default_rng(5)
    texts = [some_tokens(open_session, 40, rng)]
    for _ in range(40):
        text = texts[rng.integers(len(texts))]
        cut = int(rng.integers(1, len(text) + 1))
        text = np.concatenate([text[:cut], some_tokens(open_session, int(rng.integers(1, 150)), rng)])[:500]
        texts.append(text)
        prefill(session, text[session.reuse_prefix(text[:-1]) :], 512)
        fresh.truncate(0)
        prefill(fresh, text, 512)
        assert same_bits(session.forward([1, 2, 3]).logits, fresh.forward([1, 2, 3]).logits)


def test_packed_weights_are_mapped_and_give_the_same_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "Q6_K")
    tokens = rng.integers(0, 200, 30).astype(np.int32)
    plain = opener(path)().forward(tokens, logits="all").logits
    with ModelFile.open(path) as file:
        size = NativeBackend().pack(file, read_spec(file), packed_path(path))
    assert packed_path(path).stat().st_size == size
    assert same_bits(opener(path)().forward(tokens, logits="all").logits, plain)

    # The weights do come from there: other bytes give other logits.
    packed = bytearray(packed_path(path).read_bytes())
    packed[-(1 << 16) :: 7] = bytes(len(packed[-(1 << 16) :: 7]))
    packed_path(path).write_bytes(packed)
    assert not same_bits(opener(path)().forward(tokens, logits="all").logits, plain)


def test_a_packed_session_can_be_closed_while_its_weights_are_still_being_mapped(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with ModelFile.open(path) as file:
        NativeBackend().pack(file, read_spec(file), packed_path(path))
    opened = opener(path)
    for _ in range(20):
        opened().close()
    assert opened().forward([1, 2, 3]).logits.shape[0] == 1


def test_packed_weights_of_another_file_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", seed=1)
    with ModelFile.open(path) as file:
        NativeBackend().pack(file, read_spec(file), packed_path(path))
    os.utime(path, (1, 1))
    opener(path)()  # another time, the same bytes
    write_tiny_model(path, seed=2)
    with pytest.raises(
        ModelFileError, match="stale, .* has changed since it was packed; pack it again: edgeinfer pack"
    ):
        opener(path)()
    for broken in (
        b"",
        b"edgeinfer-packed",
        b"edgeinfer-packed" + bytes(7) + b"\x01",
        packed_path(path).read_bytes()[:5000],
    ):
        packed_path(path).write_bytes(broken)
        with pytest.raises(ModelFileError):
            opener(path)()
    assert list(tmp_path.glob("*.partial*")) == []


@pytest.mark.parametrize("format", ["TQ1_0", "TQ2_0", "I2_S"])
def test_ternary_weights_in_fewer_bits_give_the_same_bits(
    tmp_path: Path, rng: np.random.Generator, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "bitnet-b1.58" if format == "I2_S" else "llama", format)
    tokens = rng.integers(0, 200, 40).astype(np.int32)
    logits, plans = {}, {}
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        for bits in ("2", "1.6"):
            backend = NativeBackend(ternary_bits=bits)
            plans[bits] = backend.plan(file, spec, LoadSettings(64))
            session = backend.load(file, spec, plans[bits], Device(2)).session()
            assert session.memory().weights == plans[bits].use.weights
            logits[bits] = session.forward(tokens, logits="all").logits
        assert same_bits(logits["1.6"], logits["2"])
        assert plans["1.6"].use.weights < plans["2"].use.weights

        # "auto" is what is faster, where nothing is packed; then it is what is packed.
        for faster in ("1.6", "2"):
            times = {int(GGMLType.I2_S): 2.0, BASE_THREE[GGMLType.I2_S]: 1.0 if faster == "1.6" else 3.0}
            monkeypatch.setattr(_core, "time_format", lambda kind, *_, times=times: times[kind])
            faster_bits.cache_clear()
            assert NativeBackend().plan(file, spec, LoadSettings(64)) == plans[faster]
            NativeBackend().pack(file, spec, packed_path(path))
            packed_as = "1.6" if faster == "2" else "2"
            NativeBackend(ternary_bits=packed_as).pack(file, spec, packed_path(path))
            plan = NativeBackend().plan(file, spec, LoadSettings(64))
            weights = plan.use.weights
            assert plan == replace(plans[packed_as], use=replace(plans[packed_as].use, mapped=weights))
            session = NativeBackend().load(file, spec, plan, Device(1)).session()
            assert same_bits(session.forward(tokens, logits="all").logits, logits["2"])
            with pytest.raises(
                ModelFileError,
                match=f"expected ternary weights of {faster} bits, found {packed_as}; .* --ternary-bits {faster}",
            ):
                NativeBackend().load(file, spec, plans[faster], Device(1))
            packed_path(path).unlink()
    faster_bits.cache_clear()


def test_fewer_bits_for_ternary_weights_change_nothing_where_there_are_none(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with ModelFile.open(path) as file:
        spec, dense = read_spec(file), NativeBackend(ternary_bits="1.6")
        assert dense.plan(file, spec, LoadSettings(64)) == NativeBackend().plan(file, spec, LoadSettings(64))
        NativeBackend().pack(file, spec, packed_path(path))
        dense.load(file, spec, dense.plan(file, spec, LoadSettings(64)), Device(1))  # mapped, not refused


def test_which_ternary_bits_are_faster_is_measured() -> None:
    assert faster_bits(available_isas()[-1], 1, 1 << 20) in ("2", "1.6")
    faster_bits.cache_clear()


def test_packed_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with ModelFile.open(path) as file:
        NativeBackend().pack(file, read_spec(file), packed_path(path))
    layout = f'"layout": {LAYOUT}'.encode()
    for words, others in [(layout, b'"layout": 2'), (b'"ternary_bits": "2"', b'"ternary_bits": "7"')]:
        whole = packed_path(path).read_bytes()
        assert whole.count(words) == 1
        packed_path(path).write_bytes(whole.replace(words, others))
        with pytest.raises(
            ModelFileError, match="packed layout 2, .*pack it again" if words[1:2] == b"l" else "broken"
        ):
            opener(path)()
        packed_path(path).write_bytes(whole)
    opener(path)()


def test_a_ternary_matrix_with_another_code_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "bitnet-b1.58", "I2_S")
    with ModelFile.open(path) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
    whole = path.read_bytes()
    for at, value, words in [
        (info.offset + 7, b"\x03", "tensor blk.1.ffn_up.weight is I2_S, whose codes are 0, 1 and 2: found 3"),
        (info.offset + info.n_bytes - 32, np.float32(np.nan).tobytes(), "ffn_up.weight must have a finite scale"),
    ]:
        path.write_bytes(whole[:at] + value + whole[at + len(value) :])
        with pytest.raises(ModelFileError, match=words):
            opener(path)()


def test_a_q2_0_matrix_with_more_than_trits_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q2_0")
    with ModelFile.open(path) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
    whole = path.read_bytes()
    for at, refused in [(info.offset + 1, False), (info.offset + 18, False), (info.offset + 2, True)]:
        path.write_bytes(whole[:at] + b"\x3c" + whole[at + 1 :])  # in a scale no code, in the codes two threes
        if refused:
            with pytest.raises(ModelFileError, match="tensor blk.1.ffn_up.weight is Q2_0, whose codes are 0, 1 and 2"):
                opener(path)()
        else:
            opener(path)()


def test_an_i2_s_matrix_without_whole_rows_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "I2_S", n_ff=192)
    with pytest.raises(InvalidGGUF, match="blk.0.ffn_down.weight. dim 0 .* multiple of the 128 elements"):
        opener(path)()
    path = write_tiny_model(tmp_path / "m.gguf", "phi3", "I2_S")
    with pytest.raises(UnsupportedModel, match="tensor blk.0.attn_qkv.weight is I2_S, which cannot be cut"):
        opener(path)()
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "I2_S", types={"token_embd": "I2_S"})
    with pytest.raises(UnsupportedModel, match="token_embd.weight is I2_S, whose rows cannot be read one by one"):
        opener(path)()


def test_an_i2_s_file_that_is_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "I2_S")
    with ModelFile.open(path) as file:
        info = max(file.tensors.values(), key=lambda info: info.offset if info.type.name == "I2_S" else 0)
    path.write_bytes(path.read_bytes()[: info.offset + info.n_bytes - 4])
    with pytest.raises(ModelFileError, match=f"tensor .{info.name}. offset"):
        ModelFile.open(path)


@pytest.mark.parametrize("n_vocab", [5, 300, 8192, 49152, 151_936])
def test_the_top_k_ids_come_with_their_probabilities(n_vocab: int) -> None:
    logits = np.random.default_rng(n_vocab).normal(0, 4, n_vocab).astype(np.float32)
    order = np.argsort(-logits)
    p = np.exp(logits.astype(float) - logits.max())
    p /= p.sum()
    found = top_k(logits, 3)
    assert found[0][0] == order[0] and [of_id for _, of_id in found] == sorted((of_id for _, of_id in found))[::-1]
    if n_vocab < 8192:
        assert [id for id, _ in found] == order[:3].tolist()
        assert [of_id for _, of_id in found] == pytest.approx(p[order[:3]].tolist(), rel=1e-4)
    else:
        assert p[order[0]] <= found[0][1] < 2 * p[order[0]]
    for id in (0, n_vocab - 1):  # the ends
        logits[id] = 40.0
        (first, p_first), *_ = top_k(logits, 3)
        assert first == id and p_first == pytest.approx(1.0, abs=1e-3)
        logits[id] = -40.0


def test_of_what_is_no_number_nothing_is_likely() -> None:
    for value in (np.nan, np.inf, -np.inf):
        assert all(np.isnan(p) for _, p in top_k(np.full(300, value, dtype=np.float32), 3))
    for n_vocab in (300, 20_000):
        for id in (0, n_vocab - 1):
            logits = np.zeros(n_vocab, dtype=np.float32)
            logits[id] = np.nan
            assert all(np.isnan(p) for _, p in top_k(logits, 3))
    assert top_k(np.array([-np.inf, 5, -np.inf, -np.inf], dtype=np.float32), 3) == [(1, 1.0)]
    with pytest.raises(ValueError, match="at least one logit"):
        top_k(np.empty(0, dtype=np.float32), 3)
    assert len(top_k(np.zeros(2, dtype=np.float32), 3)) == 2
