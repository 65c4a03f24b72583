"""Experts that only rejected drafts needed: their recency is as if these had never been in the pass."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tiny_experts import write_tiny_experts

from edgeinfer.backends.base import Rows
from edgeinfer.backends.native import NativeBackend, NativeModel, _core
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_VOCAB = 291


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("experts") / "model.gguf", n_experts=16, n_used=2)


@pytest.fixture
def model(path: Path) -> Iterator[NativeModel]:
    backend = NativeBackend(tuned=False)
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        n_bytes = backend.expert_sizes(file, spec).total // 2
        model = backend.load(
            file,
            spec,
            backend.plan(file, spec, LoadSettings(256, n_batch=32, n_threads=2, expert_cache=n_bytes, parallel=3)),
            Device(2),
        )
        yield model
        model.close()


@dataclass
class Recency:
    """The pass that needed each (layer, expert) last, as the rows say that were not rejected."""

    model: NativeModel
    n_passes: int = 0
    last: dict[tuple[int, int], int] = field(default_factory=dict)
    n_forgotten: int = 0

    def passed(self, kept: Sequence[int]) -> None:
        """A pass is over; these of its rows were not rejected. What the cache says must be the same."""
        self.n_passes += 1
        needed: set[tuple[int, int]] = set()
        for layer, of_rows in enumerate(self.model.routing()):
            of_kept = {(layer, expert) for expert in of_rows[list(kept)].reshape(-1).tolist()}
            self.last |= dict.fromkeys(of_kept, self.n_passes)
            needed |= {(layer, expert) for expert in of_rows.reshape(-1).tolist()} - of_kept
        self.n_forgotten += len(needed)
        assert self.found() == self.last

    def found(self) -> dict[tuple[int, int], int]:
        store = self.model._experts
        assert isinstance(store, _core.DiskExperts)
        places = [(i, e) for i in range(len(store.record_bytes)) for e in range(store.presence().shape[1])]
        return {place: last for place in places if (last := store.last_use(*place))}


def tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(N_VOCAB) for _ in range(n)]


def tree(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    """Parents of n rows, and a path from the first one, or none."""
    parents = [-1, *(rng.randint(0, row - 1) for row in range(1, n))]
    path = [rng.randrange(n)]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return parents, path if rng.random() < 0.8 else []


@pytest.mark.parametrize("seed", range(3))
def test_a_rejected_branch_leaves_recency_as_it_was(model: NativeModel, seed: int) -> None:
    rng, session, recency = random.Random(seed), model.session(), Recency(model)
    for _ in range(20):
        parents, path = tree(rng, rng.randint(1, 6))
        session.forward(tokens(rng, len(parents)), parents, logits="all")
        session.commit(path)
        recency.passed(path)
    assert recency.n_forgotten > 20


@pytest.mark.parametrize("seed", range(3))
def test_what_another_text_of_the_pass_needs_stays_recent(model: NativeModel, seed: int) -> None:
    rng, texts, recency = random.Random(seed), [model.session() for _ in range(3)], Recency(model)
    for _ in range(12):
        trees = [tree(rng, rng.randint(1, 5)) for _ in texts]
        model.forward([Rows(text, tokens(rng, len(p)), p) for text, (p, _) in zip(texts, trees, strict=True)])
        firsts = [sum(len(p) for p, _ in trees[:i]) for i in range(len(trees))]
        for i in rng.sample(range(len(texts)), len(texts)):
            texts[i].commit(trees[i][1])
        recency.passed([first + row for first, (_, path) in zip(firsts, trees, strict=True) for row in path])
    assert recency.n_forgotten > 20


def test_rows_of_a_text_that_did_not_commit_yet_count_as_kept(model: NativeModel) -> None:
    rng, one, other = random.Random(1), model.session(), model.session()
    model.forward([Rows(one, tokens(rng, 3), [-1, 0, 0]), Rows(other, tokens(rng, 2), [-1, 0])])
    one.commit([0])
    recency = Recency(model)
    recency.passed([0, 3, 4])
    other.commit([0])
    recency = Recency(model)
    recency.passed([0, 3])


def test_a_pass_in_between_ends_what_can_be_forgotten(model: NativeModel) -> None:
    rng, one, other = random.Random(2), model.session(), model.session()
    recency = Recency(model)
    one.forward(tokens(rng, 4), [-1, 0, 0, 0], logits="all")
    recency.passed(range(4))
    other.forward(tokens(rng, 2), logits="all")
    recency.passed(range(2))
    one.commit([0])
    assert recency.found() == recency.last


def test_pending_rows_of_earlier_passes_are_not_mistaken_for_those_of_the_last(model: NativeModel) -> None:
    rng, session, recency = random.Random(3), model.session(), Recency(model)
    session.forward(tokens(rng, 2), [-1, 0], logits="all")
    recency.passed(range(2))
    session.forward(tokens(rng, 3), [0, 1, 3], n_pending=2, logits="all")
    session.commit([0, 1, 3])
    recency.passed([1])
