"""Sessions on ONNX Runtime: near the reference for every model, and of no consequence for the text they draft."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_sessions import Kind, difference, differences_to_the_reference, opener
from tiny_models import ARCHITECTURES, Architecture, write_tiny_model

from edgeinfer.backends.onnx import OnnxBackend, ProviderInfo
from edgeinfer.common.errors import (
    BackendLost,
    Interrupted,
    InvalidArgument,
    UnsupportedModel,
)
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.reader import each_mixer

FLOATS = ["F32", "F16", "BF16"]
BLOCKS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
BLOCKS += ["TQ1_0", "TQ2_0", "Q2_0"]
MODELS = [("llama", format) for format in FLOATS + BLOCKS] + [("qwen2", "Q4_0"), ("qwen2", "Q4_K")]
MODELS += [(name, "F32") for name in ARCHITECTURES[1:]] + [("bitnet-b1.58", "I2_S"), ("phi3", "Q8_0")]
pytestmark = pytest.mark.usefixtures("onnx_provider")


# ---- near the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture, format", MODELS)
def test_logits_are_near_the_reference(
    architecture: Architecture, format: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format)
    errors = differences_to_the_reference(path, "onnx contrib", rng)
    # The reference rounds its cache to f16; ONNX Runtime rounds what it multiplies with codes to int8.
    assert errors.max() < (1e-3 if format in FLOATS else 6e-2)


@pytest.mark.parametrize("architecture, format", MODELS)
def test_graphs_of_the_standard_alone_are_nearer_still(
    architecture: Architecture, format: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Weights are kept exactly, and nothing else is rounded."""
    path = write_tiny_model(tmp_path / "m.gguf", architecture, format)
    assert differences_to_the_reference(path, "onnx plain", rng).max() < 1e-3


@pytest.mark.parametrize("kind", ["onnx contrib", "onnx plain"])
@pytest.mark.parametrize(
    "shape",
    [
        {"tensor_type": "Q4_1", "n_heads": 1, "n_kv_heads": 1, "n_embd": 96, "head_dim": 96, "tied": True},
        {"tensor_type": "F16", "n_heads": 4, "n_kv_heads": 4, "n_embd": 96, "head_dim": 10, "n_ff": 100},
        {"tensor_type": "Q8_0", "n_heads": 7, "n_kv_heads": 1, "n_embd": 160, "head_dim": 32, "tied": True},
        {"tensor_type": "Q6_K", "head_dim": 64, "types": {"attn_v": "Q8_0", "ffn_up": "F16"}, "output_biases": True},
    ],
)
def test_odd_shapes_are_near_the_reference(
    shape: dict[str, Any], kind: Kind, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", **shape)
    assert differences_to_the_reference(path, kind, rng).max() < (1e-3 if kind == "onnx plain" else 6e-2)


def test_of_several_contexts_the_longer_one_has_its_own_rotation(tmp_path: Path, rng: np.random.Generator) -> None:
    """phi3 turns by other frequencies in a session of more positions than it was first trained with."""
    keys = {"phi3.rope.scaling.original_context_length": 100}
    path = write_tiny_model(tmp_path / "m.gguf", "phi3", "F32", rope_freqs=True, metadata=keys)
    assert differences_to_the_reference(path, "onnx contrib", rng).max() < 1e-3


# ---- memory and failures ---------------------------------------------------------------------------------------------


def test_another_cache_is_refused(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0")) as file:
        backend, spec = OnnxBackend(), read_spec(file)
        with pytest.raises(InvalidArgument, match="no KV cache of q8_0"):
            backend.plan(file, spec, LoadSettings(64, cache_type="q8_0"))


def test_a_type_without_a_rule_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_K", types={"ffn_down": "IQ4_NL"})
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match="ffn_down.weight: tensor type IQ4_NL is"):
        OnnxBackend().plan(file, read_spec(file), LoadSettings(64))


def test_a_graph_that_a_provider_cannot_run_is_refused(tmp_path: Path, onnx_provider: ProviderInfo) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32")
    with ModelFile.open(path) as file:
        backend, spec = OnnxBackend(onnx_provider), read_spec(file)
        plan = backend.plan(file, spec, LoadSettings(64))
        wrong = each_mixer(spec, lambda _, mixer: replace(mixer, n_kv_heads=4))  # keys of another width than the cache
        with pytest.raises((UnsupportedModel, BackendLost), match="ONNX Runtime: .* failed"):
            backend.load(file, wrong, plan, Device(1)).session().forward([1, 2, 3])


@pytest.mark.parametrize("kind", ["onnx contrib", "onnx plain"])
def test_a_pass_that_runs_stops_before_its_next_operator(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opener(write_tiny_model(tmp_path / "m.gguf", "qwen2", "F32"), kind)()
    expected = session.forward([1, 2, 3]).logits
    program = session.model.decoder.program

    class Interrupting:
        """As if the call came just behind the beginning of the pass."""

        def __init__(self, session: Any) -> None:
            self._session = session

        def run_with_iobinding(self, *arguments: Any) -> None:
            program.interrupt()
            self._session.run_with_iobinding(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(program, "_session", Interrupting(program._session))
        with pytest.raises(Interrupted):
            session.forward([1, 2, 3])
    assert session.n_past == 0 and difference(session.forward([1, 2, 3]).logits, expected) < 1e-6
