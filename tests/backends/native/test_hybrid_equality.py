"""Recurrent layers, `==` all along: every pass against one token at a time, three seeds of a text each.

The models have experts or not, all in memory or a quarter of them in a cache. What sessions did before, and drafters,
are in test_hybrids.py, tests/edgeinfer/speculation/test_hybrid_texts.py and test_own_block.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import branch_to, same_bits
from tiny_hybrids import HYBRID_ARCHITECTURES, HybridArchitecture, write_tiny_hybrid

from edgeinfer.backends.base import Rows, run_sequence
from edgeinfer.backends.native import NativeBackend, NativeModel, NativeSession
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, Logits
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_CTX, N_BATCH, N_PROMPT = 1024, 512, 40
SEEDS = (1, 2, 3)
MODELS: dict[str, HybridArchitecture] = {
    **{name: name for name in ("qwen35", "qwen35moe", "lfm2", "lfm2moe")},
    **{f"{name} cached": name for name in ("qwen35moe", "lfm2moe")},
}


@dataclass
class Model:
    """A tiny model, and texts with their logits, decoded one token at a time."""

    file: ModelFile
    is_cached: bool
    known: dict[int, tuple[list[int], Logits]] = field(default_factory=dict)

    def load(self, n_threads: int = 2, **settings: Any) -> NativeModel:
        backend, spec = NativeBackend(tuned=False), read_spec(self.file)
        if self.is_cached:
            sizes = backend.expert_sizes(self.file, spec)
            settings["expert_cache"] = max(sizes.total // 4, sizes.least)
        plan = backend.plan(
            self.file, spec, LoadSettings(N_CTX, **{"n_batch": N_BATCH, "n_threads": n_threads, **settings})
        )
        return backend.load(self.file, spec, plan, Device(n_threads))

    def text(self, seed: int) -> tuple[list[int], Logits]:
        """Tokens (n,) and the logits after each, (n, n_vocab)."""
        if seed not in self.known:
            tokens = some_tokens(np.random.default_rng(seed), N_PROMPT + N_BATCH)
            with opened(self.load(n_threads=1)) as session:
                logits = [one_by_one(session, [token]) for token in tokens]
            self.known[seed] = tokens, np.concatenate(logits)
        return self.known[seed]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "m.gguf", MODELS[request.param], "Q8_0")
    with ModelFile.open(path) as file:
        yield Model(file, request.param.endswith("cached"))


@contextmanager
def opened(model: NativeModel) -> Iterator[NativeSession]:
    session = model.session()
    yield session
    session.close()
    model.close()


def some_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 291, n)]


def one_by_one(session: NativeSession, tokens: Sequence[int]) -> Logits:
    logits = []
    for token in tokens:
        logits.append(session.forward([token]).logits.copy())
        session.commit([0])
    return np.concatenate(logits)


def read(session: NativeSession, tokens: Sequence[int]) -> Logits:
    """All logits of tokens, which are committed."""
    return run_sequence(session, tokens, logits="all").logits.copy()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_passes_of_1_to_512_tokens(model: Model, seed: int, n_threads: int) -> None:
    tokens, expected = model.text(seed)
    rng = np.random.default_rng([seed, n_threads])
    sizes = {*range(1, 34), 64, 65, 128, 257, 511, 512, *rng.integers(34, 512, 3).tolist()}
    with opened(model.load(n_threads)) as session:
        read(session, tokens[:N_PROMPT])
        differing = []
        for n in sorted(sizes):
            found = session.forward(tokens[N_PROMPT : N_PROMPT + n], logits="all").logits
            if not same_bits(found, expected[N_PROMPT : N_PROMPT + n]):
                differing.append(n)
    assert differing == []


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks(model: Model, seed: int) -> None:
    """Committed chunks of random sizes, with other threads; and passes that a smaller batch cuts."""
    tokens, expected = model.text(seed)
    rng = np.random.default_rng(seed)
    for n_threads, n_batch in ((1, 17), (2, 128), (3, N_BATCH)):
        with opened(model.load(n_threads, n_batch=n_batch)) as session:
            found, at = [], 0
            while at < len(tokens):
                chunk = tokens[at : at + int(rng.choice([1, 3, 31, 32, 33, 100, 300]))]
                found.append(session.forward(chunk, logits="all").logits.copy())
                session.commit(range(len(chunk)))
                at += len(chunk)
        assert same_bits(np.concatenate(found), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_of_2_to_32_nodes(model: Model, seed: int) -> None:
    """Each node as the last token of its branch; then a branch is committed, and the text goes on."""
    rng = np.random.default_rng(seed)
    loaded = model.load(parallel=2)
    session, alone = loaded.session(), loaded.session()
    text = some_tokens(rng, N_PROMPT)
    read(session, text)
    for n in range(2, 33):
        nodes, parents = some_tokens(rng, n), [int(rng.integers(max(-1, i - 5), i)) for i in range(n)]
        found = session.forward(nodes, parents, logits="all").logits.copy()
        alone.truncate(0)
        read(alone, text)
        for leaf in sorted(set(range(n)) - set(parents)):
            branch = branch_to(leaf, parents)
            expected = alone.forward([nodes[row] for row in branch], logits="all").logits
            assert same_bits(found[branch], expected), (n, leaf)
        branch = branch_to(int(rng.integers(n)), parents)
        session.forward(nodes, parents)
        session.commit(branch)
        text += [nodes[row] for row in branch]
    alone.truncate(0)
    assert same_bits(one_by_one(session, text[:9]), read(alone, [*text, *text[:9]])[-9:])
    loaded.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_and_resumed_at_50_places(model: Model, seed: int) -> None:
    tokens, expected = model.text(seed)
    rng = np.random.default_rng(seed)
    reached = set()
    with opened(model.load()) as session:
        for _ in range(50):
            end = int(rng.integers(session.n_past, len(tokens) + 1))
            found = read(session, tokens[session.n_past : end])
            assert same_bits(found, expected[end - len(found) : end])
            place = int(rng.integers(session.n_past + 1))
            left = session.truncate(max(place, session.n_past - int(rng.integers(1, 80))))
            reached.add(left)
            assert session.n_past == left
        found = one_by_one(session, tokens[left : left + 4])
        assert same_bits(found, expected[left : left + len(found)])
    assert len(reached) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_forks(model: Model, seed: int) -> None:
    """Texts that begin as another one share its states; each goes on by itself, and the first as if they were not."""
    tokens, expected = model.text(seed)
    rng = np.random.default_rng(seed)
    loaded = model.load(parallel=4, cache_ram="8MiB")
    first, alone = loaded.session(), loaded.session(N_CTX)
    n_shared = 0
    for end in sorted(rng.integers(N_PROMPT, len(tokens) - 60, 4).tolist()):
        first.reuse_prefix(tokens[:end])
        found = read(first, tokens[first.n_past : end])
        assert same_bits(found, expected[end - len(found) : end])
        other, more = loaded.session(), some_tokens(rng, 40)
        n_reached = other.reuse_prefix([*tokens[:end], *more[:-1]])
        n_shared += n_reached
        found = read(other, [*tokens[n_reached:end], *more])
        alone.truncate(0)
        assert same_bits(found, read(alone, [*tokens[:end], *more])[n_reached:])
        assert same_bits(one_by_one(first, tokens[end : end + 3]), expected[end : end + 3])
        other.park()
        other.close()
    assert n_shared > 0
    loaded.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_eight_texts_in_one_pass(model: Model, seed: int) -> None:
    """Chains and trees of any sizes together, each row as if the text were alone."""
    rng = np.random.default_rng(seed)
    loaded = model.load(parallel=8)
    sessions, alone = [loaded.session() for _ in range(8)], loaded.session(N_CTX)
    texts = [some_tokens(rng, int(rng.integers(1, 60))) for _ in sessions]
    loaded.forward([Rows(session, text) for session, text in zip(sessions, texts, strict=True)])
    for session, text in zip(sessions, texts, strict=True):
        session.commit(range(len(text)))
    for _ in range(3):
        batch, branches = [], []
        for session in sessions:
            n = int(rng.integers(1, 33))
            tokens, parents = some_tokens(rng, n), [int(rng.integers(max(-1, i - 4), i)) for i in range(n)]
            batch.append(Rows(session, tokens, parents, "all"))
            branches.append(branch_to(int(rng.integers(n)), parents))
        outputs = loaded.forward(batch)
        for text, rows, branch, output in zip(texts, batch, branches, outputs, strict=True):
            more = [int(np.asarray(rows.tokens)[row]) for row in branch]
            alone.truncate(0)
            assert same_bits(np.ascontiguousarray(output.logits[branch]), read(alone, text + more)[len(text) :])
            rows.session.commit(branch)
            text += more
    loaded.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("architecture", HYBRID_ARCHITECTURES)
def test_a_layer_differs_from_the_textbook_s_order_by_rounding_alone(
    architecture: HybridArchitecture, seed: int, tmp_path: Path
) -> None:
    """What the first layer, a recurrent one, gives for 100 tokens, in one pass, beside numpy's."""
    tokens, found = np.random.default_rng(seed).integers(0, 291, 100), []
    with ModelFile.open(write_tiny_hybrid(tmp_path / "m.gguf", architecture, seed=seed)) as file:
        spec = read_spec(file)
        for backend in (NativeBackend(tuned=False), ReferenceBackend()):
            session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(128)), Device(1)).session()
            hidden = session.forward(tokens, hidden=[0]).hidden
            assert hidden is not None
            found.append(hidden[0])
    assert np.abs(found[0] - found[1]).max() < 1e-6 * np.abs(found[1]).max()
