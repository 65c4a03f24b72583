"""Latent attention on the oracle: what files say, and against llama.cpp."""

from __future__ import annotations

import math
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
from tiny_latents import LATENT_KINDS, LatentKind, write_tiny_latents

from edgeinfer.backends import reference_latent
from edgeinfer.backends.reference import ReferenceBackend, ReferenceSession
from edgeinfer.common.errors import InvalidArgument, UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Dense, Experts, LatentAttention, ModelSpec, read_nextn, read_spec
from edgeinfer.models.gguf import ModelFile

Change = Callable[[ModelSpec], ModelSpec]
TOLERANCE = 1e-4  # of logits with a deviation of 3
TEXT = np.array([72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100], dtype=np.int32)


@pytest.fixture(scope="module", params=LATENT_KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_latents(tmp_path_factory.mktemp("latents") / "m.gguf", request.param)


def open_session(path: Path, n_ctx: int = 64, change: Change = lambda spec: spec) -> ReferenceSession:
    backend = ReferenceBackend()
    with ModelFile.open(path) as model:
        spec = change(read_spec(model))
        return backend.load(model, spec, backend.plan(model, spec, LoadSettings(n_ctx)), Device(1)).session()


def latent_of(spec: ModelSpec, layer: int = 0) -> LatentAttention:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, LatentAttention)
    return mixer


# ---- what the files say ----------------------------------------------------------------------------------------------


def test_what_a_file_says(path: Path) -> None:
    with ModelFile.open(path) as model:
        spec, blocks = read_spec(model), read_nextn(model)
    block = latent_of(spec)
    assert (block.n_heads, block.n_plain, block.n_turned, block.n_latent, block.n_value) == (4, 24, 16, 48, 32)
    assert [type(layer.ffn) for layer in spec.layers] == [Dense, Experts, Experts]
    assert (block.rope.kind, block.rope.n_dims, block.rope.magnitude) == ("interleaved", 16, 1.0)
    assert [block.state_bytes(10, "f16"), block.n_seen(7)] == [10 * 2 * 64, 7]
    if block.q is None:
        assert block.scale == pytest.approx(1 / math.sqrt(40))
        assert (block.q_a, block.n_q_latent) == ("blk.0.attn_q_a.weight", 28)
    else:
        assert block.scale == pytest.approx((1 + 0.0707 * math.log(8)) ** 2 / math.sqrt(40))
    assert len(blocks) == (spec.layers[1].ffn.n_groups == 1 and block.q is None)  # type: ignore[attr-defined]
    for drafting in blocks:
        assert isinstance(drafting.layer.mixer, LatentAttention) and isinstance(drafting.layer.ffn, Experts)


def test_the_row_of_a_released_model_is_as_large_as_it_is_said_to_be() -> None:
    """GLM-4.7-Flash keeps 576 numbers a token and layer, 54 kB in all."""
    names: dict[str, Any] = dict.fromkeys(("kv", "kv_norm", "k_b", "v_b", "output", "rope"), "t")
    block = LatentAttention(
        n_embd=2048, n_heads=20, n_plain=192, n_turned=64, n_latent=512, n_value=256, scale=1.0, **names
    )
    assert (block.n_row, 47 * block.state_bytes(1, "f16")) == (576, 54_144)
    assert block.state_bytes(1, "q8_0") == 576 + 72
    assert block.refused_cache("q8_0") is None
    assert block.multiply_adds(100) - block.multiply_adds() == 100 * 20 * (576 + 512)


def test_a_cache_of_six_and_four_bits_is_refused(path: Path) -> None:
    with ModelFile.open(path) as model:
        spec = read_spec(model)
        with pytest.raises(InvalidArgument, match="k6v4 KV cache needs keys and values apart"):
            ReferenceBackend().plan(model, spec, LoadSettings(32, cache_type="k6v4"))


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention.key_length", 63),
        ("attention.value_length", 64),
        ("attention.head_count_kv", 4),
        ("attention.key_length_mla", None),
        ("attention.value_length_mla", None),
        ("attention.kv_lora_rank", None),
        ("attention.temperature_scale", 0.1),
        ("expert_gating_func", 9),
        ("expert_group_count", 3),
    ],
)
def test_a_key_that_does_not_fit_is_refused_by_its_name(tmp_path: Path, key: str, value: Any) -> None:
    path = write_tiny_latents(tmp_path / "m.gguf", metadata={f"deepseek2.{key}": value})
    with ModelFile.open(path) as model, pytest.raises(UnsupportedModel, match=f"deepseek2.{key} "):
        read_spec(model)


def test_yarn_without_its_multiplier_is_refused(tmp_path: Path) -> None:
    key = "deepseek2.rope.scaling.yarn_log_multiplier"
    path = write_tiny_latents(tmp_path / "m.gguf", "lite", metadata={key: None})
    with ModelFile.open(path) as model, pytest.raises(UnsupportedModel, match=key):
        read_spec(model)


def test_routers_of_glm_that_the_file_does_not_name_are_sigmoids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early files of GLM-4.7-Flash do not say it; their layers and their vocabulary do."""
    path = write_tiny_latents(tmp_path / "m.gguf", "glm", metadata={"deepseek2.expert_gating_func": None})

    def functions() -> set[str]:
        with ModelFile.open(path) as model:
            return {layer.ffn.router_function for layer in read_spec(model).layers if isinstance(layer.ffn, Experts)}

    assert functions() == {"softmax"}
    monkeypatch.setattr("edgeinfer.models.architectures.deepseek2._LAYERS_OF_GLM", (3,))
    monkeypatch.setattr("edgeinfer.models.architectures.deepseek2._VOCABULARY_OF_GLM", 291)
    assert functions() == {"sigmoid"}


# ---- the oracle ------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in float32, as those that this is compared with have them."""
    monkeypatch.setitem(reference_latent._CACHE_DTYPES, "f16", np.float32)


@pytest.mark.parametrize("kind, is_old", [*((kind, False) for kind in LATENT_KINDS), ("lite", True), ("v3", True)])
def test_logits_are_those_of_llama_cpp(
    kind: LatentKind, is_old: bool, llama_cpp: ModuleType, tmp_path: Path, rng: np.random.Generator, exact_cache: None
) -> None:
    """llama.cpp knows models without a latent of queries by their 26 or 27 layers."""
    n_layers, n = (26, 40) if kind == "lite" else (3, 70)
    path = write_tiny_latents(tmp_path / "m.gguf", kind, n_layers=n_layers, is_old=is_old)
    tokens = rng.integers(0, 259, n)
    f32: dict[str, Any] = {"type_k": 0, "type_v": 0, "flash_attn": False}
    expected = llama_cpp_logits(llama_cpp, path, tokens, **f32)
    assert np.abs(open_session(path, 128).forward(tokens, logits="all").logits - expected).max() < TOLERANCE


def logits_of(session: ReferenceSession, tokens: ArrayLike) -> NDArray[np.float32]:
    """Logits after the last of these tokens, after what is committed."""
    return session.forward(tokens).logits.reshape(-1)


def test_a_branch_of_a_tree_is_a_chain(path: Path) -> None:
    session, tokens, parents = open_session(path), np.arange(5, 12, dtype=np.int32), [-1, 0, 1, 0, 3, 0, -1]
    session.forward(TEXT)
    session.commit(range(len(TEXT)))
    found = session.forward(tokens, parents, logits="all").logits
    for branch in ([0, 1, 2], [0, 3, 4], [0, 5], [6]):
        assert_array_equal(found[branch[-1]], logits_of(open_session(path), [*TEXT, *tokens[branch]]))
    session.commit([0, 3])
    assert_array_equal(logits_of(session, [9]), logits_of(open_session(path), [*TEXT, 5, 8, 9]))
    assert session.truncate(5) == 5
    assert_array_equal(logits_of(session, TEXT[5:]), logits_of(open_session(path), TEXT))


def test_what_is_planned_is_what_is_held(path: Path) -> None:
    backend = ReferenceBackend()
    with ModelFile.open(path) as model:
        spec = read_spec(model)
        plan = backend.plan(model, spec, LoadSettings(48, n_batch=16))
        assert backend.load(model, spec, plan, Device(1)).session().memory() == plan.use


def _of_latents(**changes: Any) -> Change:
    def changed(spec: ModelSpec) -> ModelSpec:
        layers = (replace(layer, mixer=replace(layer.mixer, **changes)) for layer in spec.layers)
        return replace(spec, layers=tuple(layers))

    return changed


def _of_experts(**changes: Any) -> Change:
    def changed(spec: ModelSpec) -> ModelSpec:
        layers = (
            replace(layer, ffn=replace(layer.ffn, **changes)) if isinstance(layer.ffn, Experts) else layer
            for layer in spec.layers
        )
        return replace(spec, layers=tuple(layers))

    return changed


@pytest.mark.parametrize(
    "change",
    [
        _of_latents(scale=0.3),
        _of_experts(n_groups=1, n_used_groups=1),
        _of_experts(selection_bias=None),
        _of_experts(weight_scale=1.0),
        lambda spec: _of_latents(rope=replace(latent_of(spec).rope, kind="halves"))(spec),
    ],
)
def test_every_part_of_a_recipe_shows_in_the_logits(change: Change, tmp_path: Path, rng: np.random.Generator) -> None:
    """So that the comparisons above cannot miss it."""
    path, tokens = write_tiny_latents(tmp_path / "m.gguf"), rng.integers(0, 259, 40)
    right, wrong = (
        open_session(path, change=each).forward(tokens, logits="all").logits for each in (lambda spec: spec, change)
    )
    assert np.sqrt(np.mean((right - wrong) ** 2)) > 0.05 * right.std()


def test_the_absorbed_form_is_the_textbook_s(tmp_path: Path, rng: np.random.Generator, exact_cache: None) -> None:
    """Keys and values of each head made of the row, and each head by itself."""
    path, tokens = write_tiny_latents(tmp_path / "m.gguf", n_layers=1), rng.integers(0, 259, 12)
    session = open_session(path)
    hidden, block, model = session.forward(tokens, hidden=[0]).hidden, latent_of(session.spec), session.model
    x = model.embeddings(tokens)
    h = model.norm(block.norm, x)
    q = model.linear(block.q_b, None, model.norm(block.q_norm, model.linear(block.q_a, None, h)))  # type: ignore[arg-type]
    row = model.linear(block.kv, None, h)
    c, r = model.norm(block.kv_norm, row[:, :48]), row[:, 48:]
    k_b, v_b = (model.values_of(each).reshape(4, -1, n) for each, n in ((block.k_b, 24), (block.v_b, 48)))

    def turned(each: NDArray[np.floating]) -> NDArray[np.floating]:
        """(12, 16), pairs side by side."""
        angles = np.arange(12)[:, None] * np.array(block.rope.inverse_frequencies)
        pairs = (each[:, 0::2] + 1j * each[:, 1::2]) * np.exp(1j * angles)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(12, 16)

    given = []
    for head, of_head in enumerate(q.reshape(12, 4, 40).transpose(1, 0, 2)):
        keys = np.concatenate([c @ k_b[head], turned(r)], axis=-1)
        scores = np.concatenate([of_head[:, :24], turned(of_head[:, 24:])], axis=-1) @ keys.T / math.sqrt(40)
        weights = np.exp(np.where(np.tri(12) > 0, scores, -np.inf))
        given.append(weights / weights.sum(axis=1, keepdims=True) @ (c @ v_b[head].T))
    x = x + np.concatenate(given, axis=-1) @ model.values_of(block.output).T
    ffn = session.spec.layers[0].ffn
    assert isinstance(ffn, Dense) and hidden is not None
    f = model.norm(ffn.norm, x.astype(np.float32))
    gate, up = (model.linear(each, None, f) for each in (ffn.gate, ffn.up))
    assert_allclose(hidden[0], x + model.linear(ffn.down, None, gate / (1 + np.exp(-gate)) * up), atol=2e-5)
