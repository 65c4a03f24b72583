"""Models whose experts are read from disk: the bits of all experts in memory, the planned bytes, and errors."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from exactness import same_bits
from numpy.typing import NDArray
from split_models import split_model
from tiny_experts import ExpertArchitecture, write_tiny_experts
from tiny_models import write_tiny_model
from try_texts import sizes_of
from waiting import wait_until

from edgeinfer.backends.native import NativeBackend, NativeModel
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.common.errors import EdgeInferError, ExpertReadError, Interrupted, InvalidArgument
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, ExpertSizes
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

KINDS = ("one file", "split", "packed")
LENGTHS = (40, *range(1, 17))  # tokens of passes, the first in chunks
N_CTX = sum(LENGTHS)
TOKENS = np.random.default_rng(7).integers(0, 291, N_CTX).astype(np.int32)


def pack(path: Path) -> Path:
    with ModelFile.open(path) as file:
        target = packed_path(file.paths[0])
        NativeBackend(tuned=False).pack(file, read_spec(file), target)
    return target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in one file, in three, and packed. Experts of the second layer are larger."""
    folders = {kind: tmp_path_factory.mktemp("models") for kind in KINDS}
    types = {"blk.1.ffn_down_exps.weight": "Q6_K"}
    paths = {
        kind: write_tiny_experts(folders[kind] / "m.gguf", "qwen3moe", "Q4_K", n_experts=16, n_used=3, types=types)
        for kind in KINDS
    }
    paths["split"] = split_model(paths["split"], folders["split"], 3)[0]
    pack(paths["packed"])
    return paths


@contextmanager
def opened(path: Path, cache: int | None, n_threads: int = 1, n_batch: int = 16) -> Iterator[NativeModel]:
    backend = NativeBackend(tuned=False)
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        plan = backend.plan(file, spec, LoadSettings(N_CTX, n_batch=n_batch, n_threads=n_threads, expert_cache=cache))
        model = backend.load(file, spec, plan, Device(n_threads))
    assert model.memory().experts == plan.use.experts
    assert model.memory().weights == plan.use.weights
    try:
        yield model
    finally:
        model.close()


def all_logits(model: NativeModel) -> NDArray[np.float32]:
    """Logits of all tokens, in passes of LENGTHS."""
    session, found, first = model.session(), [], 0
    for length in LENGTHS:
        found.append(session.forward(TOKENS[first : first + length], logits="all").logits.copy())
        first += length
    session.close()
    return np.concatenate(found)


def cache_of(sizes: ExpertSizes, share: str) -> int:
    return sizes.least if share == "least" else max(sizes.least, sizes.total * int(share) // 100)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> NDArray[np.float32]:
    with opened(models["one file"], None) as model:
        assert model.expert_cache is None and model.expert_stats() is None
        return all_logits(model)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_threads, n_batch", [(1, 1), (1, 16), (2, 7), (2, 64)])
@pytest.mark.parametrize("share", ["least", "25", "50", "75"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_with_all_experts_in_memory(
    models: dict[str, Path], expected: NDArray[np.float32], kind: str, share: str, n_threads: int, n_batch: int
) -> None:
    with opened(models[kind], cache_of(sizes_of(models[kind]), share), n_threads, n_batch) as model:
        assert same_bits(all_logits(model), expected)
        stats = model.expert_stats()
        assert stats is not None
        for layer in stats.layers:
            misses = layer.lookups - layer.hits
            assert 0 < misses <= layer.reads <= misses + layer.prefetches


@pytest.mark.parametrize(
    "architecture, kind, fused",
    [
        ("llama", "Q4_0", False),
        ("qwen2moe", "Q8_0", True),
        ("gpt-oss", "MXFP4", False),
        ("ernie4_5-moe", "F16", False),
    ],
)
def test_other_architectures(tmp_path: Path, architecture: ExpertArchitecture, kind: str, fused: bool) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", architecture, kind, fused=fused)
    with opened(path, None) as model:
        expected = all_logits(model)
    for packed in (False, True):
        if packed:
            pack(path)
        with opened(path, cache_of(sizes_of(path), "50"), 2) as model:
            assert same_bits(all_logits(model), expected)


def test_what_is_read_ahead_changes_no_bit(models: dict[str, Path], expected: NDArray[np.float32]) -> None:
    sizes = sizes_of(models["packed"])
    with opened(models["packed"], cache_of(sizes, "50")) as model:
        cache = model.expert_cache
        assert cache is not None
        cache.warm([(layer, expert) for expert in range(5) for layer in range(2)])
        wait_until(lambda: cache.stats().n_in_memory > 0)
        cache.hint(1, [4, 9, 2])
        assert same_bits(all_logits(model), expected)
        cache.forget_use(0, list(range(16)))
        cache.hint(0, [1, 2, 3])
        assert same_bits(all_logits(model), expected)
        stats = cache.stats()
        assert sum(layer.prefetches for layer in stats.layers) > 0


def test_a_warm_start_has_what_it_was_told(models: dict[str, Path]) -> None:
    with opened(models["split"], cache_of(sizes_of(models["split"]), "75")) as model:
        cache = model.expert_cache
        assert cache is not None
        model.session().forward(TOKENS[:1])
        used = [(layer, int(e)) for layer, row in enumerate(cache.routing()[:, 0]) for e in row]
    with opened(models["split"], cache_of(sizes_of(models["split"]), "75")) as model:
        cache = model.expert_cache
        assert cache is not None
        cache.warm(used)
        wait_until(lambda: cache.stats().n_in_memory >= len(used))
        model.session().forward(TOKENS[:1])
        assert [(layer.lookups, layer.hits) for layer in cache.stats().layers] == [(3, 3), (3, 3)]


def test_passes_that_were_interrupted_while_experts_came_run_again(
    models: dict[str, Path], expected: NDArray[np.float32]
) -> None:
    with opened(models["split"], sizes_of(models["split"]).least, 2) as model:

        def interrupt() -> None:
            for _ in range(60):
                model.interrupt()
                time.sleep(0.004)

        thread = threading.Thread(target=interrupt)
        thread.start()
        session, found, first = model.session(), [], 0
        for length in LENGTHS:
            while True:
                try:
                    output = session.forward(TOKENS[first : first + length], logits="all")
                except Interrupted:
                    continue
                break
            found.append(output.logits.copy())
            first += length
        thread.join()
        assert same_bits(np.concatenate(found), expected)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_sizes_of_experts(models: dict[str, Path]) -> None:
    sizes = sizes_of(models["packed"])
    assert sizes == sizes_of(models["split"])
    assert (sizes.n_layers, sizes.n_experts, sizes.n_used) == (2, 16, 3)
    assert sizes.a_token == sizes.total // 16 * 3
    assert sizes.least == sizes.a_token  # two sizes of records, each of one layer


def test_sizes_of_a_model_without_experts_are_none(tmp_path: Path) -> None:
    assert sizes_of(write_tiny_model(tmp_path / "m.gguf")) == ExpertSizes(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_count_the_cache(models: dict[str, Path], kind: str) -> None:
    sizes, backend = sizes_of(models[kind]), NativeBackend(tuned=False)
    with ModelFile.open(models[kind]) as file:
        spec = read_spec(file)
        whole = backend.plan(file, spec, LoadSettings(N_CTX))
        half = backend.plan(file, spec, LoadSettings(N_CTX, expert_cache=sizes.total // 2))
        assert whole.use.experts == sizes.total and whole.expert_cache is None
        assert backend.plan(file, spec, LoadSettings(N_CTX, expert_cache=sizes.total)) == whole
        assert half.expert_cache == sizes.total // 2
        assert half.use.experts < sizes.total // 2 + (4 << 20)
        embedding = file.tensors["token_embd.weight"].n_bytes  # of which a copy is held
        assert half.use.weights == whole.use.weights + embedding
        with pytest.raises(InvalidArgument, match=f"--expert-cache {sizes.least} or more"):
            backend.plan(file, spec, LoadSettings(N_CTX, expert_cache=sizes.least - 1))
        with pytest.raises(InvalidArgument, match="nothing is read after loading"):
            NativeBackend(resident=True).plan(file, spec, LoadSettings(N_CTX, expert_cache=sizes.least))


def test_one_token_looks_up_what_it_uses(models: dict[str, Path]) -> None:
    sizes = sizes_of(models["packed"])
    with opened(models["packed"], cache_of(sizes, "50")) as model:
        session = model.session()
        session.forward(TOKENS[:1])
        stats = model.expert_stats()
        assert stats is not None
        assert [(layer.lookups, layer.hits, layer.reads) for layer in stats.layers] == [(3, 0, 3), (3, 0, 3)]
        assert sum(layer.bytes_read for layer in stats.layers) == sizes.a_token
        assert stats.busy_seconds > 0


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one file", "packed"])
def test_a_file_that_is_cut_off_in_use_is_an_error_and_no_crash(tmp_path: Path, kind: str) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    read = pack(path) if kind == "packed" else path
    with opened(path, sizes_of(path).least) as model:
        session = model.session()
        session.forward(TOKENS[:4])
        os.truncate(read, 4096)
        for _ in range(2):
            with pytest.raises(ExpertReadError, match=rf"{read.name}: .*expert \d+ at byte \d+: the file has changed"):
                session.forward(TOKENS[4:12])
        assert session.n_past == 0  # nothing was committed


def test_the_disk_is_not_tuned_for(models: dict[str, Path]) -> None:
    backend = NativeBackend()
    with ModelFile.open(models["packed"]) as file:
        spec = read_spec(file)
        plan = backend.plan(file, spec, LoadSettings(64, expert_cache=sizes_of(models["packed"]).least))
        model = backend.load(file, spec, plan, Device(1))
        stats = model.expert_stats()
        assert model.tuning is None and stats is not None
        assert sum(layer.lookups for layer in stats.layers) == 0
        model.close()


def test_a_closed_model_has_no_cache(models: dict[str, Path]) -> None:
    with opened(models["packed"], sizes_of(models["packed"]).least) as model:
        pass
    with pytest.raises(EdgeInferError, match="closed"):
        model.expert_stats()
