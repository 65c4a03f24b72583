"""Attention with gates of its own (Laguna, Muse Glimmer): the oracle against llama.cpp, native logits against it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from exactness import comparisons
from numpy.typing import NDArray
from peer import llama_cpp_logits
from tiny_gated import WINDOW, write_tiny_gated

from edgeinfer.backends import reference_attention
from edgeinfer.backends.native import NativeBackend, NativeSession, available_isas
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Attention, Experts, ModelSpec, attention_of, dense_of, read_spec
from edgeinfer.models.gguf import ModelFile

TOLERANCE = 1e-4  # of logits with a deviation of 3
CASES: dict[str, dict[str, Any]] = {
    "laguna": {"architecture": "laguna"},
    "laguna-per-number": {"architecture": "laguna", "gate": "per_number", "n_heads_windowed": 4},
    "muse-glimmer": {"architecture": "muse-glimmer"},
}


@pytest.fixture(scope="module", params=CASES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gated(tmp_path_factory.mktemp("gated") / "m.gguf", **CASES[request.param])


def logits_of(backend: Any, path: Path, tokens: NDArray[np.integer], change: Any = lambda spec: spec) -> Any:
    with ModelFile.open(path) as model:
        spec = change(read_spec(model))
        plan = backend.plan(model, spec, LoadSettings(128))
        return backend.load(model, spec, plan, Device(1)).session().forward(tokens, logits="all").logits


# ---- what the files say ----------------------------------------------------------------------------------------------


def test_what_laguna_says(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_gated(tmp_path / "m.gguf")) as model:
        spec = read_spec(model)
    mixers = [attention_of(layer) for layer in spec.layers]
    assert [mixer.window for mixer in mixers] == [None, WINDOW, WINDOW, WINDOW]
    assert [mixer.n_heads for mixer in mixers] == [4, 6, 6, 6]
    assert [mixer.shapes()["gate"] for mixer in mixers] == [(4, 96), *[(6, 96)] * 3]
    assert {(mixer.output_gate, mixer.gate_function) for mixer in mixers} == {("per_head", "softplus")}
    full, local = mixers[0].rope, mixers[1].rope
    assert full is not None and local is not None
    assert (full.n_dims, local.n_dims, local.magnitude) == (16, 32, 1.0)
    assert full.magnitude == pytest.approx(1 + 0.1 * np.log(8))
    experts = spec.layers[1].ffn
    assert isinstance(experts, Experts) and dense_of(spec.layers[0]).n_ff == 192
    assert (experts.router_function, experts.is_normalised, experts.weight_scale) == ("sigmoid", True, 2.5)
    assert (experts.n_ff, experts.n_ff_shared, experts.shared_router) == (64, 128, None)


def test_what_muse_glimmer_says(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_gated(tmp_path / "m.gguf", "muse-glimmer")) as model:
        spec = read_spec(model)
    mixers = [attention_of(layer) for layer in spec.layers]
    assert [mixer.window for mixer in mixers] == [WINDOW, WINDOW, WINDOW, None]
    assert [mixer.rope is None for mixer in mixers] == [False, False, False, True]
    assert {(mixer.output_gate, mixer.gate_function) for mixer in mixers} == {("per_number", "sigmoid")}
    epsilons = {each.post_norm_epsilon for layer in spec.layers for each in (attention_of(layer), dense_of(layer))}
    assert epsilons == {1e-8}
    assert (spec.embedding_norm, spec.logit_soft_cap) == (True, 5.0)
    assert spec.logit_scale == pytest.approx(0.7)


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention.head_count", [4, 5, 6, 6]),
        ("attention.head_count", [4, 6, 6]),
        ("rope.dimension_count_swa", 33),
        ("expert_gating_func", 7),
        ("attention.sliding_window", -1),
    ],
)
def test_a_key_that_does_not_fit_is_refused_by_its_name(tmp_path: Path, key: str, value: Any) -> None:
    metadata = {f"laguna.{key}": value if key != "attention.sliding_window" else 1.5}
    with (
        ModelFile.open(write_tiny_gated(tmp_path / "m.gguf", metadata=metadata)) as model,
        pytest.raises(UnsupportedModel, match=f"laguna.{key} "),
    ):
        read_spec(model)


# ---- against others --------------------------------------------------------------------------------------------------


def test_logits_are_those_of_llama_cpp(
    path: Path, llama_cpp: ModuleType, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference_attention._CACHE_DTYPES, "f16", np.float32)
    tokens = rng.integers(0, 259, 70)
    f32: dict[str, Any] = {"type_k": 0, "type_v": 0, "flash_attn": False}
    expected = llama_cpp_logits(llama_cpp, path, tokens, **f32)
    assert np.abs(logits_of(ReferenceBackend(), path, tokens) - expected).max() < TOLERANCE


def _without(**changes: Any) -> Any:
    def changed(spec: ModelSpec) -> ModelSpec:
        layers = (
            replace(layer, mixer=replace(layer.mixer, **changes)) if isinstance(layer.mixer, Attention) else layer
            for layer in spec.layers
        )
        return replace(spec, layers=tuple(layers))

    return changed


@pytest.mark.parametrize(
    "architecture, change",
    [
        ("laguna", _without(gate_function="sigmoid")),
        ("laguna", _without(output_gate=None, gate=None)),
        ("laguna", _without(window=None)),
        ("muse-glimmer", _without(gate_function="softplus")),
        ("muse-glimmer", _without(rope=None)),
        ("muse-glimmer", lambda spec: replace(spec, embedding_norm=False, embedding_scale=0.3)),
        ("muse-glimmer", _without(post_norm_epsilon=1.0)),
    ],
)
def test_every_part_of_a_recipe_shows_in_the_logits(
    architecture: Any, change: Any, tmp_path: Path, rng: np.random.Generator
) -> None:
    """So that the comparisons above cannot miss it."""
    path, tokens = write_tiny_gated(tmp_path / "m.gguf", architecture), rng.integers(0, 259, 40)
    right, wrong = (logits_of(ReferenceBackend(), path, tokens, each) for each in (lambda spec: spec, change))
    assert np.sqrt(np.mean((right - wrong) ** 2)) > 0.05 * right.std()


def test_the_native_engine_agrees_with_the_oracle(path: Path, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 291, 100)
    found, expected = (logits_of(each, path, tokens) for each in (NativeBackend(tuned=False), ReferenceBackend()))
    # Keys and values, rounded to halves, may fall on other ones.
    assert np.abs(found - expected).max() < 3e-3 and np.median(np.abs(found - expected)) < 1e-4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
def test_the_bits_depend_on_nothing_but_the_text(
    name: str, cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_gated(tmp_path / "m.gguf", tensor_type="Q8_0", **CASES[name])
    with ModelFile.open(path) as file:
        spec, backend = read_spec(file), NativeBackend(tuned=False)

        def open_session(n_threads: int = 1, isa: str | None = None, n_batch: int = 64) -> NativeSession:
            settings = LoadSettings(256, n_batch=n_batch, n_threads=n_threads, cache_type=cache_type)
            plan = backend.plan(file, spec, settings)
            return backend.load(file, spec, plan, Device(n_threads, isa)).session()

        isas, sizes = (available_isas(), range(1, 17)) if cache_type == "f16" else ((), (1, 5))
        tokens = rng.integers(0, 291, 150).astype(np.int32)
        assert [what for what, equal in comparisons(open_session, isas, tokens, sizes) if not equal] == []
