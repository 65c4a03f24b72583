"""The TFLite graphs in TFLite's interpreter: the same logits as the reference, as near as each format allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from parts import is_there, missing
from tiny_models import Architecture, write_tiny_model

from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.litertlm.graph import (
    ARCHITECTURES,
    build_model,
    cache_positions,
    check_model,
    prefill_lengths,
)
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile

if not is_there("litert"):
    missing("litert", "ai-edge-litert and LiteRT-LM are not installed")

N_CTX, HIDDEN = 64, -1e9
TOKENS = np.random.default_rng(1).integers(3, 290, 40).astype(np.int32)


def logits_of(path: Path, spec: ModelSpec) -> NDArray[np.float32]:
    """(8, n_vocab): the first 32 tokens as a prompt in one pass, the others one by one."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    n_cache, n = cache_positions(N_CTX), prefill_lengths(N_CTX)[-1]
    places = np.arange(n_cache)
    caches = {}
    for index, block in enumerate(layer.mixer for layer in spec.layers):
        caches[f"kv_cache_k_{index}"] = np.zeros((1, block.n_kv_heads, n_cache, block.head_dim), np.float32)
        caches[f"kv_cache_v_{index}"] = np.zeros((1, block.n_kv_heads, block.head_dim, n_cache), np.float32)

    def run(name: str, first: int, last: int) -> dict[str, NDArray[np.float32]]:
        positions = np.arange(first, last, dtype=np.int32)
        mask = np.where(places <= positions[:, None], 0, HIDDEN).astype(np.float32)[None, None]
        signature = interpreter.get_signature_runner(name)
        found: dict[str, NDArray[np.float32]] = signature(
            tokens=TOKENS[None, first:last], input_pos=positions, mask=mask, **caches
        )
        return found

    caches = run(f"prefill_{n}", 0, n)
    rows = []
    for position in range(n, len(TOKENS)):
        caches = run("decode", position, position + 1)
        rows.append(caches.pop("logits")[0, 0])
    return np.stack(rows)


def compared(folder: Path, source: Path, fine: bool = True) -> tuple[float, float]:
    """Relative error of the logits, and the share of rows with the same best token."""
    with ModelFile.open(source) as file:
        spec, backend = read_spec(file), ReferenceBackend()
        with (folder / "model.tflite").open("wb") as out:
            build_model(file, spec, N_CTX, fine).write(out)
        session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(N_CTX)), Device(1)).session()
        wanted = np.array(session.forward(TOKENS, logits="all").logits)[32:]
    found = logits_of(folder / "model.tflite", spec)
    error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    return error, float(np.mean(found.argmax(axis=1) == wanted.argmax(axis=1)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_float_model_has_the_logits_of_the_reference(architecture: Architecture, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model.gguf", architecture, "F32")
    error, same = compared(tmp_path, source)
    assert error < 5e-4 and same == 1.0  # the cache of the reference is of float16


# Codes of 4 bits are those of the file, with scales of 8 bits; the others are rounded again, a scale a row.
@pytest.mark.parametrize(
    "type, limit",
    [("F16", 5e-4), ("Q4_0", 6e-3), ("Q4_1", 6e-3), ("Q4_K", 6e-3), ("Q8_0", 0.02), ("Q6_K", 0.03)],
)
def test_a_quantised_model_is_as_near_as_its_formats_allow(type: str, limit: float, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model.gguf", "llama", type)
    error, _ = compared(tmp_path, source)
    assert error < limit


def test_activations_of_16_bits_are_nearer_than_those_of_8(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model.gguf", "qwen2", "Q4_1")
    assert 2 * compared(tmp_path, source)[0] < compared(tmp_path, source, fine=False)[0]


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "granite"])
def test_another_architecture_is_refused_by_name(architecture: Architecture, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "model.gguf", architecture, "F32")) as file:
        with pytest.raises(UnsupportedModel, match=f"has no {architecture}; it has gemma3, llama"):
            check_model(file, read_spec(file))


@pytest.mark.parametrize("n_ctx", [1, 2, 40, 64, 300, 1280, 4096])
def test_the_cache_has_room_for_the_last_piece_of_any_prompt(n_ctx: int) -> None:
    lengths = prefill_lengths(n_ctx)
    for n in range(1, n_ctx):  # the runtime: as many of the longest as fit, then the shortest that holds the rest
        whole, rest = divmod(n, lengths[-1])
        last = next((length for length in lengths if length >= rest), 0) if rest else 0
        assert whole * lengths[-1] + last <= cache_positions(n_ctx)
