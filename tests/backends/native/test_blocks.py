"""The native engine finds weights by block and role, and refuses what it does not know by name."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import comparisons
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend, NativeSession, _core, available_isas
from edgeinfer.backends.native.config import BLOCKS
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import EdgeInferError, UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Attention, Layer, ModelSpec, TensorRows, read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile


@dataclass(frozen=True)
class WithGates(Attention):
    """A kind of block that the engine does not run."""

    head_gate: str | None = None


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    return ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "F16"))


def with_layer(spec: ModelSpec, layer: Layer) -> ModelSpec:
    return replace(spec, layers=(spec.layers[0], layer, *spec.layers[2:]))


def test_a_block_of_an_unknown_kind_is_refused_by_name(file: ModelFile) -> None:
    spec, backend = read_spec(file), NativeBackend()
    layer = spec.layers[1]
    other = with_layer(spec, replace(layer, mixer=WithGates(**vars(layer.mixer), head_gate="blk.1.attn_gate")))
    plan = backend.plan(file, spec, LoadSettings(64))
    for run in (
        lambda: backend.plan(file, other, LoadSettings(64)),
        lambda: backend.load(file, other, plan, Device(1)),
    ):
        with pytest.raises(UnsupportedModel, match=r"layers\.1\.mixer is a block WithGates"):
            run()


@pytest.mark.parametrize("kind, field, value", [("mixer", "window", 9), ("mixer", "soft_cap", 2.0)])
def test_a_field_that_the_engine_does_not_name_is_refused_by_name(
    file: ModelFile, kind: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(file)
    block = replace(getattr(spec.layers[1], kind), **{field: value})
    used = with_layer(spec, replace(spec.layers[1], **{kind: block}))
    NativeBackend().plan(file, used, LoadSettings(64))
    monkeypatch.setitem(BLOCKS, type(block), [name for name in BLOCKS[type(block)] if name != field])
    NativeBackend().plan(file, spec, LoadSettings(64))
    with pytest.raises(UnsupportedModel, match=rf"layers\.1\.{kind} has {field}"):
        NativeBackend().plan(file, used, LoadSettings(64))


def test_every_field_of_the_blocks_is_named() -> None:
    for block in BLOCKS:
        assert set(BLOCKS[block]) == set(block.__dataclass_fields__)


# ---- weights ---------------------------------------------------------------------------------------------------------


def small_weights(leave_out: str = "", **shapes: tuple[int, ...]) -> _core.Weights:
    """Weights of a decoder of one layer, without one, or with others."""
    expected: dict[str, tuple[int, ...]] = {
        "layers.0.mixer.norm": (32,),
        "layers.0.mixer.q": (32, 32),
        "layers.0.mixer.k": (16, 32),
        "layers.0.mixer.v": (16, 32),
        "layers.0.mixer.output": (32, 32),
        "layers.0.ffn.norm": (32,),
        "layers.0.ffn.gate": (48, 32),
        "layers.0.ffn.up": (48, 32),
        "layers.0.ffn.down": (32, 48),
        "output_norm": (32,),
        "output": (20, 32),
        **shapes,
    }
    weights, threads = _core.Weights(1 << 20), _core.Threads(1)
    for name, shape in expected.items():
        if name == leave_out:
            continue
        block, _, role = name.rpartition(".")
        if len(shape) == 1:
            weights.set_vector(block, role, np.ones(shape, np.float32))
        else:
            weights.set_matrix(block, role, int(GGMLType.F32), *shape)
            weights.pack_rows(block, role, 0, int(GGMLType.F32), np.zeros(4 * shape[0] * shape[1], np.uint8), threads)
    if leave_out != "token_embd":
        weights.set_embedding(int(GGMLType.F32), 20, 32, np.zeros(4 * 20 * 32, np.uint8))
    return weights


def small_config(key_bias: bool = False) -> _core.DecoderConfig:
    config = _core.DecoderConfig(n_vocab=20, n_logits=20, n_embd=32, n_ctx=64, n_batch=16, norm_epsilon=1e-5)
    scales = config.add_query_scales([0.25], 64)
    attention = _core.AttentionConfig(
        n_in=32,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        rope=config.add_rope(False, [1.0, 0.5], 1.0),
        query_scales=scales,
        window=0,
        soft_cap=0.0,
        qk_norm=_core.QKNorm.none,
        key_bias=key_bias,
    )
    config.add_layer(attention, _core.DenseConfig(n_ff=48, activation=_core.Activation.silu))
    return config


def decoder_of(weights: _core.Weights, key_bias: bool = False) -> _core.Decoder:
    return _core.Decoder(small_config(key_bias), _core.FrontConfig(), "scalar", _core.Threads(1), weights)


@pytest.mark.parametrize("name", ["layers.0.mixer.k", "layers.0.ffn.down", "output", "token_embd"])
def test_a_weight_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"weight {name} is missing"):
        decoder_of(small_weights(leave_out=name))


def test_a_bias_of_keys_that_is_said_to_be_there_is_needed() -> None:
    with pytest.raises(ValueError, match=r"weight layers\.0\.mixer\.k_bias is missing"):
        decoder_of(small_weights(), key_bias=True)
    weights = small_weights(**{"layers.0.mixer.k_bias": (16,)})
    decoder_of(weights, key_bias=True)
    weights.check_all_are_used()


def test_a_weight_of_another_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"weight layers\.0\.ffn\.up must be 48 x 32: found 47 x 32"):
        decoder_of(small_weights(**{"layers.0.ffn.up": (47, 32)}))
    with pytest.raises(ValueError, match="weight output_norm must be 32: found 31"):
        decoder_of(small_weights(output_norm=(31,)))
    with pytest.raises(ValueError, match=r"weight layers\.0\.mixer\.sinks must be 4: found 5"):
        decoder_of(small_weights(**{"layers.0.mixer.sinks": (5,)}))


def test_a_weight_that_nobody_uses_is_named() -> None:
    weights = small_weights(**{"layers.0.mixer.gate": (4,)})
    decoder_of(weights)
    with pytest.raises(ValueError, match=r"weight layers\.0\.mixer\.gate is none"):
        weights.check_all_are_used()
    weights = small_weights()
    decoder_of(weights)
    weights.check_all_are_used()


def test_a_weight_is_set_once() -> None:
    weights = small_weights()
    with pytest.raises(ValueError, match=r"weight layers\.0\.mixer\.q is there already"):
        weights.set_matrix("layers.0.mixer", "q", int(GGMLType.F32), 32, 32)
    with pytest.raises(ValueError, match=r"weight layers\.0\.mixer\.z is missing"):
        weights.pack_rows("layers.0.mixer", "z", 0, 0, np.zeros(128, np.uint8), _core.Threads(1))


# ---- layers that differ ----------------------------------------------------------------------------------------------


def of_different_layers(spec: ModelSpec) -> ModelSpec:
    """Twice as many heads of half the size, a window and another network in the second layer, of the same tensors."""
    mixer, ffn = spec.layers[1].mixer, spec.layers[1].ffn
    assert mixer.rope is not None
    n_dims = mixer.head_dim // 2
    other = replace(
        mixer,
        n_heads=2 * mixer.n_heads,
        n_kv_heads=2 * mixer.n_kv_heads,
        head_dim=n_dims,
        rope=replace(mixer.rope, n_dims=n_dims, inverse_frequencies=mixer.rope.inverse_frequencies[::2]),
        window=20,
        scale=0.3,
    )
    network = replace(
        ffn,
        n_ff=mixer.n_q,
        gate=TensorRows(str(ffn.gate), ffn.n_ff - mixer.n_q, ffn.n_ff),
        up=TensorRows(str(ffn.up), ffn.n_ff - mixer.n_q, ffn.n_ff),
        down=mixer.output,
        activation="gelu_tanh",
    )
    return with_layer(spec, Layer(other, network))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_layers_may_differ_in_heads_windows_and_networks(
    architecture: Any, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, "F16", n_layers=3, n_embd=96, n_heads=4, head_dim=24)
    file = ModelFile.open(path)
    spec = read_spec(file)
    spec, backend = of_different_layers(spec), NativeBackend(tuned=False)

    def open_session(n_threads: int = 2, isa: str | None = None, n_batch: int = 128) -> NativeSession:
        plan = backend.plan(file, spec, LoadSettings(256, n_batch=n_batch, n_threads=n_threads))
        return backend.load(file, spec, plan, Device(n_threads, isa)).session()

    tokens = rng.integers(0, 290, 90).astype(np.int32)
    assert [what for what, equal in comparisons(open_session, available_isas(), tokens) if not equal] == []
    reference = ReferenceBackend("int8")
    theirs = reference.load(file, spec, reference.plan(file, spec, LoadSettings(256)), Device(1)).session()
    a, b = (session.forward(tokens, logits="all").logits for session in (open_session(), theirs))
    assert np.abs(a - b).max() < 1e-3 * np.abs(b).max()
    same = backend.load(
        file, read_spec(file), backend.plan(file, read_spec(file), LoadSettings(256)), Device(1)
    ).session()
    assert np.abs(same.forward(tokens, logits="all").logits - a).max() > 1e-2 * np.abs(b).max()


# ---- what models share -----------------------------------------------------------------------------------------------


def test_models_share_threads_where_they_need_as_many(file: ModelFile) -> None:
    spec, backend = read_spec(file), NativeBackend(tuned=False)
    first = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64, n_threads=2)), Device(2))
    sharing = NativeBackend(tuned=False, threads=first.threads)
    for n_threads, is_shared in ((2, True), (3, False)):
        plan = sharing.plan(file, spec, LoadSettings(64, n_threads=n_threads))
        other = sharing.load(file, spec, plan, Device(n_threads))
        assert (other.threads is first.threads) == is_shared and other.threads.n == n_threads
        expected = first.session().forward([1, 2, 3]).logits
        assert np.array_equal(other.session().forward([1, 2, 3]).logits, expected)


def test_sessions_come_and_go_and_the_model_stays(file: ModelFile) -> None:
    spec, backend = read_spec(file), NativeBackend(tuned=False)
    model = backend.load(file, spec, backend.plan(file, spec, LoadSettings(256)), Device(1))
    held = model.memory()
    assert held.kv_cache == 0
    session = model.session()
    expected = session.forward([1, 2, 3]).logits
    use = session.memory()
    assert use.kv_cache > 0 and (use.weights, use.activations) == (held.weights, held.activations)
    session.close()
    with pytest.raises(EdgeInferError, match="this session is closed"):
        session.forward([1])
    assert np.array_equal(model.session(64).forward([1, 2, 3]).logits, expected)
    assert model.memory() == held
