"""Attention sinks and the clamped SwiGLU of gpt-oss: equal to plain arithmetic, and exact."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exactness import comparisons, same_bits
from numpy.typing import NDArray
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend, NativeSession, available_isas
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Dense, Layer, ModelSpec, dense_of, read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile

WINDOW, N_HEADS = 20, 4
Array = NDArray[np.float64]


def with_sinks(file: ModelFile, spec: ModelSpec, sinks: NDArray[np.float32]) -> ModelSpec:
    """The spec with sinks (n_layers, n_heads), a window in the first layer and the other activation."""

    def changed(index: int, layer: Layer) -> Layer:
        name, data = f"blk.{index}.attn_sinks.weight", sinks[index].view(np.uint8)
        file.define(name, GGMLType.F32, (N_HEADS,), lambda first, last: data[first:last])
        mixer = replace(layer.mixer, sinks=name, window=WINDOW if index == 0 else None)
        return Layer(mixer, replace(dense_of(layer), activation="clamped_swiglu"))

    return replace(spec, layers=tuple(changed(index, layer) for index, layer in enumerate(spec.layers)))


class Opener:
    """open_session(n_threads=, isa=, n_batch=) for a spec."""

    def __init__(self, file: ModelFile, spec: ModelSpec, cache_type: CacheType = "f16") -> None:
        self.file, self.spec, self.cache_type = file, spec, cache_type

    def __call__(self, n_threads: int = 2, isa: str | None = None, n_batch: int = 128) -> NativeSession:
        backend = NativeBackend(tuned=False)
        plan = backend.plan(
            self.file, self.spec, LoadSettings(256, n_batch=n_batch, n_threads=n_threads, cache_type=self.cache_type)
        )
        return backend.load(self.file, self.spec, plan, Device(n_threads, isa)).session()


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32", n_embd=128, n_heads=N_HEADS, n_kv_heads=2)
    return ModelFile.open(path)


# ---- plain arithmetic ------------------------------------------------------------------------------------------------


def logits_of(file: ModelFile, spec: ModelSpec, tokens: NDArray[np.int32]) -> Array:
    """(n, n_vocab) of a chain of tokens, from the equations of the blocks in float64."""
    x = weight(file, str(spec.token_embd))[tokens]
    for layer in spec.layers:
        x = x + attended(file, spec, layer, x)
        x = x + activated(file, spec, dense_of(layer), x)
    return normed(file, spec, spec.output_norm, x) @ weight(file, str(spec.output)).T


def attended(file: ModelFile, spec: ModelSpec, layer: Layer, x: Array) -> Array:
    mixer, n = layer.mixer, len(x)
    h = normed(file, spec, mixer.norm, x)
    q, k, v = ((h @ weight(file, str(name)).T).reshape(n, -1, mixer.head_dim) for name in (mixer.q, mixer.k, mixer.v))
    assert mixer.rope is not None and mixer.rope.kind == "interleaved"
    angles = np.outer(np.arange(n), mixer.rope.inverse_frequencies)[:, None]
    k = np.repeat(turned(k, angles), mixer.n_heads // mixer.n_kv_heads, axis=1)
    v = np.repeat(v, mixer.n_heads // mixer.n_kv_heads, axis=1)
    scores = np.einsum("ihd,jhd->hij", turned(q, angles), k) * mixer.scale
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    scores = np.where((distance >= 0) & (distance < (mixer.window or n)), scores, -np.inf)
    sinks = np.broadcast_to(weight(file, str(mixer.sinks))[:, None, None], (mixer.n_heads, n, 1))
    scores = np.concatenate([scores, sinks], axis=2)
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    shares /= shares.sum(axis=2, keepdims=True)
    values = np.einsum("hij,jhd->ihd", shares[:, :, :-1], v)
    output: Array = values.reshape(n, -1) @ weight(file, str(mixer.output)).T
    return output


def activated(file: ModelFile, spec: ModelSpec, dense: Dense, x: Array) -> Array:
    h = normed(file, spec, dense.norm, x)
    gate, up = (h @ weight(file, str(name)).T for name in (dense.gate, dense.up))
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    output: Array = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)) @ weight(file, str(dense.down)).T
    return output


def normed(file: ModelFile, spec: ModelSpec, name: object, x: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + spec.norm_epsilon) * weight(file, str(name))


def turned(heads: Array, angles: Array) -> Array:
    even, odd = heads[..., ::2], heads[..., 1::2]
    pairs = (even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles))
    return np.stack(pairs, axis=-1).reshape(heads.shape)


def weight(file: ModelFile, name: str) -> Array:
    info = file.tensors[name]
    return dequantize(info.type, file.data(name).reshape(-1), info.shape).astype(np.float64)


def sinks_of(rng: np.random.Generator) -> NDArray[np.float32]:
    """Some below most scores, some above."""
    return (rng.standard_normal((2, N_HEADS)) * 2 + 1).astype(np.float32)


def test_logits_equal_plain_arithmetic(file: ModelFile, rng: np.random.Generator) -> None:
    spec = with_sinks(file, read_spec(file), sinks_of(rng))
    tokens = rng.integers(0, spec.n_vocab, 70).astype(np.int32)
    expected = logits_of(file, spec, tokens)
    found = Opener(file, spec)().forward(tokens, logits="all").logits
    assert np.abs(found - expected).max() < 2e-3 * expected.std()  # keys and values are halves
    without = with_sinks(file, spec, np.full((2, N_HEADS), -1e30, np.float32))
    assert np.abs(logits_of(file, without, tokens) - expected).max() > 0.3 * expected.std()


@pytest.mark.parametrize("factor", [1, 30])  # of gate and up: the larger ones are cut off
def test_the_clamps_are_those_of_plain_arithmetic(factor: int, file: ModelFile, rng: np.random.Generator) -> None:
    spec = with_sinks(file, read_spec(file), sinks_of(rng))
    dense = dense_of(spec.layers[1])
    norm = weight(file, str(dense.norm)).astype(np.float32) * np.float32(factor)
    data = norm.view(np.uint8)
    file.define("larger", GGMLType.F32, norm.shape, lambda first, last: data[first:last])
    layer = replace(spec.layers[1], ffn=replace(dense, norm="larger"))
    spec = replace(spec, layers=(spec.layers[0], layer))
    tokens = rng.integers(0, spec.n_vocab, 40).astype(np.int32)
    expected = logits_of(file, spec, tokens)
    found = Opener(file, spec)().forward(tokens, logits="all").logits
    assert np.abs(found - expected).max() < 2e-3 * expected.std()


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
def test_the_bits_depend_on_nothing_but_the_text(
    cache_type: CacheType, file: ModelFile, rng: np.random.Generator
) -> None:
    spec = with_sinks(file, read_spec(file), sinks_of(rng))
    tokens = rng.integers(0, spec.n_vocab, 100).astype(np.int32)
    open_session = Opener(file, spec, cache_type)
    assert [what for what, equal in comparisons(open_session, available_isas(), tokens) if not equal] == []


def test_a_sink_far_below_all_scores_changes_no_bit(file: ModelFile, rng: np.random.Generator) -> None:
    spec = with_sinks(file, read_spec(file), np.full((2, N_HEADS), -1e30, np.float32))
    plain = replace(spec, layers=tuple(replace(layer, mixer=replace(layer.mixer, sinks=None)) for layer in spec.layers))
    tokens = rng.integers(0, spec.n_vocab, 50).astype(np.int32)
    a, b = (Opener(file, each)().forward(tokens, logits="all").logits for each in (spec, plain))
    assert same_bits(a, b)
