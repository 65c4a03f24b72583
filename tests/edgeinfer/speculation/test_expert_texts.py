"""Speculation on tiny models with experts: with drafts and a cache of any size, text and logits are those without."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import PROMPT, FixedCosts, FunctionDrafter, knowing, tokens_of, with_drafters
from exactness import same_bits
from numpy.typing import NDArray
from tiny_experts import write_tiny_experts
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.native import NativeBackend, NativeSession
from edgeinfer.engine import Engine
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.speculation.expert_cost import ExpertCostModel
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.expert_passes import PassExperts
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.policy import VerifyTree
from edgeinfer.speculation.tree import DraftTree

REQUESTS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}]
SHARES = ("least", "25%", "50%", None)
N = 40

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("model") / "model.gguf", n_experts=16, n_used=2, n_ctx_train=256)


def cache_of(model: Path, share: str | None) -> str | int | None:
    if share != "least":
        return share
    backend = NativeBackend(tuned=False)
    with ModelFile.open(model) as file:
        return backend.expert_sizes(file, read_spec(file)).least


class Answer:
    """The tokens of an answer, and the logits of each of its rows."""

    def __init__(self, engine: Engine, request: dict[str, Any], prompt: str = PROMPT) -> None:
        session, rows, pending = engine.session, [], []
        forward, commit = session.forward, session.commit

        def watched(tokens: Any, *arguments: Any, **options: Any) -> Any:
            out = forward(tokens, *arguments, **options)
            pending[:] = [out.logits] if len(out.logits) == len(tokens) else []
            return out

        def committed(path: Any) -> None:
            rows.extend(logits[list(path)] for logits in pending)
            commit(path)

        session.forward, session.commit = watched, committed  # type: ignore[method-assign]
        session.truncate(0)
        completion = engine.generate(prompt, max_tokens=N, **request)
        del session.forward, session.commit
        assert isinstance(completion.tokens, tuple)
        self.tokens, self.speculation = completion.tokens, completion.timings.speculation
        self.logits: NDArray[np.float32] = np.concatenate(rows)[-(N - 1) :]

    def check(self, other: "Answer") -> None:
        assert self.tokens == other.tokens
        assert same_bits(self.logits, other.logits)


class Waiting:
    """Passes that wait long for the disk."""

    is_cached, disk_ms, byte_share = True, 50.0, 0.5

    def last(self) -> PassExperts:
        return PassExperts(1.0, 0.2, 10.0)


class SlowExperts(ExpertCostModel):
    """Costs that stay, and waits that are learnt."""

    def observe(self, n: int, n_past: int, milliseconds: float, is_disturbed: bool = False) -> None:
        super().observe(n, n_past, self.milliseconds(n_past)[n] - self._expected_wait(n) + 10.0)


def chain(tokens: list[int], p: float) -> DraftTree:
    n = len(tokens)
    return DraftTree(tokens, list(range(-1, n - 1)), [p] * n, [0] * n)


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[Answer]]:
    with edgeinfer.load(model, draft="none", expert_cache=None) as engine:
        engine.tokenizer.stop_ids = frozenset()
        yield [Answer(engine, request) for request in REQUESTS]


@pytest.mark.parametrize("share", SHARES)
def test_free_drafts_change_neither_text_nor_logits(
    opened: Callable[..., Engine], model: Path, expected: list[Answer], share: str | None
) -> None:
    engine = opened(model, expert_cache=cache_of(model, share))
    n_accepted = 0
    for _ in range(2):  # the second time they copy the first answer
        for request, answer in zip(REQUESTS, expected, strict=True):
            found = Answer(engine, request)
            found.check(answer)
            assert found.speculation is not None and found.speculation.dropped == {}
            n_accepted += sum(of.accepted for of in found.speculation.by_depth)
        assert isinstance(engine.speculator, Speculator)
        engine.speculator.costs = FixedCosts()
    assert n_accepted > 0


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_trees_with_the_text_in_them_change_neither_text_nor_logits(
    opened: Callable[..., Engine], model: Path, expected: list[Answer], share: str | None, n_threads: int
) -> None:
    engine = opened(model, draft="none", expert_cache=cache_of(model, share), n_threads=n_threads)
    prompt = engine.tokenize(PROMPT)
    for request, answer in zip(REQUESTS, expected, strict=True):
        text, rng = [*prompt, *answer.tokens], random.Random(n_threads)
        drafter = FunctionDrafter(lambda c, limit, t=text, r=rng: knowing(t, 259, r, limit, len(c.tokens)))
        with_drafters(engine, drafter, draft_max=12)
        found = Answer(engine, request)
        found.check(answer)
        assert found.speculation is not None and found.speculation.tokens_per_step > 1.5


def test_nodes_that_are_left_out_change_neither_text_nor_logits(
    opened: Callable[..., Engine], model: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, int]] = []
    original = ExpertForecast.kept

    def counted(self: ExpertForecast, token: int, tree: VerifyTree, order: list[int], *rest: Any) -> list[int]:
        found = original(self, token, tree, order, *rest)
        kept.append((len(found), len(order)))
        return found

    monkeypatch.setattr(ExpertForecast, "is_trusted", True)
    monkeypatch.setattr(ExpertForecast, "precision", 1.0)
    monkeypatch.setattr(ExpertForecast, "kept", counted)
    engine = opened(model, expert_cache="50%", draft_max=8)
    assert isinstance(engine.speculator, Speculator)
    text = [*engine.tokenize(PROMPT), *expected[0].tokens]
    for p in (0.99, 0.3):  # of the draft, which is right
        costs = SlowExperts(CostCurve(0, {1: 0.010, 32: 0.011}, 0, {}, {1: 1.0, 32: 5.0}), Waiting())
        drafter = FunctionDrafter(lambda c, limit, p=p: chain(text[len(c.tokens) :][:limit], p))
        speculator = Speculator(
            engine.session, [drafter], costs, engine.tokenizer.n_vocab, 8, forecast=engine.speculator._forecast
        )
        engine.speculator = speculator
        for request, answer in zip(REQUESTS, expected, strict=True):
            Answer(engine, request).check(answer)
    assert any(n == of > 0 for n, of in kept) and any(n < of for n, of in kept)


def test_several_texts_with_experts_draft_in_one_pass_after_the_other(
    opened: Callable[..., Engine], model: Path, expected: list[Answer]
) -> None:
    """The recency that a text's rejected rows took is not given back once another text's pass came."""
    engine = opened(model, draft="none", expert_cache="50%")
    session = engine.session
    assert isinstance(session, NativeSession)
    other = session.model.session()
    prompt = engine.tokenize(PROMPT)
    forward = session.forward

    def with_another(tokens: Any, *arguments: Any, **options: Any) -> Any:
        out = forward(tokens, *arguments, **options)
        other.forward(prompt[:3], [-1, 0, 0], logits="all")
        other.commit([0] if other.n_past < 100 else [])
        return out

    text = [*prompt, *expected[0].tokens]
    rng = random.Random(0)
    with_drafters(engine, FunctionDrafter(lambda c, limit: knowing(text, 259, rng, limit, len(c.tokens))), draft_max=8)
    session.forward = with_another  # type: ignore[method-assign]
    assert tuple(tokens_of(engine, REQUESTS[0], N)) == expected[0].tokens


@pytest.mark.parametrize("share", ["25%", None])
def test_a_draft_model_with_experts_drafts(
    opened: Callable[..., Engine], model: Path, expected: list[Answer], share: str | None
) -> None:
    """Its own experts are in memory, whatever cache the model has."""
    engine = opened(model, draft=[str(model)], expert_cache=cache_of(model, share))
    assert isinstance(engine.speculator, Speculator)
    engine.speculator.costs = FixedCosts()
    found = Answer(engine, REQUESTS[0])
    found.check(expected[0])
    assert found.speculation is not None and found.speculation.dropped == {}
    assert found.speculation.by_drafter["model"].accepted > 0
    (drafter,) = (one for one in engine.speculator.drafters if one.name == "model")
    assert isinstance(drafter._costs, ExpertCostModel)  # type: ignore[attr-defined]


def test_a_dense_model_takes_a_draft_model_with_experts(opened: Callable[..., Engine], tmp_path: Path) -> None:
    dense = write_tiny_model(tmp_path / "dense.gguf", n_ctx_train=256)
    drafter = write_tiny_experts(tmp_path / "experts.gguf", n_ctx_train=256)
    engine, plain = opened(dense, draft=[str(drafter)]), opened(dense, draft="none")
    assert isinstance(engine.speculator, Speculator)
    engine.speculator.costs = FixedCosts()
    for request in REQUESTS:
        assert tokens_of(engine, request) == tokens_of(plain, request)
    assert [one.name for one in engine.speculator.drafters] == ["model"]


@pytest.mark.parametrize("share", ["25%", None])
def test_a_draft_head_drafts_for_a_model_with_experts(
    opened: Callable[..., Engine], model: Path, expected: list[Answer], tmp_path: Path, share: str | None
) -> None:
    with edgeinfer.load(model, draft="none") as engine:
        text = [*engine.tokenize(PROMPT), *expected[0].tokens]
    head = write_tiny_head(tmp_path / "head.gguf", model, [text])
    engine = opened(model, draft=[str(head)], expert_cache=cache_of(model, share))
    assert isinstance(engine.speculator, Speculator)
    engine.speculator.costs = FixedCosts()
    for request, answer in zip(REQUESTS, expected, strict=True):
        Answer(engine, request).check(answer)
    found = Answer(engine, REQUESTS[0]).speculation
    assert found is not None and found.dropped == {} and found.by_drafter["head"].accepted > 0
