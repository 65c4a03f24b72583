"""Gemma 4 on the native engine: the bits depend on nothing but the text, and its table stays in the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import LEAVES, TREE, branch_to, comparisons, same_bits
from rounded import check_rounded
from tiny_gemma4 import GEMMA4_VARIANTS, Gemma4Variant, write_tiny_gemma4

from edgeinfer.backends.base import Rows, run_sequence
from edgeinfer.backends.native import NativeBackend, NativeModel, NativeSession, available_isas
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_CTX, N_BATCH = 512, 64


class Opener:
    """Sessions of one model file."""

    def __init__(self, path: Path, cache_type: CacheType = "f16", **of_backend: Any) -> None:
        self.file = ModelFile.open(path)
        self.spec = read_spec(self.file)
        self.cache_type = cache_type
        self.backend = NativeBackend(tuned=False, **of_backend)

    def model(self, n_threads: int = 1, isa: str | None = None, n_batch: int = N_BATCH, **settings: Any) -> NativeModel:
        settings |= {"n_threads": n_threads, "cache_type": self.cache_type}
        plan = self.backend.plan(self.file, self.spec, LoadSettings(N_CTX, n_batch=n_batch, **settings))
        return self.backend.load(self.file, self.spec, plan, Device(n_threads, isa))

    def __call__(self, n_threads: int = 1, isa: str | None = None, n_batch: int = N_BATCH) -> NativeSession:
        return self.model(n_threads, isa, n_batch).session()


@pytest.fixture(scope="module", params=GEMMA4_VARIANTS)
def opener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opener:
    return Opener(write_tiny_gemma4(tmp_path_factory.mktemp("gemma4") / "m.gguf", request.param, "Q8_0"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("small") / "m.gguf", "small", "Q8_0")


def some_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 291, n)]


def read(session: NativeSession, tokens: list[int]) -> np.ndarray:
    """All logits of tokens, which are committed."""
    return run_sequence(session, tokens, logits="all").logits.copy()


# ---- against the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", GEMMA4_VARIANTS)
def test_logits_are_those_of_the_reference(variant: Gemma4Variant, tmp_path: Path, rng: np.random.Generator) -> None:
    path, tokens = write_tiny_gemma4(tmp_path / "m.gguf", variant), rng.integers(0, 291, 60)
    found = []
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        for backend in (NativeBackend(tuned=False), ReferenceBackend()):
            session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64)), Device(1)).session()
            found.append(session.forward(tokens, logits="all", hidden=[0]))
    assert np.abs(found[0].hidden - found[1].hidden).max() < 1e-2  # keys and values, rounded to halves, may fall on
    assert np.abs(found[0].logits - found[1].logits).max() < 1e-2  # other ones; measured: 4e-3


@pytest.mark.parametrize("tensor_type", ["Q4_K", "Q6_K", "F16"])
def test_quantised_layers_are_those_of_the_reference(
    tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with ModelFile.open(write_tiny_gemma4(tmp_path / "m.gguf", "small", tensor_type)) as file:
        spec, sessions = read_spec(file), []
        for backend in (NativeBackend(tuned=False), ReferenceBackend("int8")):
            plan = backend.plan(file, spec, LoadSettings(64))
            sessions.append(backend.load(file, spec, plan, Device(1)).session())
    check_rounded(sessions, rng)


# ---- the same bits -------------------------------------------------------------------------------------------------


def test_the_bits_depend_on_nothing_but_the_text(opener: Opener, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 291, 150).astype(np.int32)
    differing = [what for what, equal in comparisons(opener, available_isas(), tokens) if not equal]
    assert differing == []


@pytest.mark.parametrize("cache_type", ["q8_0", "k6v4"])
def test_other_types_of_the_kv_cache(small: Path, cache_type: CacheType, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 291, 100).astype(np.int32)
    other = Opener(small, cache_type)
    assert [what for what, equal in comparisons(other, (), tokens, sizes=(1, 5)) if not equal] == []
    assert not same_bits(read(other(), tokens.tolist()), read(Opener(small)(), tokens.tolist()))


def test_texts_in_one_pass_do_not_mix(opener: Opener, rng: np.random.Generator) -> None:
    model = opener.model(n_threads=2, parallel=4, cache_ram="1MiB")
    sessions = [model.session() for _ in range(4)]
    texts: list[list[int]] = [[] for _ in sessions]
    alone = model.session(N_CTX)  # which has memory of its own
    for round_ in range(5):
        batch, kept = [], []
        for number, session in enumerate(sessions):
            is_tree = (number + round_) % 2 == 1
            n = len(TREE) if is_tree else int(rng.integers(1, 12))
            batch.append(Rows(session, some_tokens(rng, n), TREE if is_tree else None, "all"))
            kept.append(branch_to(int(rng.choice(LEAVES)), TREE) if is_tree else list(range(n)))
        outputs = model.forward(batch)
        for session, text, rows, branch, output in zip(sessions, texts, batch, kept, outputs, strict=True):
            tokens = [int(np.asarray(rows.tokens)[row]) for row in branch]
            alone.truncate(0)
            assert same_bits(output.logits[branch], read(alone, text + tokens)[len(text) :])
            session.commit(branch)
            text += tokens


def test_a_small_cache_of_experts_changes_nothing(tmp_path: Path) -> None:
    opener = Opener(write_tiny_gemma4(tmp_path / "m.gguf", "experts", "Q8_0"))
    sizes = NativeBackend().expert_sizes(opener.file, opener.spec)
    resident, cached = opener.model(), opener.model(expert_cache=max(sizes.total // 4, sizes.least))
    tokens = some_tokens(np.random.default_rng(4), 60)
    assert same_bits(read(resident.session(), tokens), read(cached.session(), tokens))


# ---- memory --------------------------------------------------------------------------------------------------------


def test_what_is_planned_is_what_is_held(opener: Opener, rng: np.random.Generator) -> None:
    model = opener.model()
    session = model.session()
    read(session, some_tokens(rng, 400))
    planned = opener.backend.plan(opener.file, opener.spec, LoadSettings(N_CTX, n_batch=N_BATCH)).use
    held = session.memory()
    assert (held.weights, held.activations, held.experts) == (planned.weights, planned.activations, planned.experts)
    assert 0 < held.kv_cache <= planned.kv_cache


def test_layers_that_read_the_keys_of_others_have_no_cache(tmp_path: Path) -> None:
    plans = []
    for n_shared in (0, 3):
        opener = Opener(write_tiny_gemma4(tmp_path / f"{n_shared}.gguf", "small", n_shared=n_shared))
        plans.append(opener.backend.plan(opener.file, opener.spec, LoadSettings(N_CTX)).use.kv_cache)
    assert plans[1] * 2 == plans[0]


def test_the_table_of_the_layers_is_read_row_by_row(small: Path, rng: np.random.Generator) -> None:
    """It is not in memory, unless nothing may be read after loading."""
    tokens, table = some_tokens(rng, 30), ModelFile.open(small).tensors["per_layer_token_embd.weight"]
    by_row, resident = Opener(small), Opener(small, resident=True)
    plans = [each.backend.plan(each.file, each.spec, LoadSettings(N_CTX)).use.weights for each in (by_row, resident)]
    assert plans[1] == plans[0] + table.n_bytes
    models = [each.model() for each in (by_row, resident)]
    assert [model.memory().weights for model in models] == plans
    assert same_bits(*(read(model.session(), tokens) for model in models))


def test_packed_weights_are_without_the_table(tmp_path: Path, rng: np.random.Generator) -> None:
    path, tokens = write_tiny_gemma4(tmp_path / "m.gguf", "small", "Q8_0"), some_tokens(rng, 30)
    opener = Opener(path)
    expected = read(opener(), tokens)
    n_bytes = opener.backend.pack(opener.file, opener.spec, packed_path(path))
    model = Opener(path).model()
    assert n_bytes < path.stat().st_size and model.memory().mapped > 0
    assert same_bits(read(model.session(), tokens), expected)


def test_a_row_that_is_gone_is_an_error_of_the_pass(tmp_path: Path) -> None:
    path = write_tiny_gemma4(tmp_path / "m.gguf", "small")
    with ModelFile.open(path) as file:
        table = file.tensors["per_layer_token_embd.weight"]
    opener = Opener(path)
    session = opener()
    os.truncate(path, table.offset + table.n_bytes // 2)
    with pytest.raises(ModelFileError, match=r"of token 290, .* was cut off since"):
        session.forward([290])


def test_inputs_that_no_kernel_has_are_refused(tmp_path: Path) -> None:
    opener = Opener(write_tiny_gemma4(tmp_path / "m.gguf", "small", n_inputs=24))
    with pytest.raises(UnsupportedModel, match=r"layer_inputs has inputs of 24 numbers, .* a multiple of 16"):
        opener.backend.plan(opener.file, opener.spec, LoadSettings(64))
