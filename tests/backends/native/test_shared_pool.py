"""Sessions that share the memory of one model: each text has its bits, and what texts have in common is held once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from exactness import branch_to, same_bits
from hypothesis import given
from hypothesis import strategies as st
from interrupts import interrupted_every
from tiny_heads import write_tiny_head
from tiny_hybrids import HybridArchitecture, write_tiny_hybrid
from tiny_models import Architecture, write_tiny_model

from edgeinfer.backends.base import PooledModel, Rows, run_sequence
from edgeinfer.backends.checks import common_length
from edgeinfer.backends.native import NativeBackend, NativeModel, NativeSession, _core, load_head, plan_head
from edgeinfer.backends.native.sequence_pool import SharedPool
from edgeinfer.common.errors import CacheFull, EdgeInferError, Interrupted, InvalidArgument, ShapeError
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile

SEGMENT = 128
OLMO2: dict[str, Any] = {"n_layers": 4, "metadata": {"olmo2.attention.sliding_window": 20}}
ARCHITECTURES: list[tuple[Architecture, dict[str, Any]]] = [("llama", {}), ("gemma2", {}), ("olmo2", OLMO2)]


def load(path: Path, n_ctx: int = 1024, n_batch: int = 32, **settings: Any) -> NativeModel:
    file, backend = ModelFile.open(path), NativeBackend(tuned=False)
    spec = read_spec(file)
    return backend.load(
        file, spec, backend.plan(file, spec, LoadSettings(n_ctx, n_batch=n_batch, **settings)), Device(1)
    )


def write_hybrid(folder: Path, kind: str) -> Path:
    """kind: an architecture, or "states" for recurrent layers alone."""
    path = folder / "m.gguf"
    if kind == "states":
        return write_tiny_hybrid(path, "qwen35", "Q8_0", kinds=["recurrent"] * 2, n_ctx_train=2048)
    architecture: HybridArchitecture = "lfm2" if kind == "lfm2" else "qwen35"
    return write_tiny_hybrid(path, architecture, "Q8_0", n_ctx_train=2048)


def planned(path: Path, n_ctx: int = 1024, n_batch: int = 32, **settings: Any) -> tuple[int, int]:
    """(bytes of the KV cache, positions that all texts share)."""
    with ModelFile.open(path) as file:
        plan = NativeBackend().plan(file, read_spec(file), LoadSettings(n_ctx, n_batch=n_batch, **settings))
    return plan.use.kv_cache, plan.n_positions


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", "llama", "Q8_0", head_dim=32)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", "gemma2", "Q8_0", head_dim=32)


@pytest.fixture(scope="module", params=["qwen35", "lfm2", "states"])
def hybrid(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("tiny"), request.param)


def some(rng: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 290, n)]


def after(model: NativeModel, text: Sequence[int], last: Sequence[int]) -> np.ndarray:
    """Logits of all rows of `last` after a text that nothing else was read beside."""
    session = model.session(model.n_ctx)
    if text:
        run_sequence(session, text)
    logits = session.forward(list(last), logits="all").logits
    session.close()
    return logits


def with_large_states(model: NativeModel) -> None:
    """As if they were: one checkpoint for each text that runs, two at least, and rows for trees of 16 tokens."""
    sizes = (model.n_ctx, model.n_sequences, model._n_positions)
    core = _core.SequencePool(model._config, _core.KvType.f16, *sizes, checkpoint_bytes=0, row_bytes=0)
    model._pool = SharedPool(core, model.n_sequences)


def used(session: NativeSession) -> int:
    return session.memory().kv_cache


# ---- whatever is done ------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """Sessions on one pool that is too small for them, and the text that each should have."""

    model: NativeModel
    lone: NativeModel  # whose layers all hold all positions
    rng: np.random.Generator
    sessions: list[NativeSession] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    known: list[list[int]] = field(default_factory=lambda: [[]])
    n_sessions: int = 8
    n_full: int = 0
    n_shared: int = 0

    def __post_init__(self) -> None:
        for _ in range(self.n_sessions):
            self.sessions.append(self.model.session())
            self.texts.append([])

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def read(self, i: int) -> None:
        new = some(self.rng, 1 + self.below(300))
        for first in range(0, len(new), self.model.n_batch):
            part = new[first : first + self.model.n_batch]
            if len(self.texts[i]) + len(part) > self.model.n_ctx:
                return
            self.sessions[i].forward(part)
            self.sessions[i].commit(range(len(part)))
            self.texts[i] += part

    def verify(self, i: int) -> None:
        """A random tree, of which a random path is kept, as if it grew in two passes."""
        self.verify_together([i])

    def verify_some(self, i: int) -> None:
        self.verify_together([i, *(other for other in range(len(self.sessions)) if other != i and self.below(2))])

    def verify_together(self, chosen: list[int]) -> None:
        chosen = [i for i in chosen if len(self.texts[i]) + 8 <= self.model.n_ctx]
        trees = [[self.below(row + 1) - 1 for row in range(1 + self.below(6))] for _ in chosen]
        nodes = [some(self.rng, len(tree)) for tree in trees]
        for is_grown in (False, True):
            batch = []
            for i, tree, tokens in zip(chosen, trees, nodes, strict=True):
                first = len(tree) // 2
                if is_grown and first:
                    batch.append(Rows(self.sessions[i], tokens[first:], tree[first:], n_pending=first))
                elif is_grown or first:
                    batch.append(Rows(self.sessions[i], tokens[: first or None], tree[: first or None]))
            if batch:
                self.model.forward(batch)
        for i, tree, tokens in zip(chosen, trees, nodes, strict=True):
            path = branch_to(self.below(len(tree) + 1) - 1, tree)
            self.sessions[i].commit(path)
            self.texts[i] += [tokens[row] for row in path]

    def truncate(self, i: int) -> None:
        n = max(0, len(self.texts[i]) - self.below(400 if self.below(4) == 0 else 40))
        reached = self.sessions[i].truncate(n)
        assert reached in (0, n)
        del self.texts[i][reached:]

    def reuse(self, i: int) -> None:
        self.known.append(list(self.texts[i]))
        others = [*self.known[-8:], *self.texts]
        wanted = max(others[self.below(len(others))], others[self.below(len(others))], key=len)
        wanted = wanted[: max(0, len(wanted) - self.below(150 if self.below(4) == 0 else 30))] + some(
            self.rng, self.below(20)
        )
        before = used(self.sessions[i])
        reached = self.sessions[i].reuse_prefix(wanted)
        assert used(self.sessions[i]) == before
        self.n_shared += reached > 32
        self.texts[i] = wanted[:reached]

    def park(self, i: int) -> None:
        self.known.append(list(self.texts[i]))
        self.sessions[i].park()
        self.texts[i] = []

    def close(self, i: int) -> None:
        self.sessions[i].close()
        self.sessions[i], self.texts[i] = self.model.session(), []

    def kinds(self) -> list[Callable[[int], None]]:
        kinds: list[Callable[[int], None]] = [self.read, self.read, self.verify, self.verify_some, self.truncate]
        return [*kinds, self.reuse, self.reuse, self.park, self.close]

    def step(self) -> None:
        kinds = self.kinds()
        i = self.below(len(self.sessions))
        try:
            kinds[self.below(len(kinds))](i)
        except CacheFull:
            self.n_full += 1
            for session in self.sessions:
                session.commit([])  # what is pending of a tree whose second part had no room
            self.check(i)
            self.close(self.below(len(self.sessions)))
        assert [session.n_past for session in self.sessions] == [len(text) for text in self.texts]
        self.check(i)

    def check(self, i: int) -> None:
        last = some(self.rng, 3)
        if not self.sessions[i].has_room(3):
            return
        found = self.sessions[i].forward(last, logits="all").logits
        assert same_bits(found, after(self.lone, self.texts[i], last))


class HybridWalk(Walk):
    """Of a model with recurrent layers: a text can be cut to some lengths, and a pass that is stopped is half done."""

    n_stopped = 0
    n_between: int = 0  # cuts to other lengths than were asked for

    @override
    def truncate(self, i: int) -> None:
        n = max(0, len(self.texts[i]) - self.below(400 if self.below(4) == 0 else 40))
        reached = self.sessions[i].truncate(n)
        assert reached <= n
        self.n_between += 0 < reached < n
        del self.texts[i][reached:]

    def read_together(self, i: int) -> None:
        """Chains that are cut where passes are full, so that parts of them are pending before the rest."""
        others = [other for other in range(len(self.sessions)) if other != i and self.below(2)][:4]
        chosen = [one for one in (i, *others) if len(self.texts[one]) + 100 <= self.model.n_ctx]
        chains = [some(self.rng, 1 + self.below(100)) for _ in chosen]
        if chosen:
            self.model.forward([Rows(self.sessions[one], chain) for one, chain in zip(chosen, chains, strict=True)])
        for one, chain in zip(chosen, chains, strict=True):
            kept = len(chain) if self.below(3) else self.below(len(chain))
            self.sessions[one].commit(range(kept))
            self.texts[one] += chain[:kept]

    def stop(self, i: int) -> None:
        """Until it happened once, or not at all: these models are fast."""
        n = min(64, self.model.n_ctx - len(self.texts[i]))
        tokens = some(self.rng, 1 + self.below(64))[: max(0, n)]  # once: the walk goes on alike whatever is stopped
        for _ in range(8 if tokens else 0):
            try:
                with interrupted_every(0.0001, self.sessions[i]):
                    self.sessions[i].forward(tokens)
            except Interrupted:
                self.n_stopped += 1
                break
        self.sessions[i].commit([])

    @override
    def kinds(self) -> list[Callable[[int], None]]:
        return [*super().kinds(), self.truncate, self.stop, self.stop, self.read_together]


@pytest.mark.parametrize("cache_type", get_args(CacheType))
@pytest.mark.parametrize("architecture, options", ARCHITECTURES)
def test_whatever_is_done_each_text_has_its_bits(
    architecture: Architecture, options: dict[str, Any], cache_type: CacheType, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", architecture, "Q8_0", head_dim=32, **options)
    n_ctx, parallel = (640, 4) if architecture == "llama" else (1280, 2)  # windows, but not for all positions
    model = load(path, n_ctx, parallel=parallel, cache_type=cache_type)
    lone = load(path, n_ctx, n_ctx, cache_type=cache_type)
    walks = [Walk(model, lone, np.random.default_rng(seed)) for seed in range(3)]
    for walk in walks:
        for _ in range(150):
            walk.step()
        for session in walk.sessions:
            session.park()
    assert sum(walk.n_full for walk in walks) > 3 and sum(walk.n_shared for walk in walks) > 9
    use = walks[0].sessions[0].memory()
    assert use.kv_cache <= planned(path, n_ctx, parallel=parallel, cache_type=cache_type)[0]
    assert (use.windows > 0) == (architecture != "llama")


@pytest.mark.parametrize(
    "kind, parallel, n_sessions, is_full, has_all",
    [
        ("qwen35", 1, 6, True, True),
        ("qwen35", 4, 8, True, True),
        ("lfm2", 2, 8, True, True),
        ("states", 1, 20, True, True),
        ("states", 6, 6, False, True),
        ("states", 1, 1, False, False),
        ("states", 4, 4, False, False),
        ("states", 4, 14, True, False),
    ],
)
def test_whatever_is_done_each_text_of_a_hybrid_has_its_bits(
    kind: str, parallel: int, n_sessions: int, is_full: bool, has_all: bool, tmp_path: Path
) -> None:
    """With many checkpoints, or one of each text that runs, which others may take, and rows for small trees."""
    path = write_hybrid(tmp_path, kind)
    model, lone = load(path, 640, 64, parallel=parallel), load(path, 640, 640)
    if not has_all:
        with_large_states(model)
    walks = [HybridWalk(model, lone, np.random.default_rng(seed), n_sessions=n_sessions) for seed in range(4)]
    for walk in walks:
        for _ in range(200):
            walk.step()
        # How many passes are stopped, and so which states are left, is up to the machine.
        for _ in range(2000 if walk is walks[-1] else 0):
            if all(any(getattr(each, name) for each in walks) for name in ("n_stopped", "n_between")):
                break
            walk.step()
        for session in walk.sessions:
            session.park()
    assert (sum(walk.n_full for walk in walks) > 0) == is_full
    assert n_sessions == 1 or sum(walk.n_shared for walk in walks) > (5 if kind != "states" else 0)
    assert any(walk.n_between for walk in walks) and any(walk.n_stopped for walk in walks)
    assert walks[0].sessions[0].memory().kv_cache <= planned(path, 640, 64, parallel=parallel)[0]


@given(st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=200), st.integers(0, 200))
def test_the_common_length_is_that_of_tokens_one_by_one(a: list[int], b: list[int], n: int) -> None:
    b = a[:n] + b
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_length(a, b) == common_length(b, a) == common_length(tuple(a), b) == expected


# ---- what is shared --------------------------------------------------------------------------------------------------


def test_a_common_beginning_is_held_once(llama: Path, rng: np.random.Generator) -> None:
    model, start = load(llama, parallel=8), some(rng, 500)
    first = model.session()
    run_sequence(first, start)
    taken = used(first)
    others = [model.session() for _ in range(7)]
    assert [session.reuse_prefix([*start, 1, 2, 3]) for session in others] == [500] * 7
    assert used(first) == taken
    for i, session in enumerate(others):
        run_sequence(session, [i, 2 * i])
        # The last segment is copied when it is written to; three of four stay common.
        assert used(first) == taken * (4 + i + 1) // 4
    run_sequence(first, [7, 9])
    assert used(first) == taken * 11 // 4  # the others have copies: it is its own by now
    for i, session in enumerate(others):
        assert same_bits(session.forward([5]).logits, after(model, [*start, i, 2 * i], [5]))
    assert same_bits(first.forward([5]).logits, after(model, [*start, 7, 9], [5]))


def test_a_hybrid_s_text_is_forked_where_it_ends(hybrid: Path, rng: np.random.Generator) -> None:
    """Its rows that are in no state yet are shared too."""
    model, start = load(hybrid, parallel=4), some(rng, 200)
    first = model.session()
    run_sequence(first, start)
    first.forward(nodes := some(rng, 4), [-1, 0, -1, 2])
    first.commit([2, 3])
    text = [*start, nodes[2], nodes[3]]
    taken = used(first)
    forks = [model.session() for _ in range(3)]
    assert [fork.reuse_prefix([*text[: 202 - i], 0]) for i, fork in enumerate(forks)] == [202, 201, 200]
    assert used(first) == taken
    for i, fork in enumerate(forks):
        assert same_bits(fork.forward([9, i], logits="all").logits, after(model, text[: 202 - i], [9, i]))
    first.forward(more := some(rng, 5), [-1, 0, 0, 1, 3])
    assert model.session().reuse_prefix([*text, *more]) == 202  # not what is pending
    first.commit([0, 1, 3, 4])
    text += [more[0], more[1], more[3], more[4]]
    assert same_bits(first.forward([5]).logits, after(model, text, [5]))
    for i, fork in enumerate(forks):
        fork.commit([0, 1])
        assert same_bits(fork.forward([5]).logits, after(model, [*text[: 202 - i], 9, i], [5]))


def test_a_hybrid_s_text_that_is_parked_is_another_session_s(hybrid: Path, rng: np.random.Generator) -> None:
    model, text = load(hybrid, n_batch=256, parallel=2), some(rng, 300)
    first, second = model.session(), model.session()
    run_sequence(first, text)
    for token in text[:3]:
        run_sequence(first, [token])
    first.park()
    first.close()
    reached = second.reuse_prefix([*text, *text[:3], 0])
    assert reached == 302  # the row of the last token is in no state yet
    assert same_bits(second.forward([5]).logits, after(model, [*text, *text[:2]], [5]))
    assert model.session().reuse_prefix([*text[:290], 0]) == 268  # a checkpoint, 32 tokens before the end of the prompt


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_texts_that_part_within_a_segment_are_copied(kind: str, request: Any, rng: np.random.Generator) -> None:
    path: Path = request.getfixturevalue(kind)
    model, start = load(path, parallel=4), some(rng, 300)
    sessions = [model.session() for _ in range(4)]
    run_sequence(sessions[0], start)
    for session in sessions[1:]:
        assert session.reuse_prefix([*start, 0]) == 300
    ends = [some(rng, 20) for _ in sessions]
    for step in range(20):
        rows = [Rows(session, [end[step]]) for session, end in zip(sessions, ends, strict=True)]
        for session, end, out in zip(sessions, ends, model.forward(rows), strict=True):
            session.commit([0])
            assert same_bits(out.logits, after(model, [*start, *end[:step]], [end[step]]))


def test_a_text_with_rows_that_are_pending_can_be_forked(llama: Path, rng: np.random.Generator) -> None:
    model, start, nodes = load(llama, parallel=2), some(rng, 200), some(rng, 4)
    source, fork = model.session(), model.session()
    run_sequence(source, start)
    source.forward(nodes, [-1, 0, -1, 2])
    assert fork.reuse_prefix([*start, 5]) == 200
    run_sequence(fork, [9, 8, 7])
    source.commit([2, 3])
    assert same_bits(source.forward([1]).logits, after(model, [*start, nodes[2], nodes[3]], [1]))
    assert same_bits(fork.forward([1]).logits, after(model, [*start, 9, 8, 7], [1]))


def test_parked_texts_are_found_by_every_session(llama: Path, rng: np.random.Generator) -> None:
    model, text = load(llama, parallel=2), some(rng, 300)
    first, second = model.session(), model.session()
    run_sequence(first, text)
    first.park()
    assert first.n_past == 0
    assert second.reuse_prefix([*text[:250], 0]) == 250
    first.close()
    third = model.session()
    assert third.reuse_prefix(text) == 300
    assert same_bits(third.forward([1]).logits, after(model, text, [1]))
    for session in (second, third):
        session.close()
    model.forget_parked()
    assert model.session().reuse_prefix(text) == 0


def test_what_is_not_worth_keeping_is_not_parked(llama: Path, rng: np.random.Generator) -> None:
    model, text = load(llama), some(rng, 200)
    session = model.session()
    run_sequence(session, text[:31])
    session.park()
    assert session.reuse_prefix(text) == 0
    run_sequence(session, text[:100])
    session.park()
    assert session.reuse_prefix(text) == 100
    run_sequence(session, text[100:])
    session.park()  # instead of its beginning
    assert session.reuse_prefix(text[:150]) == 150
    session.park()  # which is that of a parked one
    assert model._shared().core.parked() == [1]


def test_parked_texts_are_dropped_the_one_used_longest_ago_first(llama: Path, rng: np.random.Generator) -> None:
    model = load(llama)  # 8 segments
    session, texts = model.session(), [some(rng, 200) for _ in range(3)]
    for text in texts:
        run_sequence(session, text)
        session.park()
    assert session.reuse_prefix(texts[0]) == 200  # used again
    session.truncate(0)
    run_sequence(session, some(rng, 260))  # three, and two are free
    session.truncate(0)
    other = model.session()
    assert [other.reuse_prefix(text) for text in texts] == [200, 0, 200]
    other.close()
    assert session.has_room(1024)
    run_sequence(session, some(rng, 1024))
    assert model._shared().core.parked() == []


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_ram", [None, 300_000])
@pytest.mark.parametrize("parallel", [1, 4, 8])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_what_is_held_is_what_is_planned(
    kind: str, parallel: int, cache_ram: int | None, request: Any, rng: np.random.Generator
) -> None:
    path: Path = request.getfixturevalue(kind)
    settings: dict[str, Any] = {"parallel": parallel, "cache_ram": cache_ram}
    n_bytes, n_positions = planned(path, **settings)
    least, n_needed = planned(path, parallel=parallel)
    assert n_needed == 1024 + SEGMENT * (parallel - 1) and n_positions % SEGMENT == 0
    if cache_ram is None:
        assert (n_bytes, n_positions) == (least, n_needed)
    else:
        of_segment = planned(path, 1024 + SEGMENT)[0] - planned(path)[0] if kind == "llama" else cache_ram
        assert least < n_bytes <= least + cache_ram < n_bytes + of_segment
    model = load(path, **settings)
    sessions: list[NativeSession] = []
    for left in range(n_positions, 0, -1024):
        sessions.append(model.session())
        run_sequence(sessions[-1], some(rng, min(left, 1024)))
        if kind == "gemma":  # whose windows are for texts that run, and some that are kept
            sessions[-1].park()
    if kind == "llama":
        assert used(sessions[0]) == n_bytes
        another = model.session()
        assert not another.has_room(1)
        with pytest.raises(CacheFull, match=f"cache of {n_positions} positions is full; run fewer texts"):
            another.forward([1])
    assert used(sessions[0]) <= n_bytes


def test_windows_have_room_for_all_texts_that_run(gemma: Path, rng: np.random.Generator) -> None:
    """Each text moves its window on; none waits for another's."""
    for parallel in (2, 4):
        model = load(gemma, parallel=parallel, cache_ram="8MiB")
        sessions = [model.session() for _ in range(parallel)]
        for _ in range(1000 // 25):
            for session in sessions:
                run_sequence(session, some(rng, 25))
        assert [session.n_past for session in sessions] == [1000] * parallel
        n_bytes = planned(gemma, parallel=parallel, cache_ram="8MiB")[0]
        assert 0 < sessions[0].memory().windows < used(sessions[0]) <= n_bytes


def test_states_are_planned_for_the_texts_that_run(hybrid: Path, rng: np.random.Generator) -> None:
    with ModelFile.open(hybrid) as file:
        spec, backend = read_spec(file), NativeBackend()
        uses = [backend.plan(file, spec, LoadSettings(1024, n_batch=64, parallel=n)).use for n in (1, 3)]
    assert 0 < 3 * uses[0].states == uses[1].states <= uses[1].kv_cache
    model = load(hybrid, n_batch=64, parallel=3)
    sessions = [model.session() for _ in range(3)]
    for _ in range(5):
        model.forward([Rows(session, some(rng, 20)) for session in sessions])  # of which less is kept than can be
        for session in sessions:
            session.commit(range(int(rng.integers(20))))
            run_sequence(session, some(rng, 50))
    use = sessions[0].memory()
    assert uses[1].states / 3 < use.states <= uses[1].states
    assert (use.kv_cache > use.states) == (uses[1].kv_cache > uses[1].states)


def test_a_text_that_runs_takes_the_place_of_states_that_are_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    model = load(write_hybrid(tmp_path, "states"), 512, 64)  # 18 states
    session, texts = model.session(), [some(rng, 128) for _ in range(20)]
    for text in texts:
        run_sequence(session, text)
        session.park()
    parked = model._shared().core.parked()
    assert 0 < len(parked) < 20 and parked == list(range(20 - len(parked), 20))
    assert [session.reuse_prefix([*text, 0]) for text in texts[:-1]][-2:] == [128, 128]
    session.close()
    others = [model.session() for _ in range(30)]
    with pytest.raises(CacheFull):
        for other in others:
            run_sequence(other, texts[0])
    assert model._shared().core.parked() == []
    n_read = sum(other.n_past == 128 for other in others)
    assert 8 <= n_read < 18
    for other in others[:n_read]:
        other.reuse_prefix([7])
        assert other.n_past == 0
    assert others[-1].has_room(512)


def windowed(window: int, n_ctx: int, n_batch: int) -> _core.DecoderConfig:
    """Sizes of a model whose layers all have windows."""
    config = _core.DecoderConfig(n_vocab=8, n_logits=8, n_embd=32, n_ctx=n_ctx, n_batch=n_batch, norm_epsilon=1e-5)
    attention = _core.AttentionConfig(
        n_in=32,
        n_heads=1,
        n_kv_heads=1,
        head_dim=32,
        rope=-1,
        query_scales=0,
        window=window,
        soft_cap=0.0,
        qk_norm=_core.QKNorm.none,
        key_bias=False,
    )
    config.add_layer(attention, _core.DenseConfig(n_ff=32, activation=_core.Activation.silu))
    return config


@pytest.mark.parametrize("window, n_batch", [(1, 1), (20, 32), (128, 128), (129, 1), (300, 100), (257, 512)])
def test_windows_are_planned_for_the_texts_that_run(window: int, n_batch: int) -> None:
    n_ctx = 20_000
    config = windowed(window, n_ctx, n_batch)
    each = config.kv_bytes(_core.KvType.f16, n_ctx)
    for n in (1, 3, 8):
        pool = _core.SequencePool(config, _core.KvType.f16, n_ctx, n, n_ctx + SEGMENT * (n - 1))
        assert config.kv_bytes(_core.KvType.f16, n_ctx, n, n_ctx + SEGMENT * (n - 1)) == n * each
        states = [_core.SequenceState(pool) for _ in range(n + 1)]
        assert pool.has_free([(state, n_ctx) for state in states[:n]], True)
        assert not pool.has_free([(state, n_ctx) for state in states], True)
        assert pool.used_bytes == 0


def test_a_full_cache_leaves_all_texts_as_they_are(llama: Path, rng: np.random.Generator) -> None:
    model = load(llama, 512, parallel=2)  # 5 segments
    first, second, third = (model.session() for _ in range(3))
    texts = [some(rng, 256), some(rng, 250), some(rng, 100)]
    for session, text in zip((first, second, third), texts, strict=True):
        run_sequence(session, text)
    nodes = some(rng, 3)
    second.forward(nodes, [-1, 0, 0])
    rows = [Rows(second, [4], [1], n_pending=3), Rows(third, [1]), Rows(first, [2])]
    assert not model.has_room([(second, 4), (third, 1), (first, 1)]) and model.has_room([(second, 4), (third, 1)])
    calls: list[Callable[[], object]] = [
        lambda: model.forward(rows),
        lambda: first.forward([2]),
        lambda: first.forward([2], logits=[0]),  # what Python checks
        lambda: first.forward(some(rng, 200)),  # in several passes
        lambda: model.forward([*rows[:2], Rows(first, np.array([2]), logits=[0, 0])]),
    ]
    for call in calls:
        with pytest.raises(CacheFull):
            call()
    assert [session.n_past for session in (first, second, third)] == [256, 250, 100]
    second.commit([0, 2])
    assert same_bits(second.forward([1]).logits, after(model, [*texts[1], nodes[0], nodes[2]], [1]))
    assert same_bits(third.forward([1]).logits, after(model, texts[2], [1]))
    third.close()
    assert model.has_room([(second, 4), (first, 1)])
    assert same_bits(first.forward([1]).logits, after(model, texts[0], [1]))


def test_a_full_cache_forgets_no_parked_text_in_vain(llama: Path, rng: np.random.Generator) -> None:
    model = load(llama, 512, parallel=2)  # 5 segments
    first, second, parked = model.session(), model.session(), some(rng, 100)
    run_sequence(first, parked)
    first.park()
    run_sequence(first, some(rng, 500))
    second.forward([1, 2])  # in place of the parked one
    assert second.reuse_prefix(parked) == 0
    run_sequence(second, parked)
    third = model.session()
    second.park()
    with pytest.raises(CacheFull):
        model.forward([Rows(second, [1]), Rows(third, [1])])
    assert third.reuse_prefix([*parked, 1]) == 100


def test_what_has_room_says_is_what_a_pass_does(
    rng: np.random.Generator, llama: Path, gemma: Path, tmp_path: Path
) -> None:
    for path in (llama, gemma, write_hybrid(tmp_path, "qwen35")):
        model = load(path, 512, parallel=3)
        sessions, said = [model.session() for _ in range(4)], set()
        for turn in range(300):
            session = sessions[int(rng.integers(4))]
            chosen = [one for one in sessions if rng.random() < 0.5 and one.n_past + 9 <= 512] or [session]
            wants = [(one, int(rng.integers(1, 9))) for one in chosen if one.n_past + 9 <= 512]
            expected = not wants or model.has_room(wants)
            parked = model._shared().core.parked()
            assert parked == model._shared().core.parked()
            try:
                if wants:
                    model.forward([Rows(one, some(rng, n)) for one, n in wants])
                found = True
            except CacheFull:
                found = False
            assert found == expected
            said.add(found)
            for one, n in wants if found else ():
                one.commit(range(n))
            if turn % 7 == 0:
                session.reuse_prefix(some(rng, 3))
            if turn % 5 == 0:
                donor = sessions[int(rng.integers(4))].held
                assert donor is not None
                session.reuse_prefix([*donor[1], 1])
            if session.n_past > 400:
                session.park()
            elif session.n_past + 40 <= 512 and session.has_room(40):
                run_sequence(session, some(rng, 40))
        assert said == {True, False}


def test_what_has_room_says_of_states(tmp_path: Path, rng: np.random.Generator) -> None:
    """Also of what is committed in several passes."""
    model, said = load(write_hybrid(tmp_path, "states"), 512, 64), set()
    sessions = [model.session() for _ in range(16)]
    for _ in range(400):
        chosen = [one for one in sessions if rng.random() < 0.4 and one.n_past < 400]
        wants = [(one, int(rng.choice([1, 3, 50, 100]))) for one in chosen]
        parked = model._shared().core.parked()
        said.add(has_room := model.has_room(wants))
        assert parked == model._shared().core.parked()
        if has_room:
            for one, n in wants:
                run_sequence(one, some(rng, n))
        else:
            sessions[int(rng.integers(16))].park()
    assert said == {True, False}


def test_room_for_a_long_answer(llama: Path, gemma: Path, rng: np.random.Generator) -> None:
    for path in (llama, gemma):
        model = load(path, 1024, parallel=2)
        first, second = model.session(), model.session()
        assert first.has_room(1024) and not first.has_room(1025) and not first.has_room(2**40)
        assert model.has_room([(first, 1024), (second, 128)]) and not model.has_room([(first, 1024), (second, 129)])
        run_sequence(first, some(rng, 1024))
        assert second.has_room(128) and not second.has_room(129)
        run_sequence(second, some(rng, 128))
        assert not second.has_room(1) and second.has_room(0)
        first.park()
        assert second.has_room(896)
        run_sequence(second, some(rng, 896))


# ---- sessions come and go --------------------------------------------------------------------------------------------


def test_sessions_of_other_sizes_have_memory_of_their_own(llama: Path, rng: np.random.Generator) -> None:
    model, text = load(llama, 512, parallel=2), some(rng, 512)
    shared, others = model.session(), [model.session(512), model.session(600 - 100), model.session(cache_type="q8_0")]
    run_sequence(shared, text)
    for other in others:
        assert other.reuse_prefix(text) == 0
        run_sequence(other, text[:500])
    assert isinstance(model, PooledModel) and model.n_sequences == 2
    assert model.has_room([(shared, 0), (others[0], 12)]) and not model.has_room([(others[0], 13)])
    for n_ctx in (513, 0):
        with pytest.raises(InvalidArgument):
            model.session(n_ctx)


def test_a_session_that_is_gone_leaves_its_memory(llama: Path, rng: np.random.Generator) -> None:
    model = load(llama, 512)
    for close in (True, False):
        for _ in range(3):
            session = model.session()
            run_sequence(session, some(rng, 512))
            if close:
                session.close()
            del session
            gc.collect()
    assert model.session().has_room(512)
    closed = model.session()
    closed.close()
    closed.close()
    for call in (closed.park, lambda: closed.has_room(1), closed.memory, lambda: model.has_room([(closed, 1)])):
        with pytest.raises(EdgeInferError, match="closed"):
            call()
    model.close()
    with pytest.raises(EdgeInferError, match="closed"):
        model.session()


def test_sessions_may_go_while_a_pass_runs(llama: Path, rng: np.random.Generator) -> None:
    """In another thread, as where garbage is collected; one of the pass itself may be closed there too."""
    model = load(llama, 2048, 2048, parallel=4)
    text, ended = some(rng, 600), threading.Event()

    def open_and_leave() -> None:
        while not ended.is_set():
            session = model.session()
            if session.reuse_prefix(text[:200]) and session.n_past == 200:
                session.park()
            del session

    thread = threading.Thread(target=open_and_leave)
    first = model.session()
    run_sequence(first, text[:250])
    expected = after(model, text[:250], text[250:])
    thread.start()
    try:
        for _ in range(8):
            assert same_bits(first.forward(text[250:], logits="all").logits, expected)
            closed = model.session()
            closing = threading.Thread(target=closed.close)
            closing.start()
            try:
                closed.forward(text)
            except EdgeInferError:
                assert closed.held is None
            closing.join()
    finally:
        ended.set()
        thread.join()
    assert model.session().has_room(1500)


def test_a_hybrid_s_text_is_shared_while_a_pass_writes_to_its_state(hybrid: Path, rng: np.random.Generator) -> None:
    """Then an earlier state is what others find."""
    model, lone = load(hybrid, 512, 256, parallel=4), load(hybrid, 512, 512)
    text, ended, found = some(rng, 400), threading.Event(), []
    first = model.session()
    run_sequence(first, text[:250])

    def fork() -> None:
        is_over = False
        while not is_over:  # once at least
            is_over = ended.is_set()
            session = model.session()
            found.append((session.reuse_prefix(text), session.forward([5]).logits.copy()))
            session.close()

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        for at in range(250, 370):
            first.forward(text[at : at + 30])
            first.commit([0])
    finally:
        ended.set()
        thread.join()
    expected = {n: after(lone, text[:n], [5]) for n in {reached for reached, _ in found} | {370}}
    assert found and all(same_bits(logits, expected[reached]) for reached, logits in found)
    assert set(expected) <= {218, *range(249, 371)}
    assert same_bits(first.forward([5]).logits, expected[370])


def test_a_state_that_a_stopped_pass_left_half_done_is_nobody_else_s(hybrid: Path, rng: np.random.Generator) -> None:
    model, n_torn = load(hybrid, 512, 256, parallel=3), 0
    for _ in range(3000):  # passes are short, and few are stopped within one of these layers
        if n_torn > 2:
            break
        first, second, text = model.session(), model.session(), some(rng, 100)
        run_sequence(first, text)
        for token in text[:5]:
            run_sequence(first, [token])
        text += text[:5]
        try:
            with interrupted_every(0.0001, first):
                first.forward(some(rng, 30))
        except Interrupted:
            reached = second.reuse_prefix(text)
            assert reached in (68, 105)
            n_torn += (is_torn := reached == 68)
            assert same_bits(second.forward([5]).logits, after(model, text[:reached], [5]))
            assert first.reuse_prefix(text) == 105  # a request begins: the state that is half done is no checkpoint
            run_sequence(first, more := some(rng, 60))
            assert first.truncate(110) in ((68,) if is_torn else (104, 105))
            n = first.n_past
            assert same_bits(first.forward([5]).logits, after(model, [*text, *more][:n], [5]))
        first.close()
        second.close()
    assert n_torn > 2


def test_heads_have_memory_of_their_own(llama: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    target = load(llama, 128)
    with ModelFile.open(write_tiny_head(tmp_path / "h.gguf", llama)) as file:
        spec = read_head(file)
        head = load_head(file, spec, target, plan_head(file, spec, LoadSettings(128, n_batch=64)), Device(1))
    features = rng.standard_normal((100, spec.n_embd), dtype=np.float32)
    sessions = [head.session() for _ in range(3)]
    batch = [Rows(session, some(rng, 100), features=features) for session in sessions]
    assert [out.logits.shape[0] for out in head.forward(batch)] == [1, 1, 1]


# ---- logits of joint passes ------------------------------------------------------------------------------------------


def test_rows_that_somebody_has_are_not_overwritten(llama: Path, rng: np.random.Generator) -> None:
    model = load(llama, parallel=3)
    sessions, kept, copies = [model.session() for _ in range(3)], [], []
    for turn in range(12):
        batch = [Rows(session, some(rng, 1 + turn % 3), logits="all") for session in sessions]
        outputs = model.forward(batch)
        kept.append(outputs[turn % 3].logits[-1])
        copies.append(kept[-1].copy())
        for session in sessions:
            session.commit([0])
        if turn % 4 == 3:
            del kept[-3], copies[-3]
    assert all(map(np.array_equal, kept, copies))


def test_logits_that_nobody_has_leave_their_memory_to_the_next_pass(llama: Path) -> None:
    model = load(llama, parallel=2)
    sessions = [model.session(), model.session()]
    addresses = set()
    for _ in range(10):
        outputs = model.forward([Rows(session, [1, 2], logits="all") for session in sessions])
        addresses.add(outputs[0].logits.ctypes.data)
    assert len(addresses) <= 2
    [prompt, _] = model.forward([Rows(sessions[0], [1, 2, 3]), Rows(sessions[1], [1])])
    assert prompt.logits.base is None  # a request keeps it while it decodes


def test_a_text_that_needs_a_state_takes_checkpoints_of_others(tmp_path: Path, rng: np.random.Generator) -> None:
    """Four texts and four checkpoints. The first has all of these as long as nobody else needs a state."""
    model = load(write_hybrid(tmp_path, "states"), 1024, 64, parallel=4)
    with_large_states(model)
    texts = [some(rng, 640) for _ in range(4)]
    sessions = [model.session() for _ in range(4)]
    for at in range(0, 640, 64):
        run_sequence(sessions[0], texts[0][at : at + 64])
    alone = {sessions[0].held[0].reach(n) for n in range(0, 639)} - {0}  # type: ignore[index]
    assert len(alone) == 4
    for session, text in zip(sessions[1:], texts[1:], strict=True):
        for at in range(0, 640, 64):
            run_sequence(session, text[at : at + 64])
    n_left = [len({session.held[0].reach(n) for n in range(0, 639)} - {0}) for session in sessions]  # type: ignore
    assert 0 < min(n_left) and n_left[0] < 4
    last = [some(rng, 64) for _ in texts]
    outputs = model.forward([Rows(session, each, logits="all") for session, each in zip(sessions, last, strict=True)])
    for text, each, output in zip(texts, last, outputs, strict=True):
        assert same_bits(output.logits, after(model, text, each))


def test_trees_of_large_states_have_16_tokens_and_longer_chains_any_number(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = load(write_hybrid(tmp_path, "qwen35"), 512, 64)
    with_large_states(model)
    session, text = model.session(), some(rng, 40)
    run_sequence(session, text)
    with pytest.raises(ShapeError, match="recurrent layers, so a tree must fit into 16 tokens"):
        session.forward(some(rng, 17), [-1] * 17)
    nodes, parents = some(rng, 16), [-1, *(int(rng.integers(-1, i)) for i in range(1, 16))]
    found = session.forward(nodes, parents, logits="all").logits.copy()
    for node in range(16):
        branch = branch_to(node, parents)
        assert same_bits(found[branch], after(model, text, [nodes[row] for row in branch]))
    branch = branch_to(15, parents)
    session.commit(branch)
    text += [nodes[row] for row in branch]
    for n in (16, 17, 20, 32, 33):
        chain = some(rng, n)
        assert same_bits(session.forward(chain, logits="all").logits, after(model, text, chain))
        session.commit(range(n - 3))  # a part of a chain, of which there are rows or none
        text += chain[: n - 3]
    assert same_bits(session.forward([7]).logits, after(model, text, [7]))
