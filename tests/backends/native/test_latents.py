"""Latent attention on the native engine: near the oracle, and the bits of a text depend on nothing but the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import LEAVES, TREE, branch_to, comparisons, same_bits
from rounded import check_rounded
from tiny_latents import LATENT_KINDS, LatentKind, write_tiny_latents

from edgeinfer.backends.base import Rows, run_sequence
from edgeinfer.backends.native import NativeBackend, NativeModel, NativeSession, available_isas
from edgeinfer.backends.native.config import cache_sizes
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import InvalidArgument, UnsupportedModel
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.source import GgufSource
from edgeinfer.models import LatentAttention, read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile
from edgeinfer.record_cache import record_key

N_CTX, N_BATCH = 512, 64


class Opener:
    """Sessions of one model file."""

    def __init__(self, path: Path, cache_type: CacheType = "f16") -> None:
        self.file = ModelFile.open(path)
        self.spec = read_spec(self.file)
        self.cache_type = cache_type

    def model(self, n_threads: int = 1, isa: str | None = None, n_batch: int = N_BATCH, **settings: Any) -> NativeModel:
        backend = NativeBackend(tuned=False)
        settings |= {"n_threads": n_threads, "cache_type": self.cache_type}
        plan = backend.plan(self.file, self.spec, LoadSettings(N_CTX, n_batch=n_batch, **settings))
        return backend.load(self.file, self.spec, plan, Device(n_threads, isa))

    def __call__(self, n_threads: int = 1, isa: str | None = None, n_batch: int = N_BATCH) -> NativeSession:
        return self.model(n_threads, isa, n_batch).session()


def some_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 291, n)]


def read(session: NativeSession, tokens: Sequence[int]) -> np.ndarray:
    """All logits of tokens, which are committed."""
    return run_sequence(session, tokens, logits="all").logits.copy()


def of_both(path: Path, tokens: np.ndarray, oracle: ReferenceBackend, cache_type: CacheType = "f16") -> list[Any]:
    """All logits of the native engine and of the oracle."""
    return [session.forward(tokens, logits="all").logits for session in sessions_of_both(path, oracle, cache_type)]


def sessions_of_both(path: Path, oracle: ReferenceBackend, cache_type: CacheType = "f16") -> list[Any]:
    """One of the native engine and one of the oracle."""
    with ModelFile.open(path) as file:
        spec, settings = read_spec(file), LoadSettings(256, cache_type=cache_type)
        backends: list[Any] = [NativeBackend(tuned=False), oracle]
        return [each.load(file, spec, each.plan(file, spec, settings), Device(1)).session() for each in backends]


# ---- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_heads", [1, 4, 15])
@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_logits_are_the_oracle_s(kind: LatentKind, n_heads: int, tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_latents(tmp_path / "m.gguf", kind, n_heads=n_heads)
    found, expected = of_both(path, rng.integers(0, 291, 150), ReferenceBackend())
    assert np.abs(found[0] - expected[0]).max() < 1e-4
    # Rows, rounded to halves, may fall on other ones.
    assert np.abs(found - expected).max() < 3e-3 and np.median(np.abs(found - expected)) < 1e-4


@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q4_K", "Q6_K", "F16"])
def test_quantised_layers_are_those_of_the_reference(
    tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_latents(tmp_path / "m.gguf", "v3", tensor_type)
    check_rounded(sessions_of_both(path, ReferenceBackend("int8")), rng, most=0.1)  # experts may be others


def test_rows_of_eight_bits_are_those_of_the_reference(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_latents(tmp_path / "m.gguf", "glm", "Q8_0")
    check_rounded(sessions_of_both(path, ReferenceBackend("int8"), "q8_0"), rng)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LATENT_KINDS)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_bits_depend_on_nothing_but_the_text(
    kind: LatentKind, cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    opener = Opener(write_tiny_latents(tmp_path / "m.gguf", kind, "Q8_0"), cache_type)
    tokens = rng.integers(0, 291, 150).astype(np.int32)
    assert [what for what, equal in comparisons(opener, available_isas(), tokens) if not equal] == []


@pytest.mark.parametrize("n_heads, tensor_type", [(1, "F32"), (13, "F16"), (16, "Q4_K")])
def test_the_bits_do_not_depend_on_how_heads_are_cut_into_tasks(
    n_heads: int, tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    opener = Opener(write_tiny_latents(tmp_path / "m.gguf", "v3", tensor_type, n_heads=n_heads))
    tokens = rng.integers(0, 291, 100).astype(np.int32)
    differing = [what for what, equal in comparisons(opener, available_isas(), tokens, sizes=(1, 3, 16)) if not equal]
    assert differing == []


@pytest.mark.parametrize("seed", [1, 2])
def test_texts_in_one_pass_do_not_mix(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    opener = Opener(write_tiny_latents(tmp_path / "m.gguf", "glm", "Q8_0"))
    model, alone = opener.model(n_threads=2, parallel=4, cache_ram="1MiB"), opener()
    sessions, texts = [model.session() for _ in range(4)], [some_tokens(rng, 20 + 40 * i) for i in range(4)]
    for session, text in zip(sessions, texts, strict=True):
        read(session, text)
    for _ in range(3):
        batch, kept = [], []
        for session in sessions:
            is_tree, n = rng.random() < 0.5, int(rng.integers(1, 12))
            batch.append(Rows(session, some_tokens(rng, len(TREE) if is_tree else n), TREE if is_tree else None, "all"))
            kept.append(branch_to(int(rng.choice(LEAVES)), TREE) if is_tree else list(range(n)))
        for text, rows, branch, output in zip(texts, batch, kept, model.forward(batch), strict=True):
            tokens = [int(np.asarray(rows.tokens)[row]) for row in branch]
            alone.truncate(0)
            assert same_bits(output.logits[branch], read(alone, [*text, *tokens])[len(text) :])
            rows.session.commit(branch)
            text += tokens


def test_a_text_that_is_cut_and_begun_again(tmp_path: Path, rng: np.random.Generator) -> None:
    opener = Opener(write_tiny_latents(tmp_path / "m.gguf", "v3", "Q8_0"))
    session, tokens = opener(n_threads=2), some_tokens(rng, 300)
    expected = read(session, tokens)
    for n in (299, 200, 128, 127, 1, 0):
        assert session.truncate(n) == n
        assert same_bits(read(session, tokens[n:]), expected[n:])
    other = [*tokens[:140], *some_tokens(rng, 50)]
    assert session.reuse_prefix(other) == 140
    found = read(session, other[140:])
    session.truncate(0)
    assert same_bits(found, read(session, other)[140:])


def test_experts_in_a_small_cache(tmp_path: Path, rng: np.random.Generator) -> None:
    opener = Opener(write_tiny_latents(tmp_path / "m.gguf", "v3", "Q8_0"))
    sizes, tokens = NativeBackend().expert_sizes(opener.file, opener.spec), some_tokens(rng, 60)
    cached = opener.model(expert_cache=max(sizes.total // 4, sizes.least))
    assert same_bits(read(opener(), tokens), read(cached.session(), tokens))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_type, of_row", [("f16", 2 * 96), ("q8_0", 96 + 3 * 4)])
def test_one_row_a_token_is_planned_and_held(cache_type: CacheType, of_row: int, tmp_path: Path) -> None:
    opener = Opener(write_tiny_latents(tmp_path / "m.gguf", "v3", "Q8_0"), cache_type)
    block = opener.spec.layers[0].mixer
    assert isinstance(block, LatentAttention) and block.state_bytes(1, cache_type) == of_row
    sizes = cache_sizes(opener.spec, LoadSettings(N_CTX, n_batch=N_BATCH, cache_type=cache_type))
    assert sizes.n_bytes == 3 * N_CTX * of_row
    backend = NativeBackend(tuned=False)
    plan = backend.plan(opener.file, opener.spec, LoadSettings(N_CTX, n_batch=N_BATCH, cache_type=cache_type))
    session = backend.load(opener.file, opener.spec, plan, Device(1)).session()
    read(session, [1] * N_CTX)
    assert session.memory() == plan.use and plan.use.kv_cache == sizes.n_bytes


def test_what_the_engine_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="k6v4 KV cache needs keys and values apart"):
        Opener(write_tiny_latents(tmp_path / "m.gguf", "v3", "Q8_0"), "k6v4").model()


def test_rows_that_no_kernel_has_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.backends.native.config._LANES", 64)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mixer has latents of 48 numbers"):
        Opener(write_tiny_latents(tmp_path / "m.gguf")).model()


# ---- files of before April 2025 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_type", ["F32", "F16", "BF16"])
def test_one_matrix_of_all_heads_gives_the_bits_of_two(tensor_type: str, tmp_path: Path) -> None:
    tokens, found = some_tokens(np.random.default_rng(7), 70), []
    for is_old in (False, True):
        path = write_tiny_latents(tmp_path / f"{is_old}.gguf", "lite", tensor_type, is_old=is_old)
        found.append(read(Opener(path)(), tokens))
    assert same_bits(*found)


@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q4_K", "Q6_K"])
def test_matrices_of_heads_are_made_of_a_quantised_one(
    tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, tokens = write_tiny_latents(tmp_path / "m.gguf", "v3", tensor_type, is_old=True), rng.integers(0, 291, 100)
    check_rounded(sessions_of_both(path, ReferenceBackend("int8")), rng, most=0.1)  # experts may be others
    opener = Opener(path)
    assert [what for what, equal in comparisons(opener, available_isas(), tokens) if not equal] == []
    file, block = opener.file, opener.spec.layers[1].mixer
    assert isinstance(block, LatentAttention)
    whole = file.tensors["blk.1.attn_kv_b.weight"]
    both = dequantize(whole.type, file.data(whole.name), whole.shape).reshape(block.n_heads, -1, block.n_latent)
    keys = file.data("blk.1.attn_k_b.weight").view(np.float16).reshape(block.n_heads, block.n_latent, -1)
    assert np.array_equal(keys, both[:, : block.n_plain].transpose(0, 2, 1).astype(np.float16))
    values = file.tensors["blk.1.attn_v_b.weight"]
    assert np.array_equal(dequantize(values.type, file.data(values.name), values.shape), both[:, block.n_plain :])


def test_parts_of_made_matrices_are_those_of_the_whole(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_latents(tmp_path / "m.gguf", "lite", "Q8_0", is_old=True)) as file:
        key, spec = record_key(file), read_spec(file)
        for name in ("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"):
            whole = file.data(name)
            step = len(whole) // 7
            pieces = [file.data(name, at, min(at + step, len(whole))) for at in range(0, len(whole), step)]
            assert len(pieces) > 6 and np.array_equal(np.concatenate(pieces), whole)
        assert read_spec(file) == spec and record_key(file) == key  # of what the file itself has
        assert {each.name for each in GgufSource(file).tensors} >= {"blk.0.attn_kv_b.weight"}
        assert not any(
            each.name.endswith(("k_b.weight", "v_b.weight")) and "kv_b" not in each.name
            for each in GgufSource(file).tensors
        )


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"attention.head_count_kv": 1}, "head_count_kv must be 4, one for each head"),
        ({"attention.value_length": 48}, r"attn_kv_b.weight must have shape \(320, 64\): found \(256, 64\)"),
    ],
)
def test_one_matrix_of_another_size_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    keys = {f"deepseek2.{key}": value for key, value in metadata.items()}
    path = write_tiny_latents(tmp_path / "m.gguf", "lite", "Q8_0", is_old=True, metadata=keys)
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match=message):
        read_spec(file)
