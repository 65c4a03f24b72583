"""Experts in the reference: by hand, against itself, and against llama.cpp."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import ArrayLike, NDArray
from peer import clear_choices, llama_cpp_logits
from tiny_experts import EXPERT_ARCHITECTURES, ExpertArchitecture, write_tiny_experts

from edgeinfer.backends.reference import Activations, ReferenceBackend, ReferenceSession, known_blocks
from edgeinfer.backends.reference_experts import chances, choose
from edgeinfer.backends.reference_math import attend, clamped_swiglu, sigmoid
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Experts, Layer, ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile

Floats = NDArray[np.float32]
OF_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
MIXED: dict[str, dict[str, str]] = {  # types of the matrices of experts, beside those of the others
    "Q8_0": {},
    "Q4_K": {"ffn_down_exps": "Q6_K"},
    "F16": dict.fromkeys(OF_EXPERTS, "MXFP4"),
}


def a_block(**values: Any) -> Experts:
    """Eight experts, two of them for a token."""
    given: dict[str, Any] = {"n_experts": 8, "n_used": 2} | values
    return Experts(n_embd=4, n_ff=4, router="router", gate="gate", up="up", down="down", **given)


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def open_session(
    path: Path, activations: Activations = "float32", change: Any = lambda spec: spec, n_ctx: int = 256
) -> ReferenceSession:
    backend = ReferenceBackend(activations)
    with ModelFile.open(path) as model:
        spec = change(read_spec(model))
        return backend.load(model, spec, backend.plan(model, spec, LoadSettings(n_ctx)), Device(n_threads=1)).session()


def logits_of(path: Path, tokens: ArrayLike, **options: Any) -> Floats:
    """Of all rows."""
    return open_session(path, **options).forward(tokens, logits="all").logits


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_the_chances_of_two_experts() -> None:
    z = floats(0, np.log(3))
    assert_allclose(chances(z, "softmax"), [0.25, 0.75], rtol=1e-6)
    assert_allclose(chances(z, "sigmoid"), [0.5, 0.75], rtol=1e-6)
    assert_allclose(chances(z, "sqrt_softplus"), np.sqrt([np.log(2), np.log(4)]), rtol=1e-6)
    assert_array_equal(chances(z, "softmax_of_top_k"), z)
    assert_allclose(chances(floats(200, -200), "sqrt_softplus"), [np.sqrt(200), 0], atol=1e-6)


def test_the_best_are_chosen_in_descending_order_and_their_chances_are_the_weights() -> None:
    z = np.log(floats(1, 2, 4, 8, 16, 1, 8, 24))  # over 64
    choice = choose(a_block(n_used=3), z)
    assert choice.experts.tolist() == [7, 4, 3]  # of the two of 8 the first
    assert_allclose(choice.weights, [24 / 64, 16 / 64, 8 / 64], rtol=1e-6)
    assert_allclose(choose(a_block(n_used=3, is_normalised=True), z).weights, [0.5, 1 / 3, 1 / 6], rtol=1e-6)
    scaled = choose(a_block(n_used=3, is_normalised=True, weight_scale=2.5), z)
    assert_allclose(scaled.weights, [1.25, 2.5 / 3, 2.5 / 6], rtol=1e-6)


def test_of_equal_ones_the_lower_index_comes_first() -> None:
    assert choose(a_block(n_used=5), floats(0, 1, 0, 1, 0, 1, 0, 1)).experts.tolist() == [1, 3, 5, 7, 0]
    assert choose(a_block(), np.zeros(8, dtype=np.float32)).experts.tolist() == [0, 1]
    bias = floats(0, 0, 0, 0, 0, 0, 1, 1)
    assert choose(a_block(), np.zeros(8, dtype=np.float32), bias).experts.tolist() == [6, 7]


def test_a_bias_counts_for_the_choice_and_not_for_the_weights() -> None:
    z, bias = floats(0, 0, 0, 0, np.log(3), 0, 0, 0), floats(0.5, 0, 0, 0, 0, 0, 0, 0.4)
    choice = choose(a_block(router_function="sigmoid"), z, bias)
    assert choice.experts.tolist() == [0, 7]  # 1.0, 0.9, and 0.75 without a bias
    assert_allclose(choice.weights, [0.5, 0.5])


def test_the_softmax_over_the_chosen_ones_does_not_see_the_others() -> None:
    block = a_block(router_function="softmax_of_top_k")
    choice = choose(block, floats(0, np.log(3), -1, -1, -1, -1, -1, -1))
    assert choice.experts.tolist() == [1, 0]
    assert_allclose(choice.weights, [0.75, 0.25], rtol=1e-6)


def test_the_groups_whose_two_best_add_up_to_most_are_chosen_from() -> None:
    block = a_block(router_function="softmax_of_top_k", n_groups=4, n_used_groups=2, n_used=3)
    z = floats(9, -9, 3, 3, 4, 1, 2, 2)  # groups of 0, 6, 5, 4
    assert choose(block, z).experts.tolist() == [4, 2, 3]
    assert choose(replace(block, n_used_groups=4), z).experts.tolist() == [0, 4, 2]
    tied = floats(0, 0, 1, 1, 2, 0, 1, 1)  # groups of 0, 2, 2, 2
    assert choose(block, tied).experts.tolist() == [4, 2, 3]


def test_weights_that_add_up_to_almost_nothing_are_divided_by_a_half_float() -> None:
    block = a_block(router_function="sigmoid", is_normalised=True)
    choice = choose(block, np.full(8, -20, dtype=np.float32))
    assert_allclose(choice.weights, [float(sigmoid(floats(-20))[0]) * 2**14] * 2, rtol=1e-6)


def test_clamped_swiglu() -> None:
    gate, up = floats(1, 9, -9, 0), floats(2, 9, -9, 5)
    expected = [1 / (1 + np.exp(-1.702)) * 3, 7 / (1 + np.exp(-1.702 * 7)) * 8, -9 / (1 + np.exp(1.702 * 9)) * -6, 0]
    assert_allclose(clamped_swiglu(gate, up), expected, rtol=1e-6)


def test_a_sink_takes_its_share_of_the_softmax_and_gives_nothing() -> None:
    # Scores 0 and 0 beside sinks of 0 and ln 2: weights of 1/3 and of 1/4.
    keys, values = np.zeros((2, 1, 1), np.float16), np.array([[[3]], [[9]]], np.float16)
    q = np.zeros((2, 1), dtype=np.float32)
    assert_allclose(attend(q, keys, values, sinks=floats(0, np.log(2))).ravel(), [4, 3], rtol=1e-6)
    assert_allclose(attend(q, keys, values, sinks=floats(-np.inf, 200)).ravel(), [6, 0], atol=1e-6)


# ---- against itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_bits_depend_neither_on_the_batch_nor_on_the_union_of_experts(
    tmp_path: Path, rng: np.random.Generator, architecture: ExpertArchitecture
) -> None:
    path, tokens = write_tiny_experts(tmp_path / "m.gguf", architecture, "Q8_0"), rng.integers(0, 259, 24)
    for activations in ("float32", "int8"):
        expected = logits_of(path, tokens, activations=activations)
        for n in (1, 3, 16):
            session, rows = open_session(path, activations=activations), []
            for first in range(0, len(tokens), n):
                rows.append(session.forward(tokens[first : first + n], logits="all").logits)
                session.commit(range(len(rows[-1])))
            assert_array_equal(np.concatenate(rows), expected)


def test_a_branch_of_a_tree_has_the_bits_of_a_chain(tmp_path: Path, rng: np.random.Generator) -> None:
    path, tokens = write_tiny_experts(tmp_path / "m.gguf", "gpt-oss", "F32"), rng.integers(0, 259, 6)
    tree = open_session(path).forward(tokens, [-1, 0, 0, 1, 2, 4], logits="all").logits
    for branch in ([0, 1, 3], [0, 2, 4, 5]):
        assert_array_equal(tree[branch], logits_of(path, tokens[branch]))


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("tensor_type", ["F32", "Q4_K"])
def test_fused_gate_and_up_give_the_bits_of_two_tensors(
    tmp_path: Path, rng: np.random.Generator, architecture: ExpertArchitecture, tensor_type: str
) -> None:
    tokens = rng.integers(0, 259, 12)
    apart = write_tiny_experts(tmp_path / "apart.gguf", architecture, tensor_type)
    fused = write_tiny_experts(tmp_path / "fused.gguf", architecture, tensor_type, fused=True)
    assert_array_equal(logits_of(fused, tokens), logits_of(apart, tokens))


def test_twins_tie_and_the_lower_index_wins(tmp_path: Path, rng: np.random.Generator) -> None:
    """With one expert for a token and two that tie for each, the second is never chosen: its matrices do not matter."""
    tokens = rng.integers(0, 259, 40)
    path = write_tiny_experts(tmp_path / "m.gguf", "qwen3moe", "F32", n_experts=2, n_used=1, twins=(0, 1))
    session = open_session(path)
    expected = session.forward(tokens, logits="all").logits
    for index in (1, 0):
        other = open_session(path)
        for name, weights in other.model._weights.items():
            if name.endswith(OF_EXPERTS[0] + ".weight"):
                weights.values[index] *= 2
        found = other.forward(tokens, logits="all").logits
        assert np.array_equal(found, expected) == (index == 1)


def test_the_plan_tells_what_the_experts_take(tmp_path: Path) -> None:
    for fused in (False, True):
        path = write_tiny_experts(tmp_path / "m.gguf", "qwen2moe", "Q8_0", fused=fused)
        backend = ReferenceBackend()
        with ModelFile.open(path) as model:
            spec = read_spec(model)
            plan = backend.plan(model, spec, LoadSettings(64))
            use = backend.load(model, spec, plan, Device(1)).session().memory()
        assert use == plan.use and use.experts == 4 * 2 * 8 * 3 * 64 * 96  # layers, experts, matrices
        assert use.total == use.weights + use.kv_cache + use.activations + use.experts


def test_every_field_of_the_block_is_looked_at() -> None:
    assert set(known_blocks()[Experts]) == set(Experts.__dataclass_fields__)


# ---- against llama.cpp -----------------------------------------------------------------------------------------------


def both_logits(llama_cpp: ModuleType, path: Path, rng: np.random.Generator, n: int = 150) -> tuple[Floats, Floats]:
    tokens = rng.integers(0, 259, n)
    return logits_of(path, tokens), llama_cpp_logits(llama_cpp, path, tokens)


def rows_apart(ours: Floats, theirs: Floats) -> Floats:
    """Root mean square of the difference in each row, over the spread of all logits."""
    apart: Floats = np.sqrt(np.mean((ours - theirs) ** 2, axis=1)) / theirs.std()
    return apart


RECIPES: dict[str, tuple[ExpertArchitecture, dict[str, Any]]] = {
    **{name: (name, {}) for name in EXPERT_ARCHITECTURES},
    "qwen3moe, scales": ("qwen3moe", {"scales": True}),
    "llama, scales": ("llama", {"scales": True}),
    "qwen3moe, one expert": ("qwen3moe", {"n_used": 1}),
    "olmoe, all experts": ("olmoe", {"n_used": 8}),
    "olmoe, 16 experts": ("olmoe", {"n_experts": 16, "n_used": 4}),
    "glm4moe, groups": (
        "glm4moe",
        {
            "n_experts": 16,
            "metadata": {"glm4moe.expert_group_count": 4, "glm4moe.expert_group_used_count": 2},
        },
    ),
    "qwen2moe, groups": (
        "qwen2moe",
        {"metadata": {"qwen2moe.expert_group_count": 2, "qwen2moe.expert_group_used_count": 1}},
    ),
    "glm4moe, softmax": ("glm4moe", {"metadata": {"glm4moe.expert_gating_func": 1}}),
    "glm4moe, neither normalised nor scaled": (
        "glm4moe",
        {"metadata": {"glm4moe.expert_weights_norm": None, "glm4moe.expert_weights_scale": 0.0}},
    ),
    "glm4moe, norms of queries and keys": ("glm4moe", {"qk_norms": True}),
    "glm4moe, partly turned": ("glm4moe", {"metadata": {"glm4moe.rope.dimension_count": 12}}),
    "gpt-oss, windows everywhere": ("gpt-oss", {"metadata": {"gpt-oss.attention.sliding_window_pattern": 0}}),
    "gpt-oss, base of windows": ("gpt-oss", {"metadata": {"gpt-oss.rope.freq_base_swa": 300.0}}),
    "keys that are not looked at": (
        "olmoe",
        {"metadata": {"olmoe.expert_weights_scale": 3.0, "olmoe.expert_weights_norm": True}},
    ),
}


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_agrees_with_llama_cpp(
    llama_cpp: ModuleType, tmp_path: Path, rng: np.random.Generator, recipe: str
) -> None:
    """llama.cpp rounds queries and attention weights to f16; measured: 1.7e-4 in the middle, 1.2e-3 at worst."""
    architecture, options = RECIPES[recipe]
    ours, theirs = both_logits(llama_cpp, write_tiny_experts(tmp_path / "m.gguf", architecture, "F32", **options), rng)
    apart, clear = rows_apart(ours, theirs), clear_choices(theirs)
    assert np.median(apart) < 5e-4
    assert (apart < 5e-3).mean() > 0.98  # a rounding may turn the choice of an expert
    assert clear.mean() > 0.3
    assert_array_equal(ours.argmax(axis=1)[clear], theirs.argmax(axis=1)[clear])


@pytest.mark.parametrize("tensor_type", list(MIXED))
@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_quantised_experts_agree_with_llama_cpp(
    llama_cpp: ModuleType, tmp_path: Path, rng: np.random.Generator, architecture: ExpertArchitecture, tensor_type: str
) -> None:
    """llama.cpp rounds the activations too: 0.7e-2 to 2.3e-2 of the spread in the middle, measured."""
    path = write_tiny_experts(tmp_path / "m.gguf", architecture, tensor_type, types=MIXED[tensor_type])
    ours, theirs = both_logits(llama_cpp, path, rng)
    apart, clear = rows_apart(ours, theirs), clear_choices(theirs)
    near = clear & (apart < 0.1)  # the rounding turned no choice of an expert
    assert np.median(apart) < 0.03 and near.sum() > 0.9 * clear.sum()
    assert_array_equal(ours.argmax(axis=1)[near], theirs.argmax(axis=1)[near])


def each_experts(spec: ModelSpec, **changes: Any) -> ModelSpec:
    def change(layer: Layer) -> Layer:
        return replace(layer, ffn=replace(layer.ffn, **changes)) if isinstance(layer.ffn, Experts) else layer

    return replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def without_sinks(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(each, mixer=replace(each.mixer, sinks=None)) for each in spec.layers))


@pytest.mark.parametrize(
    "recipe, changes",
    [
        ("qwen3moe", {"is_normalised": False}),
        ("qwen3moe", {"n_used": 4}),
        ("qwen3moe", {"router_function": "sigmoid"}),
        ("olmoe", {"is_normalised": True}),
        ("qwen3moe, scales", {"gate_scale": None}),
        ("qwen3moe, scales", {"down_scale": None}),
        ("qwen2moe", {"shared_router": None}),
        ("qwen2moe", {"shared_down": None}),
        ("gpt-oss", {"activation": "silu"}),
        ("gpt-oss", {"router_function": "softmax"}),
        ("gpt-oss", {"router_bias": None}),
        ("gpt-oss", {"gate_bias": None}),
        ("gpt-oss", {"up_bias": None}),
        ("gpt-oss", {"down_bias": None}),
        ("ernie4_5-moe", {"selection_bias": None}),
        ("glm4moe", {"weight_scale": 1.0}),
        ("glm4moe, groups", {"n_groups": 1}),
        ("glm4moe, groups", {"n_used_groups": 3}),
        ("gpt-oss", None),
    ],
)
def test_every_part_of_the_block_shows_in_the_logits(
    tmp_path: Path, rng: np.random.Generator, recipe: str, changes: dict[str, Any] | None
) -> None:
    """So that the comparison with llama.cpp, whose tolerance is 5e-4, cannot miss it."""
    architecture, options = RECIPES[recipe]
    path, tokens = write_tiny_experts(tmp_path / "m.gguf", architecture, "F32", **options), rng.integers(0, 259, 60)
    right = logits_of(path, tokens)
    change: Callable[[ModelSpec], ModelSpec] = without_sinks
    if changes is not None:
        change = partial(each_experts, **changes)
    assert np.median(rows_apart(logits_of(path, tokens, change=change), right)) > 5e-3
