"""Experts that are read ahead because the next layer's router will probably choose them: bits, counts and limits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from exactness import same_bits
from expert_prefetch import set_expert_prefetch
from interrupts import interrupted_every
from numpy.typing import NDArray
from tiny_experts import ExpertArchitecture, write_tiny_experts
from try_texts import sizes_of

from edgeinfer.backends.native import NativeBackend, NativeModel
from edgeinfer.backends.native.experts.cache import ExpertCache
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.common.errors import Interrupted
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.control import PrefetchingCache, control_experts

N_LAYERS, N_EXPERTS, N_USED = 4, 16, 3
LENGTHS = (40, *range(1, 10), *[1] * 6)  # tokens of passes: 40 need all experts
TOKENS = np.random.default_rng(5).integers(0, 291, sum(LENGTHS)).astype(np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model. Experts of the second layer are larger, and so have slots of their own."""
    types = {"blk.1.ffn_down_exps.weight": "Q6_K"}
    return packed_model(tmp_path_factory.mktemp("model") / "m.gguf", types=types)


def packed_model(path: Path, architecture: ExpertArchitecture = "qwen3moe", **sizes: object) -> Path:
    sizes = {"n_layers": N_LAYERS, "n_experts": N_EXPERTS, "n_used": N_USED} | sizes
    write_tiny_experts(path, architecture, "Q4_K", **sizes)  # type: ignore[arg-type]
    return packed_again(path)


def packed_again(path: Path) -> Path:
    with ModelFile.open(path) as file:
        NativeBackend(tuned=False).pack(file, read_spec(file), packed_path(path))
    return path


@contextmanager
def opened(path: Path, share: int | None, n_threads: int = 2, n_batch: int = 64) -> Iterator[NativeModel]:
    """share: of the experts that the cache holds, in percent; 0 for the least, None for all in memory."""
    backend, sizes = NativeBackend(tuned=False), sizes_of(path)
    cache = None if share is None else max(sizes.least, sizes.total * share // 100)
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        plan = backend.plan(
            file,
            spec,
            LoadSettings(max(len(TOKENS), n_batch), n_batch=n_batch, n_threads=n_threads, expert_cache=cache),
        )
        model = backend.load(file, spec, plan, Device(n_threads))
        try:
            yield model
        finally:
            model.close()


def cache_of(model: NativeModel) -> ExpertCache:
    cache = model.expert_cache
    assert cache is not None
    return cache


def all_logits(model: NativeModel, lengths: Sequence[int] = LENGTHS) -> NDArray[np.float32]:
    session, found, first = model.session(), [], 0
    for length in lengths:
        found.append(session.forward(TOKENS[first : first + length], logits="all").logits.copy())
        first += length
    session.close()
    return np.concatenate(found)


@pytest.fixture(scope="module")
def expected(path: Path) -> NDArray[np.float32]:
    with opened(path, None) as model:
        return all_logits(model)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share, n_threads", [(0, 2), (25, 1), (50, 2), (75, 2)])
def test_no_bit_depends_on_what_is_read_ahead(
    path: Path, expected: NDArray[np.float32], share: int, n_threads: int
) -> None:
    with opened(path, share, n_threads) as model:
        cache = cache_of(model)
        for n in (*range(1, 17), 0, 1000):
            for layer in range(N_LAYERS):
                cache.set_prefetch(layer, n)
            assert same_bits(all_logits(model), expected)
        assert sum(layer.prefetches for layer in cache.stats().layers) > 0


def test_layers_are_switched_one_by_one(path: Path, expected: NDArray[np.float32]) -> None:
    with opened(path, 50) as model:
        cache = cache_of(model)
        for layer in range(N_LAYERS):
            before = cache.predictions()
            cache.set_prefetch(layer, 2)
            assert same_bits(all_logits(model), expected)
            cache.set_prefetch(layer, 0)
            changed = [after != old for after, old in zip(cache.predictions(), before, strict=True)]
            assert changed == [each == layer and layer > 0 for each in range(N_LAYERS)]  # nothing is before the first


@pytest.mark.parametrize("architecture", ["gpt-oss", "glm4moe", "ernie4_5-moe", "qwen2moe"])
def test_routers_of_other_architectures(tmp_path: Path, architecture: ExpertArchitecture) -> None:
    path = packed_model(tmp_path / "m.gguf", architecture)
    with opened(path, None) as model:
        expected = all_logits(model)
    with opened(path, 50) as model:
        set_expert_prefetch(model, 1.0)
        assert same_bits(all_logits(model), expected)
        predicted, needed = np.sum(cache_of(model).predictions(), 0)
        assert 0 < needed <= predicted


# ---- counts ----------------------------------------------------------------------------------------------------------


def numbers(path: Path, name: str) -> NDArray[np.uint8]:
    """The bytes of a tensor, writable in the file."""
    with ModelFile.open(path) as file:
        info = file.tensors[name]
    return np.memmap(path, np.uint8, "r+", info.offset, (info.n_bytes,))


def without_changes(path: Path) -> Path:
    """The model with layers that add nothing to the residual stream, and all with the router of the first."""
    router, norm = (numbers(path, f"blk.0.{name}.weight").copy() for name in ("ffn_gate_inp", "ffn_norm"))
    for layer in range(N_LAYERS):
        for role in ("attn_output", "ffn_down_exps"):
            numbers(path, f"blk.{layer}.{role}.weight")[:] = 0
        numbers(path, f"blk.{layer}.ffn_gate_inp.weight")[:] = router
        numbers(path, f"blk.{layer}.ffn_norm.weight")[:] = norm
    return packed_again(path)


@pytest.mark.parametrize("share", [0, 50])
def test_the_same_router_of_the_same_input_predicts_all(tmp_path: Path, share: int) -> None:
    path = without_changes(packed_model(tmp_path / "m.gguf"))
    with opened(path, share) as model:
        set_expert_prefetch(model, 1.0)
        all_logits(model, [1] * 20)
        of_layers = cache_of(model).predictions()
        assert of_layers == [(0, 0)] + [(20 * N_USED, 20 * N_USED)] * (N_LAYERS - 1)
        all_logits(model, [4, 8])
        assert all(predicted == needed for predicted, needed in cache_of(model).predictions())


def test_long_passes_read_ahead_what_their_rows_need(tmp_path: Path) -> None:
    path, n = without_changes(packed_model(tmp_path / "m.gguf")), 600
    with opened(path, 50, n_batch=n) as model:
        session = model.session()
        session.forward(np.full(n, TOKENS[0]))  # all rows need the same few
        (first, *layers) = cache_of(model).stats().layers
        assert first.prefetches + first.dropped == 0
        assert [layer.prefetches + layer.dropped for layer in layers] == [N_USED] * (N_LAYERS - 1)
        assert all(layer.useful == layer.prefetches for layer in layers)
        session.close()


def test_some_guesses_are_wrong(path: Path) -> None:
    with opened(path, 50) as model:
        set_expert_prefetch(model, 1.0)
        all_logits(model, [1] * 20)
        (of_first, *of_layers) = cache_of(model).predictions()
        assert of_first == (0, 0)
        assert all(predicted == 20 * N_USED for predicted, _ in of_layers)
        assert 0 < sum(needed for _, needed in of_layers) < 20 * N_USED * len(of_layers)


def test_counting_reads_nothing_ahead(path: Path, expected: NDArray[np.float32]) -> None:
    short = LENGTHS[1:9]
    with opened(path, 50) as model:
        cache = cache_of(model)
        all_logits(model, short)
        assert cache.predictions() == [(0, 0)] * N_LAYERS
        cache.observe(1)
        logits = all_logits(model, short)
        always = np.array(cache.predictions())[:, 0]
        assert always[0] == 0 and all(always[1:] >= N_USED * len(short))
        cache.observe(4)
        assert same_bits(all_logits(model, short), logits)
        seldom = np.array(cache.predictions())[:, 0] - always
        assert seldom[0] == 0 and all(0 < seldom[1:]) and all(seldom[1:] < always[1:])
        assert sum(layer.prefetches for layer in cache.stats().layers) == 0


def test_what_controls_prefetch_finds_the_switches(path: Path) -> None:
    with opened(path, 50) as model, ModelFile.open(path) as file:
        control = control_experts(model, file, sizes_of(path), 2)
        assert control is not None and isinstance(model.expert_cache, PrefetchingCache)
        all_logits(model, [1] * 40)
        assert [n for n, _ in cache_of(model).predictions()] == [0] + [2 * N_USED] * (N_LAYERS - 1)


def test_a_model_in_memory_predicts_too(path: Path) -> None:
    with opened(path, None) as model:
        set_expert_prefetch(model, 1.0)  # nothing to read
        predictor = model.decoder().predictor
        assert predictor is not None
        predictor.observe(1)
        all_logits(model, [1] * 4)
        assert [predictor.counts(layer)[0] for layer in range(N_LAYERS)] == [0] + [4 * N_USED] * (N_LAYERS - 1)
        with pytest.raises(ValueError, match="no such layer"):
            predictor.set(N_LAYERS, 1)
        with pytest.raises(ValueError, match="0 or more"):
            predictor.set(1, -1)


# ---- odd routers and interrupts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e38])
def test_routers_without_an_order(tmp_path: Path, value: float) -> None:
    path = packed_model(tmp_path / "m.gguf")
    for layer in (1, 2):
        router = numbers(path, f"blk.{layer}.ffn_gate_inp.weight")
        router.view(np.float32)[:: 1 if value == 0 else 7] = value
    packed_again(path)
    with opened(path, None) as model:
        expected = all_logits(model)
    with opened(path, 25) as model:
        set_expert_prefetch(model, 2.0)
        assert np.array_equal(all_logits(model).view(np.uint32), expected.view(np.uint32))


def test_passes_that_are_stopped_while_hints_are_read(path: Path, expected: NDArray[np.float32]) -> None:
    with opened(path, 25) as model:
        set_expert_prefetch(model, 1.0)
        session, n_stopped = model.session(), 0
        with interrupted_every(0.0005, session):
            for first in range(0, 40_000, 2):
                if first >= 300 and n_stopped:  # when one is stopped is up to the machine
                    break
                try:
                    session.forward(TOKENS[first % 64 : first % 64 + 1 + first % 3])
                except Interrupted:
                    n_stopped += 1
                session.truncate(0)
        session.close()
        assert n_stopped > 0
        assert same_bits(all_logits(model), expected)
