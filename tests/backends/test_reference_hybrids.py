"""Recurrent layers on the oracle: by hand, against itself, and against transformers and llama.cpp."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import ArrayLike, NDArray
from peer import llama_cpp_logits
from recurrent_models import RECURRENT_MODELS, oracle_logits, write_recurrent_model
from tiny_hybrids import write_tiny_hybrid
from tiny_mamba import write_tiny_mamba

from edgeinfer.backends import reference_attention
from edgeinfer.backends.reference import ReferenceBackend, ReferenceSession
from edgeinfer.backends.reference_math import softplus
from edgeinfer.backends.reference_recurrences import convolved, delta_step, mamba_step
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import GatedDeltaNet, Mamba2, ModelSpec, ShortConv, read_spec
from edgeinfer.models.gguf import ModelFile

Change = Callable[[ModelSpec], ModelSpec]
TOLERANCE = 1e-4  # of logits with a deviation of 3; measured: 5e-5 at most


TEXT = np.array([72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100], dtype=np.int32)
# Rows 1, 3 and 5 follow row 0; 6 starts anew from the committed text.
TREE = np.array([5, 6, 7, 8, 9, 10, 11], dtype=np.int32)
PARENTS = np.array([-1, 0, 1, 0, 3, 0, -1], dtype=np.int32)
BRANCHES = [[0, 1, 2], [0, 3, 4], [0, 5], [6]]


def open_session(path: Path, n_ctx: int = 64) -> ReferenceSession:
    backend = ReferenceBackend()
    with ModelFile.open(path) as model:
        spec = read_spec(model)
        return backend.load(model, spec, backend.plan(model, spec, LoadSettings(n_ctx)), Device(1)).session()


def logits_of(session: ReferenceSession, tokens: ArrayLike) -> NDArray[np.float32]:
    """Logits after the last of these tokens, after what is committed."""
    return session.forward(tokens).logits.reshape(-1)


@pytest.fixture(scope="module", params=RECURRENT_MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent_model(tmp_path_factory.mktemp("hybrids") / "m.gguf", request.param)


@pytest.fixture
def exact_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values in float32, as those that this is compared with have them."""
    monkeypatch.setitem(reference_attention._CACHE_DTYPES, "f16", np.float32)


# ---- by hand ---------------------------------------------------------------------------------------------------


def test_softplus_of_0_and_of_large_numbers() -> None:
    x = np.array([0, 25, -30, np.log(3)], dtype=np.float32)
    assert_allclose(softplus(x), [np.log(2), 25, np.exp(-30), np.log(4)], rtol=1e-6)


def test_a_convolution_has_zeros_before_the_text_and_its_last_column_on_the_newest() -> None:
    u = np.array([[1, 1], [2, 10], [4, 100]], dtype=np.float32)
    weights = np.array([[100, 10, 1], [1, 0, 0]], dtype=np.float32)
    rows = np.full((8, 2), 7, dtype=np.float32)
    chain = [np.arange(n + 1) for n in range(3)]
    assert convolved(u, weights, rows, chain).tolist() == [[1, 0], [12, 0], [124, 1]]
    # A node that follows the first token sees that one alone.
    later = np.array([[3, 5]], dtype=np.float32)
    assert convolved(later, weights, rows, [np.array([0, 5])]).tolist() == [[13, 0]]
    assert rows[[0, 1, 2, 5]].tolist() == [[1, 1], [2, 10], [4, 100], [3, 5]]


def test_a_step_decays_the_state_corrects_what_the_key_recalls_and_reads_after_it() -> None:
    state = np.array([[[2, 0], [0, 4]]], dtype=np.float32)  # of one head: rows of k, columns of v
    q, k, v = (np.array([each], dtype=np.float32) for each in ([1, 0], [1, 1], [3, 0]))
    after, y = delta_step(state, q, k, v, np.array([0.5], np.float32), np.array([0.25], np.float32))
    # The decayed state recalls (1, 2) for the key; a quarter of (3, 0) - (1, 2) is added along it.
    assert after.tolist() == [[[1.5, -0.5], [0.5, 1.5]]]
    assert y.tolist() == [[1.5, -0.5]]


def test_a_step_of_mamba_decays_the_state_adds_to_it_and_reads_after_that() -> None:
    state = np.array([[[2, 0, 8], [0, 4, 6]]], dtype=np.float32)  # of one head: rows of B, columns of v
    c, b, v = (np.array([each], dtype=np.float32) for each in ([1, 2], [3, -1], [1, 0, 2]))
    after, y = mamba_step(state, c, b, v, np.array([0.5], np.float32))
    assert after.tolist() == [[[4, 0, 10], [-1, 2, 1]]]
    assert y.tolist() == [[2, 4, 12]]


# ---- against itself: the same bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 7], [10, 1]])
def test_chunks_give_the_logits_of_the_whole(path: Path, chunks: list[int]) -> None:
    whole = open_session(path).forward(TEXT, logits="all").logits
    session, first = open_session(path), 0
    for n in chunks:
        assert_array_equal(session.forward(TEXT[first : first + n], logits="all").logits, whole[first : first + n])
        session.commit(range(n))
        first += n


@pytest.mark.parametrize("n_past", [0, 2, 8])
def test_a_tree_gives_the_logits_of_each_branch_alone(path: Path, n_past: int) -> None:
    session = open_session(path)
    if n_past:
        session.forward(TEXT[:n_past])
        session.commit(range(n_past))
    tree = session.forward(TREE, PARENTS, logits="all").logits
    for branch in BRANCHES:
        assert_array_equal(tree[branch], session.forward(TREE[branch], logits="all").logits)


@pytest.mark.parametrize("rows", [[], [0], [0, 3, 4], [0, 5], [6]])
def test_a_committed_branch_is_as_if_it_had_been_read_alone(path: Path, rows: list[int]) -> None:
    session, fresh = open_session(path), open_session(path)
    session.forward(TEXT)
    session.commit(range(11))
    session.forward(TREE, PARENTS)
    session.commit(rows)
    fresh.forward(np.concatenate([TEXT, TREE[rows]]))
    fresh.commit(range(11 + len(rows)))
    assert_array_equal(logits_of(session, [1, 2, 3]), logits_of(fresh, [1, 2, 3]))


def test_truncated_text_can_be_read_anew(path: Path) -> None:
    session = open_session(path)
    session.forward([*TEXT[:5], 200, 201, 202])
    session.commit(range(8))
    assert session.truncate(5) == 5
    assert_array_equal(logits_of(session, TEXT[5:]), logits_of(open_session(path), TEXT))


def test_what_is_planned_is_what_is_held(path: Path) -> None:
    backend = ReferenceBackend()
    with ModelFile.open(path) as model:
        spec = read_spec(model)
        plan = backend.plan(model, spec, LoadSettings(48, n_batch=16))
        assert backend.load(model, spec, plan, Device(1)).session().memory() == plan.use


# ---- against others --------------------------------------------------------------------------------------------


def test_logits_are_those_of_transformers(path: Path, rng: np.random.Generator, exact_cache: None) -> None:
    tokens = rng.integers(0, 291, 70)
    with ModelFile.open(path) as file:
        expected = oracle_logits(file, tokens)
    assert np.abs(open_session(path, 128).forward(tokens, logits="all").logits - expected).max() < TOLERANCE


def test_logits_are_those_of_llama_cpp(
    path: Path, llama_cpp: ModuleType, rng: np.random.Generator, exact_cache: None
) -> None:
    tokens = rng.integers(0, 259, 70)
    f32: dict[str, Any] = {"type_k": 0, "type_v": 0, "flash_attn": False}
    expected = llama_cpp_logits(llama_cpp, path, tokens, **f32)
    assert np.abs(open_session(path, 128).forward(tokens, logits="all").logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("options", [{"has_ssm_norm": False}, {"n_groups": 1}, {"n_groups": 8}])
def test_norms_and_groups_of_mamba_are_those_of_transformers(
    tmp_path: Path, rng: np.random.Generator, exact_cache: None, options: dict[str, Any]
) -> None:
    path, tokens = write_tiny_mamba(tmp_path / "m.gguf", "falcon-h1", **options), rng.integers(0, 291, 40)
    with ModelFile.open(path) as file:
        expected = oracle_logits(file, tokens)
    assert np.abs(open_session(path).forward(tokens, logits="all").logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("architecture", RECURRENT_MODELS)
@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q4_K"])
def test_quantised_models_agree_with_llama_cpp(
    llama_cpp: ModuleType, tmp_path: Path, rng: np.random.Generator, architecture: str, tensor_type: str
) -> None:
    """llama.cpp rounds the activations too, in each of four layers: 2 % to 8 % of the spread, measured.

    Experts without gates square what was rounded, and their router chooses others now and then: 20 %.
    """
    path, tokens = write_recurrent_model(tmp_path / "m.gguf", architecture, tensor_type), rng.integers(0, 259, 70)
    ours = open_session(path, 128).forward(tokens, logits="all").logits
    theirs = llama_cpp_logits(llama_cpp, path, tokens)
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < (0.25 if "nemotron_h_moe" in architecture else 0.12) * theirs.std()


def of_delta_nets(**changes: Any) -> Change:
    def changed(spec: ModelSpec) -> ModelSpec:
        layers = [
            replace(each, mixer=replace(each.mixer, **changes)) if isinstance(each.mixer, GatedDeltaNet) else each
            for each in spec.layers
        ]
        return replace(spec, layers=tuple(layers))

    return changed


def of_mamba(**changes: Any) -> Change:
    def changed(spec: ModelSpec) -> ModelSpec:
        layers = [
            replace(each, mixer=replace(each.mixer, **changes)) if isinstance(each.mixer, Mamba2) else each
            for each in spec.layers
        ]
        return replace(spec, layers=tuple(layers))

    return changed


def one_after_the_other(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, is_beside=False) for layer in spec.layers))


def swapped(spec: ModelSpec) -> ModelSpec:
    """The b and a of each recurrence in each other's place."""
    layers = [
        replace(each, mixer=replace(each.mixer, beta=each.mixer.alpha, alpha=each.mixer.beta))
        if isinstance(each.mixer, GatedDeltaNet)
        else each
        for each in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize(
    "architecture, change",
    [
        ("qwen35", of_delta_nets(key_heads="divided")),
        ("qwen3next", of_delta_nets(key_heads="modulo")),
        ("qwen35", swapped),
        ("granitehybrid", of_mamba(out_norm=None)),
        ("granitehybrid", of_mamba(conv_bias=None)),
        ("falcon-h1", of_mamba(out_norm=None)),
        ("falcon-h1", one_after_the_other),
    ],
)
def test_every_part_of_a_recipe_shows_in_the_logits(
    tmp_path: Path, rng: np.random.Generator, architecture: str, change: Change
) -> None:
    """So that the comparisons above cannot miss it."""
    backend, tokens = ReferenceBackend(), rng.integers(0, 259, 40)
    with ModelFile.open(write_recurrent_model(tmp_path / "m.gguf", architecture)) as model:
        spec = read_spec(model)
        right, wrong = (
            backend.load(model, each, backend.plan(model, each, LoadSettings(64)), Device(1))
            .session()
            .forward(tokens, logits="all")
            .logits
            for each in (spec, change(spec))
        )
    assert np.sqrt(np.mean((right - wrong) ** 2)) > 0.2 * right.std()


def test_the_state_reaches_back_beyond_the_convolution(tmp_path: Path) -> None:
    """In a model without attention, so that the comparisons see the recurrence: the first token shows in the last."""
    path = write_tiny_hybrid(tmp_path / "m.gguf", "qwen35", kinds=["recurrent"])
    text = np.arange(30, 50)
    plain = logits_of(open_session(path), text)
    text[0] += 1
    assert np.abs(logits_of(open_session(path), text) - plain).max() > 1e-2


def test_a_short_convolution_sees_three_tokens(tmp_path: Path) -> None:
    path = write_tiny_hybrid(tmp_path / "m.gguf", "lfm2", kinds=["recurrent", "attention"])
    with ModelFile.open(path) as model:
        spec = read_spec(model)
    text = np.arange(30, 40)
    plain = open_session(path).forward(text, hidden=[0]).hidden
    text[-3] += 1
    near = open_session(path).forward(text, hidden=[0]).hidden
    text[-4] += 1
    far = open_session(path).forward(text, hidden=[0]).hidden
    assert isinstance(spec.layers[0].mixer, ShortConv) and plain is not None and near is not None and far is not None
    assert np.abs(near[0, -1] - plain[0, -1]).max() > 1e-2
    assert_array_equal(far[0, -1], near[0, -1])
