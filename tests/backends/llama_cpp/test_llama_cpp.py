"""llama.cpp behind the session's protocol: right to its own rounding, hard to misuse, and quiet.

Its logits move with the size of a batch and the slots of the cache. Measured on these models, as the largest distance
in units of the spread of the logits: in F32 2e-5 (state) to 1.3e-2 (gpt2; attention rounds to f16), with quantised
weights 7.3e-2 (activations are rounded to 8 bits). With one token too many in sight it is 0.25 at least.
"""

import _thread
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exactness import LEAVES, TREE, branch_to, decode_one_by_one, prefill, same_bits
from interrupts import interrupted_every
from numpy.typing import ArrayLike, NDArray
from other_models import write_gpt2, write_lfm2, write_mamba
from refusals import check_refuses
from staging import Stage
from tiny_models import ARCHITECTURES, UNKNOWN_TO_LLAMA_CPP, Architecture, write_tiny_model
from waiting import wait_until

from edgeinfer.backends.base import Rows
from edgeinfer.backends.llama_cpp import MAX_N_CTX, MAX_OUTPUTS, LlamaCppBackend, LlamaCppModel, LlamaCppSession
from edgeinfer.backends.llama_cpp import library as library_module
from edgeinfer.backends.llama_cpp.worker import Worker
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import (
    BackendUnavailable,
    BudgetExceeded,
    ContextOverflow,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec, supported_architectures
from edgeinfer.models.gguf import ModelFile

Open = Callable[..., LlamaCppSession]
TOLERANCE = {"F32": 2e-2, "Q4_K": 0.15}


def write_gemma3(path: Path) -> Path:
    """Windows of 20 positions in five layers of six."""
    return write_tiny_model(path, "gemma3", "F32", n_vocab=300)


def write_llama(path: Path) -> Path:
    return write_tiny_model(path, "llama", "F32")


KINDS = {"cells": write_llama, "window": write_gemma3, "gpt2": write_gpt2, "state": write_mamba, "hybrid": write_lfm2}


# ---- sessions --------------------------------------------------------------------------------------------------


def loader(path: Path, n_ctx: int = 256) -> Callable[..., LlamaCppModel]:
    """load(n_threads=, n_batch=) for a model file; each model is in a process of its own."""
    file = ModelFile.open(path)

    def load(n_threads: int = 1, n_batch: int = 128) -> LlamaCppModel:
        backend = LlamaCppBackend()
        plan = backend.plan(file, None, LoadSettings(n_ctx, n_batch=n_batch, n_threads=n_threads))
        return backend.load(file, None, plan, Device(n_threads))

    return load


def opener(path: Path, n_ctx: int = 256) -> Open:
    """open_session(n_threads=, n_batch=) for a model file, each in a process of its own."""
    load = loader(path, n_ctx)
    return lambda **options: load(**options).session()


class Kept:
    """open_session(n_batch=) for a model file, in a process that an earlier session has left, if there is one."""

    def __init__(self, path: Path) -> None:
        self._load = loader(path)
        self._models: list[LlamaCppModel] = []

    def __call__(self, n_batch: int = 128) -> LlamaCppSession:
        for model in self._models:
            if model.n_batch == n_batch:
                with suppress(InvalidArgument):  # its session is still open
                    return model.session()
        self._models.append(self._load(n_batch=n_batch))
        return self._models[-1].session()

    def close(self) -> None:
        for model in self._models:
            model.close()


@pytest.fixture(scope="module", params=KINDS)
def any_kind(request: pytest.FixtureRequest, llama_cpp: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param) / "m.gguf")


@pytest.fixture(scope="module")
def of_any_kind(any_kind: Path) -> Iterator[Open]:
    """Starting a process takes longer than most tests."""
    kept = Kept(any_kind)
    yield kept
    kept.close()


@pytest.fixture
def anew_of_any_kind(any_kind: Path) -> Open:
    return opener(any_kind)


@pytest.fixture(scope="module")
def of_cells(llama_cpp: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(write_llama(tmp_path_factory.mktemp("cells") / "m.gguf"))


@pytest.fixture(scope="module")
def kept_of_cells(llama_cpp: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    kept = Kept(write_llama(tmp_path_factory.mktemp("cells") / "m.gguf"))
    yield kept
    kept.close()


def some_tokens(n: int, rng: np.random.Generator) -> NDArray[np.int32]:
    return rng.integers(0, 200, n).astype(np.int32)  # all models here have 200 at least


def assert_close(a: NDArray[np.float32], b: NDArray[np.float32], tensor_type: str = "F32") -> None:
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= TOLERANCE[tensor_type] * b.std()


@pytest.fixture
def stage(llama_cpp: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"), monkeypatch)


# ---- right -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_logits_equal_the_reference(
    llama_cpp: ModuleType, tmp_path: Path, rng: np.random.Generator, architecture: Any
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, "F32")
    tokens = some_tokens(100, rng)
    with ModelFile.open(path) as file:
        spec, oracle = read_spec(file), ReferenceBackend()
        model = oracle.load(file, spec, oracle.plan(file, spec, LoadSettings(256)), Device(1))
        expected = model.session().forward(tokens, logits="all").logits
    session = opener(path)()
    assert_close(session.forward(tokens, logits="all").logits, expected)
    assert_close(session.forward(tokens[:13], TREE, logits=[3]).logits, session.forward(tokens[:4]).logits)


def test_a_chain_gives_the_logits_of_its_tokens_one_by_one(of_any_kind: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(100, rng)
    expected = decode_one_by_one(of_any_kind(), tokens)
    session = of_any_kind(n_batch=32)
    assert_close(session.forward(tokens, logits="all").logits, expected)
    prefill(session, tokens[:60], 7)
    assert session.n_past == 60
    assert_close(session.forward(tokens[60:], logits="all").logits, expected[60:])


@pytest.mark.parametrize("n_past", [0, 50])
def test_a_tree_gives_the_logits_of_each_branch_alone(of_any_kind: Open, n_past: int, rng: np.random.Generator) -> None:
    session, nodes = of_any_kind(), some_tokens(13, rng)
    if n_past:
        prefill(session, some_tokens(n_past, rng), n_past)
    of_tree = session.forward(nodes, TREE, logits="all").logits
    for leaf in LEAVES:
        branch = branch_to(leaf, TREE)
        assert_close(of_tree[branch], session.forward(nodes[branch], logits="all").logits)
    assert_close(session.forward(nodes, TREE, logits=[7, 2, 7]).logits, of_tree[[7, 2, 7]])


@pytest.mark.parametrize("path", [[], [0], [0, 1], [0, 1, 2, 3], [0, 1, 4, 5, 11, 12], [8, 9, 10]])
def test_a_committed_branch_is_what_the_text_goes_on_from(
    of_any_kind: Open, path: list[int], rng: np.random.Generator
) -> None:
    prompt, nodes, rest = some_tokens(50, rng), some_tokens(13, rng), some_tokens(4, rng)
    session, fresh = of_any_kind(), of_any_kind()
    prefill(session, prompt, 50)
    session.forward(nodes, TREE)
    session.commit(path)
    prefill(fresh, np.concatenate([prompt, nodes[path]]), 100)
    assert session.n_past == fresh.n_past == 50 + len(path)
    assert_close(decode_one_by_one(session, rest), decode_one_by_one(fresh, rest))
    assert_close(session.forward(nodes, TREE, logits="all").logits, fresh.forward(nodes, TREE, logits="all").logits)


def test_quantised_trees_and_branches_are_as_close_as_their_rounding(
    llama_cpp: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    session = opener(write_tiny_model(tmp_path / "m.gguf", "qwen2", "Q4_K"))()
    prefill(session, some_tokens(50, rng), 50)
    nodes, rest = some_tokens(13, rng), some_tokens(4, rng)
    of_tree = session.forward(nodes, TREE, logits="all").logits
    for leaf in LEAVES:
        branch = branch_to(leaf, TREE)
        session.truncate(50)
        assert_close(of_tree[branch], decode_one_by_one(session, nodes[branch]), "Q4_K")
        follow = decode_one_by_one(session, rest)
        session.truncate(50)
        session.forward(nodes, TREE)
        session.commit(branch)
        assert_close(decode_one_by_one(session, rest), follow, "Q4_K")


def test_many_branches_are_run_too(of_any_kind: Open, rng: np.random.Generator) -> None:
    session, prompt, nodes = of_any_kind(), some_tokens(20, rng), some_tokens(MAX_OUTPUTS + 6, rng)
    prefill(session, prompt, 20)
    parents = np.full(len(nodes), -1, dtype=np.int32)  # a fan, and a second layer after its first three
    parents[-3:] = [0, 1, 2]
    of_fan = session.forward(nodes, parents, logits="all").logits
    for path in ([0, len(nodes) - 3], [2, len(nodes) - 1], [40]):
        assert_close(of_fan[path], session.forward(nodes[path], logits="all").logits)
    session.forward(nodes, parents)
    session.commit([1, len(nodes) - 2])
    fresh = of_any_kind()
    prefill(fresh, np.concatenate([prompt, nodes[[1, -2]]]), 100)
    assert_close(session.forward(prompt, logits="all").logits, fresh.forward(prompt, logits="all").logits)


def test_a_part_of_a_chain_can_be_committed(of_any_kind: Open, rng: np.random.Generator) -> None:
    tokens, rest = some_tokens(60, rng), some_tokens(5, rng)
    session, fresh = of_any_kind(n_batch=16), of_any_kind()
    prefill(session, tokens[:20], 20)
    session.forward(tokens[20:])
    session.commit(range(23))
    prefill(fresh, tokens[:43], 100)
    assert session.n_past == 43
    assert_close(session.forward(rest, logits="all").logits, fresh.forward(rest, logits="all").logits)


def test_truncated_text_can_be_read_anew(of_any_kind: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(120, rng)
    expected = of_any_kind().forward(tokens, logits="all").logits
    session = of_any_kind()
    prefill(session, np.concatenate([tokens[:40], some_tokens(50, rng)]), 1000)
    session.truncate(40)
    assert session.n_past == 40
    assert_close(session.forward(tokens[40:], logits="all").logits, expected[40:])
    session.truncate(0)
    assert_close(session.forward(tokens, logits="all").logits, expected)


def test_the_same_calls_give_the_same_bits(anew_of_any_kind: Open, rng: np.random.Generator) -> None:
    prompt, nodes, rest = some_tokens(50, rng), some_tokens(13, rng), some_tokens(4, rng)

    def calls(session: LlamaCppSession) -> NDArray[np.float32]:
        prefill(session, prompt, 16)
        of_tree = session.forward(nodes, TREE, logits="all").logits
        session.commit(branch_to(7, TREE))
        return np.concatenate([of_tree, decode_one_by_one(session, rest)])

    session = anew_of_any_kind()
    first = calls(session)
    assert same_bits(calls(anew_of_any_kind()), first)
    session.truncate(0)
    assert same_bits(calls(session), first)


def test_a_forward_pass_commits_nothing(of_any_kind: Open, rng: np.random.Generator) -> None:
    tokens = some_tokens(40, rng)
    session = of_any_kind()
    expected = session.forward(tokens, logits="all").logits
    session.forward(some_tokens(13, rng), TREE)
    assert session.n_past == 0
    assert_close(session.forward(tokens, logits="all").logits, expected)
    session.commit([])
    assert session.n_past == 0
    assert_close(session.forward(tokens, logits="all").logits, expected)


def test_a_context_filled_with_accepted_branches_is_sound(of_any_kind: Open, rng: np.random.Generator) -> None:
    """Cells are taken, freed and taken again until all 256 are in use."""
    session = of_any_kind()
    text: list[int] = []
    while len(text) < 240:
        nodes = some_tokens(13, rng)
        path = branch_to(LEAVES[len(text) % 4], TREE)
        session.forward(nodes, TREE)
        session.commit(path)
        text += nodes[path].tolist()
    rest = some_tokens(256 - len(text), rng)
    fresh = of_any_kind()
    prefill(fresh, np.array(text, dtype=np.int32), 1000)
    assert_close(session.forward(rest, logits="all").logits, fresh.forward(rest, logits="all").logits)
    for each in (session, fresh):
        each.truncate(30)
    assert_close(session.forward(rest, logits="all").logits, fresh.forward(rest, logits="all").logits)


def test_logits_come_for_the_rows_that_were_asked_for(of_cells: Open, rng: np.random.Generator) -> None:
    session, tokens = of_cells(n_batch=50), some_tokens(150, rng)
    every = session.forward(tokens, logits="all").logits
    assert every.shape == (150, 291) and every.dtype == np.float32
    assert_close(session.forward(tokens).logits, every[-1:])
    assert_close(session.forward(tokens, logits=[149, 0, 77, 0]).logits, every[[149, 0, 77, 0]])
    assert session.forward(tokens, logits=[]).logits.shape == (0, 291)


def test_what_is_kept_is_not_run_again(anew_of_any_kind: Open, rng: np.random.Generator, stage: Stage) -> None:
    session = anew_of_any_kind()
    assert stage.passes()[0] == 1  # the warm-up
    prefill(session, some_tokens(60, rng), 20)
    session.forward(some_tokens(5, rng))
    session.forward(some_tokens(3, rng))
    session.commit([0, 1, 2])
    session.forward([1])
    assert stage.passes() == [20, 20, 20, 5, 3, 1]


def test_a_branch_that_is_kept_is_not_run_again(of_cells: Open, rng: np.random.Generator, stage: Stage) -> None:
    session = of_cells()
    stage.passes()
    for leaf in LEAVES:
        session.forward(some_tokens(13, rng), TREE)
        session.commit(branch_to(leaf, TREE)[:-1])
    session.truncate(8)
    session.forward([1, 2])
    assert stage.passes() == [13, 13, 13, 13, 2]


def test_a_cache_that_gave_cells_away_is_filled_anew(of_cells: Open, rng: np.random.Generator, stage: Stage) -> None:
    tokens = some_tokens(60, rng)
    expected = of_cells().forward(tokens).logits
    stage.play(
        """
remove = llama_cpp.llama_memory_seq_rm

def remove_more(memory, sequence, first, last):
    remove(memory, sequence, 0, 10)  # as a sliding window does
    return remove(memory, sequence, first, last)

llama_cpp.llama_memory_seq_rm = remove_more
"""
    )
    session = of_cells()
    prefill(session, tokens[:50], 50)
    session.truncate(40)
    stage.passes()
    assert_close(session.forward(tokens[40:]).logits, expected)
    assert stage.passes() == [40, 20]


# ---- sizes and memory --------------------------------------------------------------------------------------------


def test_an_architecture_of_llama_cpp_alone_has_its_sizes_from_there(llama_cpp: ModuleType, tmp_path: Path) -> None:
    assert "gpt2" not in supported_architectures()
    with ModelFile.open(write_gpt2(tmp_path / "m.gguf")) as file:
        spec = LlamaCppBackend().read_spec(file)
    assert (spec.architecture, spec.n_vocab, spec.n_ctx_train, spec.n_layers) == ("gpt2", 291, 256, 2)
    assert spec.n_embd == 64


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in UNKNOWN_TO_LLAMA_CPP])
def test_the_sizes_are_those_that_edgeinfer_reads(
    llama_cpp: ModuleType, tmp_path: Path, architecture: Architecture
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, "F32", n_vocab=300)
    with ModelFile.open(path) as file:
        sizes, spec = LlamaCppBackend().read_spec(file), read_spec(file)
    assert vars(sizes) == {name: getattr(spec, name) for name in vars(sizes)}
    assert opener(path)().spec == sizes


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_covers_what_llama_cpp_says_it_holds(
    llama_cpp: ModuleType, tmp_path: Path, tensor_type: str, tied: bool
) -> None:
    backend = LlamaCppBackend()
    path = write_tiny_model(tmp_path / "m.gguf", "llama", tensor_type, tied=tied, n_vocab=2000)
    with ModelFile.open(path) as file:
        plan = backend.plan(file, None, LoadSettings(1000, n_batch=70, n_threads=1))
        shares: list[float] = []
        session = backend.load(file, None, plan, Device(1), shares.append).session()
    use = session.memory()
    assert (plan.n_ctx, plan.n_batch, session.n_ctx) == (1000, 70, 1000)
    assert (use.kv_cache, use.activations) == (plan.use.kv_cache, plan.use.activations)
    if tied:  # there may be two of the embedding, rounded to 0.01 MiB as the log is
        assert use.weights <= plan.use.weights + 2**14
    else:
        assert use.weights == plan.use.weights
    head_dim = session.spec.n_embd // 4
    assert abs(use.kv_cache - 2 * 2 * 1024 * 2 * 2 * head_dim) < 2**14  # llama.cpp rounds n_ctx up to 256
    assert use.activations > MAX_OUTPUTS * 2000 * 4
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_a_plan_loads_no_weights(stage: Stage, tmp_path: Path) -> None:
    stage.play(
        """
load = llama_cpp.llama_model_load_from_file

def noted_load(path, params):
    with open(_folder / "loads", "a") as file:
        file.write(f"{params.no_alloc}\\n")
    return load(path, params)

llama_cpp.llama_model_load_from_file = noted_load
"""
    )
    loads = stage.folder / "loads"
    backend = LlamaCppBackend()
    with ModelFile.open(write_llama(tmp_path / "m.gguf")) as file:
        backend.read_spec(file)
        plan = backend.plan(file, None, LoadSettings(64))
        backend.plan(file, None, LoadSettings(128))
        assert loads.read_text().split() == ["True"]
        backend.load(file, None, plan, Device(1))
    assert loads.read_text().split() == ["True", "False"]


def test_logits_of_a_long_batch_are_not_all_held_at_once(llama_cpp: ModuleType, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32", n_embd=32, n_ff=32, n_vocab=20000)
    with ModelFile.open(path) as file:
        plan = LlamaCppBackend().plan(file, None, LoadSettings(512, n_batch=512))
    assert plan.use.activations < 512 * 20000 * 4 / 2


def test_a_context_that_would_end_the_process_is_refused(llama_cpp: ModuleType, tmp_path: Path) -> None:
    backend = LlamaCppBackend()
    for write, most in ((write_gpt2, 256), (write_llama, MAX_N_CTX)):
        with ModelFile.open(write(tmp_path / "m.gguf")) as file:
            plan = backend.plan(file, None, LoadSettings(256, n_batch=64))
            session = backend.load(file, None, plan, Device(1)).session()
            assert session.forward(np.zeros(256, dtype=np.int32)).logits.shape == (1, session.spec.n_vocab)
            with pytest.raises(InvalidArgument, match=f"at most {most} in llama.cpp.*found {most + 1}"):
                backend.load(file, None, replace(plan, settings=LoadSettings(most + 1)), Device(1))


def test_what_a_large_context_takes_is_what_smaller_ones_lead_to(llama_cpp: ModuleType, tmp_path: Path) -> None:
    backend = LlamaCppBackend()
    for write in (write_llama, write_gemma3):
        with ModelFile.open(write(tmp_path / "m.gguf")) as file:
            near, far = (
                backend.plan(file, None, LoadSettings(n_ctx, n_batch=64)).use for n_ctx in (1 << 19, (1 << 20) + 256)
            )
            assert far.kv_cache == pytest.approx(near.kv_cache * 2, rel=0.01)
            assert near.activations < far.activations < 2.1 * near.activations and far.weights == near.weights
            with pytest.raises(InvalidArgument, match="must stay small"):
                plan = backend.plan(file, None, LoadSettings(256, n_batch=64))
                backend.load(file, None, replace(plan, settings=LoadSettings(MAX_N_CTX + 1)), Device(1))


def test_too_little_memory_is_said_to_be_that(llama_cpp: ModuleType, tmp_path: Path) -> None:
    file, backend = ModelFile.open(write_llama(tmp_path / "m.gguf")), LlamaCppBackend()
    plan = backend.plan(file, None, LoadSettings(1 << 21))
    assert backend._process is not None
    pid = backend._process.pid
    held = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (held + (600 << 20),) * 2)
    with pytest.raises(BudgetExceeded, match="m.gguf: llama.cpp found too little memory: .*failed to allocate"):
        backend.load(file, None, plan, Device(1))


# ---- misuse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": []},
        {"tokens": [[1]]},
        {"tokens": [1.0]},
        {"tokens": [0, 291]},
        {"tokens": [-1]},
        {"tokens": [1, 2], "parents": [-1]},
        {"tokens": [1, 2], "parents": [-1, 1]},
        {"tokens": [1, 2], "logits": [2]},
        {"tokens": [1, 2], "logits": "first"},
        {"tokens": [1, 2], "hidden": [2]},
        {"tokens": [1] * 257},
    ],
)
def test_wrong_arguments_are_refused_as_elsewhere_and_change_nothing(
    kept_of_cells: Open, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with ModelFile.open(write_llama(tmp_path / "m.gguf")) as file:
        spec, oracle = read_spec(file), ReferenceBackend()
        reference = oracle.load(file, spec, oracle.plan(file, spec, LoadSettings(256)), Device(1)).session()
    session = kept_of_cells()
    session.forward([1, 2, 3])
    errors = []
    for either in (reference, session):
        with pytest.raises((ShapeError, ContextOverflow)) as caught:
            either.forward(**arguments)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    session.commit(range(3))  # the pass before is still there
    assert session.n_past == 3


@pytest.mark.parametrize("path", [[1], [0, 2], [0, 1, 3, 2], [0, 0], [13], [-1], [[0]]])
def test_rows_that_are_no_path_are_refused(kept_of_cells: Open, path: ArrayLike) -> None:
    session = kept_of_cells()
    session.forward(np.arange(13), TREE)
    with pytest.raises(ShapeError, match="path|follows"):
        session.commit(path)
    assert session.n_past == 0
    session.commit([0, 1])
    with pytest.raises(ShapeError, match="path"):
        session.commit([0])  # nothing is left to commit
    with pytest.raises(ShapeError, match=r"0\.\.2: found 3"):
        session.truncate(3)
    assert session.n_past == 2
    session.forward([1])
    session.truncate(2)
    with pytest.raises(ShapeError, match="path"):
        session.commit([0])  # truncating drops what is not committed


def test_a_tree_beyond_the_batch_and_hidden_states_are_refused(of_cells: Open) -> None:
    session = of_cells(n_batch=16)
    with pytest.raises(ShapeError, match="a tree must fit into one batch of 16 tokens: found 17"):
        session.forward([1] * 17, [-1] * 17)
    with pytest.raises(InvalidArgument, match="no hidden states; use the native or reference backend"):
        session.forward([1], hidden=True)
    assert session.forward([1], hidden=False).hidden is None


def test_the_context_can_be_filled_but_not_overfilled(of_cells: Open, rng: np.random.Generator) -> None:
    session = of_cells()
    prefill(session, some_tokens(250, rng), 1000)
    with pytest.raises(ContextOverflow) as overflow:
        session.forward([1] * 7)
    assert (overflow.value.n_tokens, overflow.value.n_ctx) == (257, 256)
    session.forward([1] * 6, [-1, 0, 0, 1, -1, 4])
    session.commit([0, 1, 3])
    assert session.forward([1] * 3).logits.shape == (1, 291)


def test_a_model_has_one_session_at_a_time_and_the_next_begins_an_empty_text(of_any_kind: Open) -> None:
    first = of_any_kind()
    model, tokens = first.model, np.arange(20, dtype=np.int32)
    expected = first.forward(tokens).logits
    first.commit(range(20))
    with pytest.raises(InvalidArgument, match="llama.cpp holds one sequence at a time: close the session that is open"):
        model.session()
    first.close()
    with pytest.raises(EdgeInferError, match="this session is closed"):
        first.forward([1])
    for n_ctx, cache_type, message in (
        (257, None, r"must be an integer in 1\.\.256"),
        ("x", None, "n_ctx of a session must be an integer"),
        (64, "q8_0", "was planned with type f16"),
        (64, "q4", "cache_type must be f16, q8_0 or k6v4: found 'q4'"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            model.session(n_ctx, cache_type)
    second = model.session(32)
    assert (second.n_past, second.n_ctx, second.model) == (0, 32, model)
    (out,) = model.forward([Rows(second, tokens)])
    assert np.array_equal(out.logits, expected)
    with pytest.raises(ContextOverflow):
        second.forward(np.arange(33))
    assert model.memory() == replace(second.memory(), kv_cache=0)


def test_a_closed_session_refuses_every_call(of_cells: Open) -> None:
    session = of_cells()
    session.model.close()
    session.model.close()
    session.interrupt()
    check_refuses(session)


# ---- stopping --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(llama_cpp: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """A pass of 4000 tokens takes about a second."""
    path = tmp_path_factory.mktemp("slow") / "m.gguf"
    return opener(write_tiny_model(path, "llama", "Q8_0", n_layers=8, n_ctx_train=4096), n_ctx=4096)


def assert_reads_on(session: LlamaCppSession, prompt: NDArray[np.int32]) -> None:
    """The session has the prompt committed, and nothing else."""
    assert session.n_past == len(prompt)
    rest = np.arange(5, dtype=np.int32)
    continued = session.forward(rest, logits="all").logits
    session.truncate(0)
    prefill(session, prompt, 1000)
    assert_close(continued, session.forward(rest, logits="all").logits, "Q4_K")


@pytest.mark.parametrize("n_tokens, at", [(100, 1), (4000, 3)])  # in the one pass that it takes, and in the third
def test_an_interrupted_pass_stops_there_and_leaves_the_session_as_it_was(
    slow: Open, rng: np.random.Generator, stage: Stage, n_tokens: int, at: int
) -> None:
    session, prompt = slow(), some_tokens(10, rng)
    prefill(session, prompt, 10)
    session.forward([1, 2])
    with stage.meanwhile(at, session.interrupt), pytest.raises(Interrupted):
        session.forward(some_tokens(n_tokens, rng))
    assert len(stage.passes()) == at
    with pytest.raises(ShapeError):
        session.commit([0])  # neither that pass nor the one before it is there
    assert_reads_on(session, prompt)


def test_another_thread_can_stop_a_pass(slow: Open, rng: np.random.Generator) -> None:
    session, prompt = slow(), some_tokens(10, rng)
    prefill(session, prompt, 10)
    with interrupted_every(0.01, session), pytest.raises(Interrupted):
        for _ in range(100):
            session.forward(some_tokens(4000, rng), logits=())
    assert_reads_on(session, prompt)


def test_an_interrupt_without_a_pass_does_nothing(of_cells: Open) -> None:
    session = of_cells()
    session.interrupt()
    assert session.forward([1, 2]).logits.shape == (1, 291)


def test_ctrl_c_comes_out_of_a_pass_and_leaves_the_session_as_it_was(
    slow: Open, rng: np.random.Generator, stage: Stage
) -> None:
    session, prompt = slow(), some_tokens(10, rng)
    prefill(session, prompt, 10)
    worker = session.model._process._worker

    def press_ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: worker.is_stopped)  # the other thread has heard of it

    with stage.meanwhile(3, press_ctrl_c), pytest.raises(KeyboardInterrupt):
        session.forward(some_tokens(4000, rng))
    assert len(stage.passes()) == 3  # of 32
    assert_reads_on(session, prompt)


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_between_handing_over_and_waiting_is_not_lost(
    of_cells: Open, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    session, prompt = of_cells(), some_tokens(50, rng)
    prefill(session, prompt, 50)
    threads = session.model._process._worker._threads
    submit = threads.submit

    def interrupted_submit(*arguments: Any) -> None:
        if when == "after":
            submit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threads, "submit", interrupted_submit)
        with pytest.raises(KeyboardInterrupt):
            session.forward(some_tokens(100, rng))
    assert_reads_on(session, prompt)


def test_what_the_progress_callback_raises_comes_out_of_load(llama_cpp: ModuleType, tmp_path: Path) -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    backend = LlamaCppBackend()
    with ModelFile.open(write_llama(tmp_path / "m.gguf")) as file:
        with pytest.raises(KeyboardInterrupt):
            backend.load(file, None, backend.plan(file, None, LoadSettings(64)), Device(1), stop)


def test_ctrl_c_stops_loading(stage: Stage, tmp_path: Path) -> None:
    stage.play(
        """
import os, signal
make_callback = llama_cpp.llama_progress_callback

def make_slow_callback(is_to_go_on):
    def callback(share, data):
        os.kill(os.getppid(), signal.SIGINT)
        while is_to_go_on(share, data):
            time.sleep(0.01)
        (_folder / "stopped").touch()
        return False
    return make_callback(callback)

llama_cpp.llama_progress_callback = make_slow_callback
"""
    )
    backend = LlamaCppBackend()
    with ModelFile.open(write_llama(tmp_path / "m.gguf")) as file:
        plan = backend.plan(file, None, LoadSettings(64))
        with pytest.raises(KeyboardInterrupt):
            backend.load(file, None, plan, Device(1))
    assert (stage.folder / "stopped").exists()


@pytest.mark.parametrize("is_begun", [True, False])
def test_ctrl_c_out_of_handing_over_ends_what_was_handed_over(is_begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come when the other thread works already, or not yet."""
    begun, ended = threading.Event(), threading.Event()
    with Worker(bytearray(1), lambda: pytest.fail("killed")) as worker:

        def work() -> None:
            begun.set()
            while not worker.is_stopped:
                time.sleep(0.001)
            time.sleep(0.05)
            ended.set()

        submit = worker._threads.submit

        def interrupted(*args: Any) -> None:
            if is_begun:
                submit(*args)
                assert begun.wait(60)
            raise KeyboardInterrupt

        monkeypatch.setattr(worker._threads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.call(work)
        assert ended.is_set() == is_begun


def test_a_signal_that_ends_no_wait_is_seen_nevertheless() -> None:
    """As one that comes between the last look for signals and the start of the wait."""
    with Worker(bytearray(1), lambda: pytest.fail("killed")) as worker:

        def work() -> None:
            time.sleep(0.2)  # by now the main thread waits
            _thread.interrupt_main()  # as SIGINT, but the main thread sleeps on
            with suppress(AssertionError):
                wait_until(lambda: worker.is_stopped)
            stopped.append(worker.is_stopped)

        stopped: list[bool] = []
        with pytest.raises(KeyboardInterrupt):
            worker.call(work)
    assert stopped == [True]


# ---- files and libraries that are not right --------------------------------------------------------------------


def damaged(path: Path, old: bytes, new: bytes) -> ModelFile:
    data = write_tiny_model(path, "llama", "F32").read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    return ModelFile.open(path)


@pytest.mark.parametrize(
    "old, new, words",
    [
        (b"llama", b"lamma", "unknown model architecture: 'lamma'"),
        (b"blk.1.ffn_up", b"blk.1.ffn_xx", "blk.1.ffn_up.weight' not found"),
        (b"gpt-2", b"gpt-0", "unknown pre-tokenizer type: 'gpt-0'"),
    ],
)
def test_a_model_that_llama_cpp_refuses_is_refused_in_its_words(
    llama_cpp: ModuleType, tmp_path: Path, old: bytes, new: bytes, words: str
) -> None:
    backend = LlamaCppBackend()
    file = damaged(tmp_path / "m.gguf", old, new)
    plan = backend.plan(ModelFile.open(write_llama(tmp_path / "sound.gguf")), None, LoadSettings(64))
    calls: list[Callable[[], object]] = [
        lambda: backend.read_spec(file),
        lambda: backend.plan(file, None, LoadSettings(64)),
        lambda: backend.load(file, None, plan, Device(1)),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModel) as caught:
            call()
        assert str(caught.value).startswith(f"{file.path}: llama.cpp cannot load this model: ")
        assert words in str(caught.value)


def test_llama_cpp_is_quiet_and_its_log_can_be_had(
    llama_cpp: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    session = opener(write_llama(tmp_path / "m.gguf"))()
    assert b"GGML_NO_BACKTRACE=1" in Path(f"/proc/{session.model._process.pid}/environ").read_bytes()
    session.forward([1, 2, 3])
    with pytest.raises(UnsupportedModel):
        LlamaCppBackend().read_spec(damaged(tmp_path / "broken.gguf", b"llama", b"lamma"))
    session.model.close()
    assert capfd.readouterr() == ("", "") and caplog.records == []
    with caplog.at_level(logging.DEBUG, "edgeinfer"):
        opener(tmp_path / "m.gguf")()
    assert any("KV buffer size" in record.message for record in caplog.records)


def test_without_the_library_the_module_imports_and_the_backend_names_the_extra() -> None:
    script = """
import sys
sys.modules["llama_cpp"] = None
from edgeinfer.backends.llama_cpp import LlamaCppBackend
from edgeinfer.common.errors import BackendUnavailable
try:
    LlamaCppBackend()
except BackendUnavailable as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "needs llama-cpp-python" in run.stdout and "pip install 'edgeinfer[llama]'" in run.stdout


def test_another_library_is_refused_only_if_its_structures_may_differ(
    llama_cpp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(**vars(llama_cpp))
    other.__version__ = "0.4.0"
    library_module._check_layouts(other)
    other.llama_batch = SimpleNamespace(n_tokens=None, token=None, embd=None, pos=None, n_seq_id=None, seq_id=None)
    with pytest.raises(BackendUnavailable, match=r"needs .* 0\.3\.36; found 0\.4\.0, which lacks llama_batch\.logits"):
        library_module._check_layouts(other)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/elsewhere")
    library_module._check_layouts(llama_cpp)
    monkeypatch.setattr(library_module, "LIBRARY_VERSION", b"0.0.1")
    with pytest.raises(BackendUnavailable, match="LLAMA_CPP_LIB_PATH=/elsewhere has llama.cpp .* needs 0.0.1"):
        library_module._check_layouts(llama_cpp)
