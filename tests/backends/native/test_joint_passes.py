"""Rows of several texts in one pass: each text gets the bits that it gets alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from exactness import LEAVES, TREE, branch_to, same_bits
from tiny_experts import write_tiny_experts
from tiny_heads import write_tiny_eagle3, write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.base import Rows
from edgeinfer.backends.native import NativeBackend, NativeModel, available_isas, load_head, plan_head
from edgeinfer.backends.native.passes import Piece, cut
from edgeinfer.common.errors import ContextOverflow, EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device, Output
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile

N_CTX, N_VOCAB, N_STEPS = 256, 290, 6


@dataclass(frozen=True)
class Step:
    """A forward of a text, the rows of it that are committed, and how many tokens are forgotten then."""

    tokens: np.ndarray
    parents: np.ndarray | None
    kept: Sequence[int]
    n_forgotten: int
    features: np.ndarray | None = None

    def rows(self, session: Any) -> Rows:
        hidden = (0, -1) if self.features is None else False
        return Rows(session, self.tokens, self.parents, "all", hidden, features=self.features)

    def keep(self, session: Any) -> None:
        session.commit(list(self.kept))
        if self.n_forgotten:
            session.truncate(max(0, session.n_past - self.n_forgotten))


def some_step(rng: np.random.Generator, most: int, n_embd: int | None) -> Step:
    """A prompt, a tree or a single token."""
    kind = rng.integers(3)
    n, parents = {0: (int(rng.integers(2, most)), None), 1: (len(TREE), TREE), 2: (1, None)}[int(kind)]
    kept = branch_to(int(rng.choice(LEAVES)), TREE) if parents is not None else range(int(rng.integers(n + 1)))
    features = None if n_embd is None else rng.standard_normal((n, n_embd), dtype=np.float32)
    n_forgotten = int(rng.integers(1, 6)) if rng.random() < 0.3 else 0
    return Step(rng.integers(0, N_VOCAB, n).astype(np.int32), parents, list(kept), n_forgotten, features)


def alone(session: Any, steps: Sequence[Step]) -> list[Output]:
    outputs = []
    for step in steps:
        outputs += session.model.forward([step.rows(session)])
        step.keep(session)
    return outputs


def together(sessions: Sequence[Any], steps: Sequence[Sequence[Step]]) -> list[list[Output]]:
    """The outputs of each text; in each turn all of them are in one batch."""
    outputs: list[list[Output]] = [[] for _ in sessions]
    for turn in range(N_STEPS):
        batch = [of_text[turn].rows(session) for session, of_text in zip(sessions, steps, strict=True)]
        for text, output in enumerate(sessions[0].model.forward(batch)):
            outputs[text].append(output)
            steps[text][turn].keep(sessions[text])
    return outputs


def check(model: Any, n_texts: int, rng: np.random.Generator, most: int = 24, n_embd: int | None = None) -> None:
    steps = [[some_step(rng, most, n_embd) for _ in range(N_STEPS)] for _ in range(n_texts)]
    expected = [alone(model.session(), of_text) for of_text in steps]
    found = together([model.session() for _ in range(n_texts)], steps)
    for text in range(n_texts):
        for turn, (ours, theirs) in enumerate(zip(found[text], expected[text], strict=True)):
            assert same_bits(ours.logits, theirs.logits), (n_texts, text, turn)
            assert ours.hidden is not None and theirs.hidden is not None
            assert same_bits(ours.hidden, theirs.hidden), (n_texts, text, turn)


def load(
    path: Path, n_threads: int = 2, isa: str | None = None, n_batch: int = 256, cache_type: CacheType = "f16"
) -> NativeModel:
    file, backend = ModelFile.open(path), NativeBackend(tuned=False)
    spec = read_spec(file)
    settings = LoadSettings(N_CTX, n_batch=n_batch, n_threads=n_threads, cache_type=cache_type)
    settings = replace(settings, parallel=16, cache_ram="16MiB")
    return backend.load(file, spec, backend.plan(file, spec, settings), Device(n_threads, isa))


@pytest.mark.parametrize("cache_type", get_args(CacheType))
@pytest.mark.parametrize("architecture, format", [("qwen2", "Q4_K"), ("gemma3", "Q8_0"), ("llama", "F16")])
def test_each_text_has_the_bits_that_it_has_alone(
    architecture: Any, format: str, cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    head_dim = 64 if format == "Q4_K" else 32
    model = load(write_tiny_model(tmp_path / "m.gguf", architecture, format, head_dim=head_dim), cache_type=cache_type)
    for n_texts in range(1, 9):
        check(model, n_texts, rng)


@pytest.mark.parametrize("architecture, format", [("qwen2moe", "Q4_K"), ("gpt-oss", "MXFP4"), ("glm4moe", "F16")])
def test_texts_that_need_other_experts_share_a_pass(
    architecture: Any, format: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", architecture, format, n_experts=12)
    for n_texts, n_threads in ((1, 1), (3, 2), (8, 3)):
        check(load(path, n_threads), n_texts, rng)
    check(load(path, n_batch=len(TREE)), 5, rng, most=40)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_and_instruction_sets_change_nothing(
    isa: str, n_threads: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    for architecture in ("qwen2", "gemma2"):
        path = write_tiny_model(tmp_path / f"{architecture}.gguf", architecture, "Q4_K")
        check(load(path, n_threads, isa), 5, rng)


def test_batches_of_more_rows_than_a_pass_has_are_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    model = load(write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0"), n_batch=len(TREE))
    for n_texts in (1, 3, 8):
        check(model, n_texts, rng, most=40)


def test_texts_of_several_sizes_and_kinds_of_cache_share_a_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    model = load(write_tiny_model(tmp_path / "m.gguf", "qwen2", "F16", head_dim=32))
    kinds: list[tuple[int, CacheType]] = [(N_CTX, "f16"), (40, "q8_0"), (N_CTX, "k6v4"), (40, "f16"), (40, "k6v4")]
    text = rng.integers(0, N_VOCAB, 30).astype(np.int32)
    expected = [model.session(*kind).forward(text, logits="all").logits for kind in kinds]
    batch = [Rows(model.session(*kind), text, logits="all") for kind in kinds]
    for output, logits in zip(model.forward(batch), expected, strict=True):
        assert same_bits(output.logits, logits)
    assert same_bits(expected[0], expected[3]) and not same_bits(expected[0], expected[1])
    assert same_bits(expected[2], expected[4]) and not same_bits(expected[1], expected[2])


def test_rows_after_pending_ones_may_join_a_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    model = load(write_tiny_model(tmp_path / "m.gguf", "qwen2", "Q4_K"))
    nodes = rng.integers(0, N_VOCAB, len(TREE)).astype(np.int32)
    expected = model.session().forward(nodes, TREE, logits="all").logits
    growing, other = model.session(), model.session()
    logits = [growing.forward(nodes[:4], TREE[:4], logits="all").logits]
    for first, last in ((4, 8), (8, 13)):
        rows = Rows(growing, nodes[first:last], TREE[first:last], "all", n_pending=first)
        ours, _ = model.forward([rows, Rows(other, nodes)])
        logits.append(ours.logits)
    assert same_bits(np.concatenate(logits), expected)
    growing.commit(branch_to(7, TREE))
    assert growing.n_past == len(branch_to(7, TREE)) and other.n_past == 0


def test_each_text_gets_the_rows_of_logits_and_the_layers_that_it_asks_for(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = load(write_tiny_model(tmp_path / "m.gguf", "llama", "F16", n_layers=3), n_batch=16)
    tokens = rng.integers(0, N_VOCAB, 12).astype(np.int32)
    requested: list[tuple[Any, Any]] = [([7, 2, 7], False), ("last", True), ([], (1,)), ("all", (2, 0))]
    expected = [model.session().forward(tokens, logits=rows, hidden=hidden) for rows, hidden in requested]
    batch = [Rows(model.session(), tokens, None, rows, hidden) for rows, hidden in requested]
    for ours, theirs in zip(model.forward(batch), expected, strict=True):
        assert same_bits(ours.logits, theirs.logits)
        assert (ours.hidden is None) == (theirs.hidden is None)
        if ours.hidden is not None and theirs.hidden is not None:
            assert same_bits(ours.hidden, theirs.hidden)


@pytest.mark.parametrize("kind", [0, 2, "eagle3"])
def test_texts_of_draft_heads_share_passes_too(kind: int | str, tmp_path: Path, rng: np.random.Generator) -> None:
    target = write_tiny_model(tmp_path / "m.gguf", "llama", "F16", n_embd=96)
    if kind == "eagle3":
        path = write_tiny_eagle3(tmp_path / "h.gguf", target)
    else:
        path = write_tiny_head(tmp_path / "h.gguf", target, n_layers=int(kind))
    file, model = ModelFile.open(path), load(target)
    spec = read_head(file)
    head = load_head(file, spec, model, plan_head(file, spec, LoadSettings(N_CTX, n_batch=64, n_threads=2)), Device(2))
    for n_texts in (1, 4, 8):
        check(head, n_texts, rng, n_embd=96)


def test_what_does_not_belong_into_a_pass_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    model, other = load(path), load(path)
    session = model.session()
    for batch, reason in (
        ([], "at least one session"),
        ([Rows(session, [1]), Rows(session, [2])], "a session may come once"),
        ([Rows(session, [1]), Rows(other.session(), [2])], "sessions of the model that runs it"),
        ([Rows(session, [1], features=np.zeros((1, 64), np.float32))], "only rows of draft heads"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            model.forward(batch)
    with pytest.raises(ContextOverflow):
        model.forward([Rows(session, [1]), Rows(model.session(3), [1, 2, 3, 4])])
    with pytest.raises(ShapeError, match="token ids"):
        model.forward([Rows(session, [1]), Rows(model.session(), [-1])])
    for size in (257, 0, "x", True):
        with pytest.raises(InvalidArgument, match=rf"n_ctx of a session must be .* 1\.\.256: found {size!r}"):
            model.session(size)
    for cache_type in ("q4", "", 8):
        with pytest.raises(InvalidArgument, match="cache_type must be"):
            model.session(cache_type=cache_type)
    assert session.n_past == 0
    model.close()
    with pytest.raises(EdgeInferError, match="this model is closed"):
        session.forward([1])


def test_passes_are_filled_in_order_and_trees_stay_whole() -> None:
    chain, tree = True, False
    assert list(cut([(3, chain), (4, tree)], 8)) == [[Piece(0, 0, 3), Piece(1, 0, 4)]]
    assert list(cut([(5, chain), (4, tree), (9, chain)], 8)) == [
        [Piece(0, 0, 5)],
        [Piece(1, 0, 4), Piece(2, 0, 4)],
        [Piece(2, 4, 9)],
    ]
    assert list(cut([(20, chain)], 8)) == [[Piece(0, 0, 8)], [Piece(0, 8, 16)], [Piece(0, 16, 20)]]
    assert list(cut([(8, tree), (8, tree)], 8)) == [[Piece(0, 0, 8)], [Piece(1, 0, 8)]]
