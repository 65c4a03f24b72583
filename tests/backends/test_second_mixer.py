"""Blocks answer for themselves: a mixer that only this file knows is read, planned, loaded, run and profiled."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends import reference
from edgeinfer.backends.base import run_text
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.reference import LayerRows, ReferenceBackend, ReferenceDecoder, ReferenceSession
from edgeinfer.backends.reference_math import Floats
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Attention, Layer, Mixer, ModelSpec, architectures, attention_of, read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.spec import StateKind
from edgeinfer.profiler.passes import Passes, Work

N = 48  # numbers of the mean


@dataclass(frozen=True)
class RunningMean(Mixer):
    """m = keep * m + (1 - keep) * (value @ h) with keep = sigmoid(gate @ h); it adds output @ (m * (shown @ h))."""

    n: int
    norm: str
    gate: str  # (n, n_embd)
    shown: str  # (n, n_embd)
    value: str  # (n, n_embd)
    output: str  # (n_embd, n)

    @property
    def n_activations(self) -> int:
        return 3 * self.n

    @property
    def state_kind(self) -> StateKind:
        return "recurrent"

    def state_bytes(self, n_ctx: int, cache_type: CacheType) -> int:
        return 4 * self.n

    def n_seen(self, n_past: int) -> int:
        return 0

    def n_seen_in_prompt(self, n_tokens: int) -> float:
        return 0.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        wide = {role: (self.n, self.n_embd) for role in ("gate", "shown", "value")}
        return {"norm": (self.n_embd,), **wide, "output": (self.n_embd, self.n)}


class ReferenceRunningMean:
    fields = ("n_embd", "n", "norm", "gate", "shown", "value", "output")

    def state(self, block: RunningMean, n_ctx: int, cache_type: CacheType) -> list[tuple[tuple[int, ...], Any]]:
        return [((n_ctx, block.n), np.dtype(np.float32))]

    def run(self, block: RunningMean, decoder: ReferenceDecoder, x: Floats, at: LayerRows) -> Floats:
        h = decoder.norm(block.norm, x)
        keep = 1 / (1 + np.exp(-decoder.linear(block.gate, None, h)))
        value, shown = (decoder.linear(matrix, None, h) for matrix in (block.value, block.shown))
        (means,) = at.state
        for i, path in enumerate(at.paths):
            before = means[path[-2]] if len(path) > 1 else np.zeros(block.n, np.float32)
            means[path[-1]] = keep[i] * before + (1 - keep[i]) * value[i]
        return decoder.linear(block.output, None, means[[path[-1] for path in at.paths]] * shown)


def _with_means(reader: Reader, spec: ModelSpec) -> ModelSpec:
    """Every second layer has a mean in place of attention."""
    layers = [_mean_layer(layer) if index % 2 else layer for index, layer in enumerate(spec.layers)]
    return replace(spec, layers=tuple(layers))


def _mean_layer(layer: Layer) -> Layer:
    of = attention_of(layer)
    return replace(layer, mixer=RunningMean(of.n_embd, of.n_q, of.norm, of.q, of.k, of.v, of.output))  # type: ignore[arg-type]


ARCHITECTURE = Architecture(name="means", rope_kind="interleaved", refine=_with_means)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "means.gguf"
    model = write_tiny_model(
        tmp_path / "llama.gguf", "llama", "F32", n_layers=3, n_heads=2, n_kv_heads=2, head_dim=N // 2
    )
    path.write_bytes(_renamed(model.read_bytes()))
    files = architectures._files() | {"means": "means"}
    monkeypatch.setattr(architectures, "_files", lambda: files)
    module = "edgeinfer.models.architectures.means"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(ARCHITECTURE=ARCHITECTURE))  # type: ignore[arg-type]
    monkeypatch.setitem(reference.MIXERS, RunningMean, ReferenceRunningMean())
    return path


def _renamed(file: bytes) -> bytes:
    """The same file of another architecture, whose name has as many letters."""
    return file.replace(b"llama.", b"means.").replace(b"llama", b"means", 1)


@pytest.fixture
def session(path: Path) -> ReferenceSession:
    return _session(path)


def _session(path: Path, n_batch: int = 512) -> ReferenceSession:
    file, backend = ModelFile.open(path), ReferenceBackend()
    spec = backend.read_spec(file)
    return backend.load(file, spec, backend.plan(file, spec, LoadSettings(64, n_batch=n_batch)), Device(1)).session()


def _tokens(n: int) -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, 256, n).astype(np.int32)


def test_its_weights_and_its_state_are_in_the_spec(path: Path) -> None:
    spec = read_spec(ModelFile.open(path))
    assert [type(layer.mixer) for layer in spec.layers] == [Attention, RunningMean, Attention]
    assert [layer.mixer.state_kind for layer in spec.layers] == ["full_kv", "recurrent", "full_kv"]
    assert [(of.role, of.tensor) for of in spec.weights() if of.block == "layers.1.mixer"] == [
        ("norm", "blk.1.attn_norm.weight"),
        ("gate", "blk.1.attn_q.weight"),
        ("shown", "blk.1.attn_k.weight"),
        ("value", "blk.1.attn_v.weight"),
        ("output", "blk.1.attn_output.weight"),
    ]
    mean = spec.layers[1].mixer
    assert mean.multiply_adds() == mean.multiply_adds(1000) == 4 * N * 96
    assert mean.state_bytes(1, "f16") == mean.state_bytes(1000, "f16") == 4 * N


def test_what_is_planned_is_what_is_held(session: ReferenceSession) -> None:
    use, planned = session.memory(), session.model.plan.use
    assert use.kv_cache == planned.kv_cache == 64 * (2 * 4 * N + 4 * N)  # keys and values in half floats; the mean
    assert use.weights == planned.weights


def test_batches_trees_and_truncation_change_no_bit(path: Path, session: ReferenceSession) -> None:
    text, branch = _tokens(20), _tokens(25)[20:]
    whole = session.forward([*text, *branch], logits="all").logits
    for n_batch in (1, 7):
        pieces = _session(path, n_batch)
        run_text(pieces, text, logits="none")
        assert np.array_equal(pieces.forward(branch, logits="all").logits, whole[20:])
    other = _session(path)
    run_text(other, text, logits="none")
    # A tree: the true continuation beside a branch that is dropped.
    tree = other.forward([branch[0], 9, branch[1]], parents=[-1, -1, 0], logits="all").logits
    assert np.array_equal(tree[0], whole[20]) and np.array_equal(tree[2], whole[21])
    assert not np.array_equal(tree[1], whole[20])
    other.commit([0, 2])
    assert np.array_equal(other.forward(branch[2:3]).logits[0], whole[22])
    assert other.truncate(10) == 10
    assert np.array_equal(other.forward(text[10:12], logits="all").logits, whole[10:12])


def test_the_engine_generates_with_it(path: Path) -> None:
    with edgeinfer.load(path, backend="reference", n_ctx=64) as engine:
        first = engine.generate("abc", max_tokens=8, temperature=0)
        assert first.usage.completion_tokens == 8
        assert engine.generate("abc", max_tokens=8, temperature=0).tokens == first.tokens


def test_its_cost_is_in_the_profile(path: Path) -> None:
    file = ModelFile.open(path)
    spec = read_spec(file)
    plan = ReferenceBackend().plan(file, spec, LoadSettings(64))
    attention, mean = spec.layers[0], spec.layers[1]
    network = 3 * 96 * 288
    assert Work.of(file, spec, plan).multiply_adds == (
        2 * attention.mixer.multiply_adds() + mean.mixer.multiply_adds() + 3 * network + spec.n_logits * 96
    )
    passes = Passes({1: 1.0}, 1.0, 0.0, 0.5, 0.5, [layer.mixer for layer in spec.layers], "limits")
    assert passes.seconds(1, 10) == 1.0 + 2 * 0.5 * 10  # only attention reads more as the sequence grows


def test_other_backends_refuse_it_by_name(path: Path) -> None:
    file = ModelFile.open(path)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mixer is a block RunningMean, which the native"):
        NativeBackend().plan(file, read_spec(file), LoadSettings(64))
    with pytest.raises(UnsupportedModel, match="must be Attention: found a block RunningMean"):
        attention_of(read_spec(file).layers[1])
