"""Layers with windows hold the window and what is pending, and give the bits of those that hold whole texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import LEAVES, TREE, branch_to, comparisons, decode_one_by_one, prefill, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import Architecture, write_tiny_model

from edgeinfer.backends.base import Rows, run_sequence
from edgeinfer.backends.native import NativeBackend, NativeSession
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import ShapeError
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device, MemoryPlan
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

SEGMENT = SLACK = 128  # slots, as in kv_head.h; tokens that can always be cut, as in kv_state.h
OLMO2: dict[str, Any] = {"n_layers": 4, "metadata": {"olmo2.attention.sliding_window": 20}}  # as gemma2 and gemma3 have
MODELS: list[tuple[Architecture, dict[str, Any]]] = [("gemma2", {}), ("gemma3", {}), ("olmo2", OLMO2)]


def segments_of_window(window: int, n_batch: int) -> int:
    """Segments that hold a window, the slack and a batch, wherever in a segment they begin."""
    return (window - 1 + SLACK + n_batch - 2) // SEGMENT + 2


class Opener:
    """Sessions of one model file. whole: sessions whose layers all hold n_ctx positions, as n_batch is n_ctx too."""

    def __init__(self, path: Path, n_ctx: int = 1024, n_batch: int = 32, cache_type: CacheType = "f16") -> None:
        self.file = ModelFile.open(path)
        self.spec = read_spec(self.file)
        self.n_ctx, self.n_batch, self.cache_type = n_ctx, n_batch, cache_type

    def plan(self, n_batch: int | None = None, n_threads: int = 1) -> MemoryPlan:
        n_batch = n_batch or self.n_batch
        return NativeBackend().plan(
            self.file,
            self.spec,
            LoadSettings(self.n_ctx, n_batch=n_batch, n_threads=n_threads, cache_type=self.cache_type),
        )

    def __call__(self, n_threads: int = 1, isa: str | None = None, n_batch: int | None = None) -> NativeSession:
        return (
            NativeBackend().load(self.file, self.spec, self.plan(n_batch, n_threads), Device(n_threads, isa)).session()
        )

    def whole(self) -> NativeSession:
        return self(n_batch=self.n_ctx)

    def tokens(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.integers(0, self.spec.n_vocab, n).astype(np.int32)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Opener:
    return Opener(write_tiny_model(tmp_path_factory.mktemp("tiny") / "gemma2.gguf", "gemma2", "F32"))


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
@pytest.mark.parametrize("architecture, options", MODELS)
def test_long_texts_have_the_bits_of_full_caches(
    architecture: Architecture, options: dict[str, Any], cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, "Q8_0", head_dim=32, **options)
    opener = Opener(path, 4096, 64, cache_type)
    tokens = opener.tokens(rng, 2000)
    expected = run_sequence(opener.whole(), tokens, logits="all", taps=True)
    found = run_sequence(opener(n_threads=2), tokens, logits="all", taps=True)
    assert expected.hidden is not None and found.hidden is not None
    assert same_bits(found.logits, expected.logits) and same_bits(found.hidden, expected.hidden)
    assert opener.plan().use.kv_cache < 0.7 * opener.plan(n_batch=4096).use.kv_cache


@pytest.mark.parametrize("n_tokens", [36, 37, 145, 700])
def test_the_bits_depend_on_nothing_but_the_text(n_tokens: int, gemma: Opener, rng: np.random.Generator) -> None:
    tokens = gemma.tokens(rng, n_tokens + 64)
    differing = [what for what, equal in comparisons(gemma, (), tokens, sizes=(1, 2, 16)) if not equal]
    assert differing == []


def test_far_after_the_first_window_logits_are_the_reference_s(gemma: Opener, rng: np.random.Generator) -> None:
    tokens = gemma.tokens(rng, 600)
    oracle = ReferenceBackend()
    reference = oracle.load(
        gemma.file, gemma.spec, oracle.plan(gemma.file, gemma.spec, LoadSettings(600, n_batch=32)), Device(1)
    ).session()
    found, expected = (run_sequence(session, tokens, logits="all").logits for session in (gemma(), reference))
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()  # float32, and keys rounded to halves


# Around the edges of the window of 20 and of segments, and where segments are used again.
@pytest.mark.parametrize("n_past", [1, 18, 19, 20, 21, 115, 127, 128, 147, 148, 149, 383, 384, 500])
def test_trees_across_the_edge_of_a_window(n_past: int, gemma: Opener, rng: np.random.Generator) -> None:
    prompt, nodes, end = gemma.tokens(rng, n_past), gemma.tokens(rng, len(TREE)), gemma.tokens(rng, 30)
    session, whole = gemma(), gemma.whole()
    run_sequence(session, prompt)
    run_sequence(whole, prompt)
    of_tree = session.forward(nodes, TREE, logits="all").logits
    for leaf in LEAVES:
        branch = branch_to(leaf, TREE)
        assert same_bits(of_tree[branch], decode_one_by_one(whole, nodes[branch]))
        session.forward(nodes, TREE)
        session.commit(branch)
        assert same_bits(run_sequence(session, end, logits="all").logits, run_sequence(whole, end, logits="all").logits)
        assert session.truncate(n_past) == whole.truncate(n_past) == n_past


def test_what_is_held_is_what_is_planned(tmp_path: Path, rng: np.random.Generator) -> None:
    """Of one layer with all positions, and of five with windows."""
    metadata = {"gemma3.attention.sliding_window": 512}
    path = write_tiny_model(tmp_path / "m.gguf", "gemma3", "F16", head_dim=32, metadata=metadata)
    opener = Opener(path, 32768, 512)
    slot = 2 * 2 * 2 * 32  # K and V, heads, bytes, numbers
    assert segments_of_window(512, 512) == 10
    assert opener.plan().use.kv_cache == slot * (32768 + 5 * 10 * SEGMENT)
    assert Opener(path, 1280, 512).plan().use.kv_cache == slot * 6 * 1280  # windows would hold no less
    assert Opener(path, 1281, 512).plan().use.kv_cache == slot * (11 + 5 * 10) * SEGMENT

    opener = Opener(path, 1500, 300)
    session, planned = opener(), opener.plan().use.kv_cache
    for n in (300, 37, 300, 300, 1, 300, 262):
        assert session.memory().kv_cache < planned
        run_sequence(session, opener.tokens(rng, n))
    assert session.n_past == 1500 and session.memory().kv_cache == planned
    session.truncate(0)
    run_sequence(session, opener.tokens(rng, 1500))
    assert session.memory().kv_cache == planned


def test_what_a_window_lacks_is_run_again(gemma: Opener, rng: np.random.Generator) -> None:
    session, fresh, tokens = gemma(), gemma.whole(), gemma.tokens(rng, 1000)
    run_sequence(session, tokens)
    assert segments_of_window(20, 32) == 3
    # Three segments hold 640..999, or the last 40 slots of a segment that is used again and all before them.
    assert session.truncate(1000 - SLACK) == 872
    assert session.truncate(660) == 660
    assert session.truncate(659) == 659  # sees slots from 640 on
    assert session.truncate(658) == 0 == session.n_past
    run_sequence(session, tokens[:658])
    run_sequence(fresh, tokens[:658])
    assert same_bits(session.forward([5]).logits, fresh.forward([5]).logits)
    with pytest.raises(ShapeError, match=r"n_past must be in 0\.\.658: found 659"):
        session.truncate(659)


def test_more_than_a_batch_is_refused_where_a_window_would_move(gemma: Opener, rng: np.random.Generator) -> None:
    session, tokens = gemma(), gemma.tokens(rng, 400)
    whole = session.forward(tokens[:384], logits="all").logits  # three segments
    session.commit([])
    assert same_bits(run_sequence(session, tokens[:384], logits="all").logits, whole)
    session.truncate(0)
    with pytest.raises(ShapeError, match="at most n_batch = 32 tokens can be uncommitted after 0: found 385; forward"):
        session.forward(tokens[:385])
    run_sequence(session, tokens)
    session.forward(tokens[:32])
    for n_pending, n in ((0, 33), (32, 1)):
        with pytest.raises(ShapeError, match="after 400: found 33"):
            session.forward(tokens[:n], n_pending=n_pending)


def test_parked_texts_are_found_again_as_long_as_windows_hold_them(gemma: Opener, rng: np.random.Generator) -> None:
    session, start = gemma(), gemma.tokens(rng, 60)
    texts = [np.concatenate([start, gemma.tokens(rng, n)]) for n in (60, 50, 350)]
    for text in texts[:2]:
        run_sequence(session, text[session.reuse_prefix(text[:-1]) :])
    assert session.reuse_prefix(texts[0]) == 120 and session.reuse_prefix(texts[1]) == 110
    # The third needs all segments, and its own beginning is after its window then.
    assert session.reuse_prefix(texts[2]) == 60
    run_sequence(session, texts[2][60:])
    run_sequence(session, gemma.tokens(rng, 100))
    assert session.reuse_prefix(texts[0]) == 0
    assert session.memory().kv_cache <= gemma.plan().use.kv_cache


def test_a_parked_text_is_cut_only_as_far_as_its_window_goes(gemma: Opener, rng: np.random.Generator) -> None:
    session, text = gemma(), gemma.tokens(rng, 700)
    run_sequence(session, text)
    assert session.reuse_prefix([]) == 0
    assert session.reuse_prefix(text[:690]) == 690  # parked
    session.reuse_prefix([])
    assert session.reuse_prefix(text[:200]) == 0
    assert session.reuse_prefix(text) == 700


def test_a_parked_text_leaves_memory_for_the_next(gemma: Opener, rng: np.random.Generator) -> None:
    session, first, second = gemma(), gemma.tokens(rng, 800), gemma.tokens(rng, 100)
    run_sequence(session, first)
    assert session.reuse_prefix(second) == 0
    run_sequence(session, second)
    assert session.reuse_prefix(first[:790]) == 790
    assert same_bits(session.forward(first[790:]).logits, logits_after(gemma.whole(), first))


def logits_after(session: NativeSession, tokens: np.ndarray) -> np.ndarray:
    return session.forward(tokens).logits


@dataclass
class Walk:
    """A session with windows and a plain list of tokens; `expected` computes everything anew in full caches."""

    session: NativeSession
    whole: NativeSession
    planned: int
    rng: np.random.Generator
    text: list[int] = field(default_factory=list)
    known: list[list[int]] = field(default_factory=list)
    longest: int = 0  # that the text was since it was empty

    def tokens(self, n: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.session.spec.n_vocab, n)]

    def read(self, n: int) -> None:
        new = self.tokens(max(0, min(n, self.session.n_ctx - 64 - len(self.text))))
        if new:
            run_sequence(self.session, new)
            self.text += new

    def verify(self, n: int) -> None:
        """A random tree, of which a random path is kept, as if it grew in two passes."""
        nodes, parents = self.tokens(n), [int(self.rng.integers(-1, i)) for i in range(n)]
        first = n // 2
        if first:
            self.session.forward(nodes[:first], parents[:first])
        self.session.forward(nodes[first:], parents[first:], n_pending=first)
        path = branch_to(int(self.rng.integers(-1, n)), parents)
        self.session.commit(path)
        self.text += [nodes[row] for row in path]

    def truncate(self, n_less: int) -> None:
        n = max(0, len(self.text) - n_less)
        reached = self.session.truncate(n)
        assert reached in (0, n)
        if n >= self.longest - SLACK:
            assert reached == n
        del self.text[reached:]

    def reuse(self, which: int, n_kept: int, n_more: int) -> None:
        self.known.append(list(self.text))
        expected = self.known[which % len(self.known)][:n_kept] + self.tokens(n_more)
        n_reached = self.session.reuse_prefix(expected)
        self.text = expected[:n_reached]

    def check(self) -> None:
        assert self.session.n_past == len(self.text)
        assert self.session.memory().kv_cache <= self.planned
        self.longest = max(self.longest, len(self.text))
        n_known = self.whole.reuse_prefix(self.text)
        if n_known < len(self.text):
            run_sequence(self.whole, self.text[n_known:])
        last = self.tokens(3)
        assert same_bits(self.session.forward(last, logits="all").logits, self.whole.forward(last, logits="all").logits)


STEPS = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 300)),
    st.tuples(st.just("verify"), st.integers(1, 29)),
    st.tuples(st.just("truncate"), st.one_of(st.integers(0, 200), st.integers(0, 1000))),
    st.tuples(st.just("reuse"), st.integers(0, 50), st.integers(0, 900), st.integers(0, 40)),
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, max_size=20), seed=st.integers(0, 2**32 - 1))
def test_whatever_is_done_the_text_has_its_bits(
    steps: list[tuple[Any, ...]], seed: int, walkers: tuple[NativeSession, NativeSession, int]
) -> None:
    session, whole, planned = walkers
    session.truncate(0)
    walk = Walk(session, whole, planned, np.random.default_rng(seed))
    for name, *arguments in steps:
        getattr(walk, name)(*arguments)
        walk.check()


@pytest.fixture(scope="module", params=["f16", "q8_0", "k6v4"])
def walkers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[NativeSession, NativeSession, int]:
    """Windows of 20, and full layers; what was parked in one example is still there in the next."""
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", "gemma2", "Q8_0", head_dim=32)
    opener = Opener(path, cache_type=request.param)
    return opener(), opener.whole(), opener.plan().use.kv_cache


def test_the_slack_is_held_whatever_is_pending(gemma: Opener, rng: np.random.Generator) -> None:
    """At every place in a segment."""
    session, tokens = gemma(), gemma.tokens(rng, 1000)
    prefill(session, tokens[:500], 32)
    for n in range(501, 501 + 2 * SEGMENT, 7):
        run_sequence(session, tokens[session.n_past : n])
        session.forward(tokens[:32])
        assert session.truncate(n - SLACK) == n - SLACK


def test_texts_with_windows_share_passes(gemma: Opener, rng: np.random.Generator) -> None:
    """Texts of one model, each after another number of segments that were used again."""
    model, whole = gemma().model, gemma.whole()
    texts = [gemma.tokens(rng, n) for n in (5, 130, 400, 900)]
    sessions = [model.session(1024) for _ in texts]  # each with memory of its own
    for session, text in zip(sessions, texts, strict=True):
        run_sequence(session, text)
    single, nodes = gemma.tokens(rng, 1), gemma.tokens(rng, len(TREE))
    batch = [Rows(session, single) for session in sessions[::2]]
    batch += [Rows(session, nodes, TREE, logits="all") for session in sessions[1::2]]
    outputs = model.forward(batch)
    for text, rows, output in zip([*texts[::2], *texts[1::2]], batch, outputs, strict=True):
        whole.truncate(0)
        run_sequence(whole, text)
        alone = whole.forward(rows.tokens, rows.parents, logits=rows.logits).logits
        assert same_bits(output.logits, alone)
    assert all(session.memory().kv_cache <= gemma.plan().use.kv_cache for session in sessions)


def test_a_longer_context_never_takes_less(gemma: Opener) -> None:
    for n_batch in (1, 40, 300):
        plans = [
            NativeBackend().plan(gemma.file, gemma.spec, LoadSettings(n_ctx, n_batch=n_batch))
            for n_ctx in range(1, 1500, 13)
        ]
        sizes = [plan.use.kv_cache for plan in plans]
        assert sizes == sorted(sizes)
