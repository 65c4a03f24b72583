"""Drafters that are wrong in every way, for tests that the text does not care."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import HeadSession, Session
from edgeinfer.common.types import Features, Logits, Nodes, Output
from edgeinfer.engine import Engine
from edgeinfer.speculation.cost import MAX_TOKENS, CostCurve, CostModel
from edgeinfer.speculation.drafters.base import Context, Drafter
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.tree import DraftTree

PROMPT = "hello world, there is the one, there is the one and hello"


def cost_model(milliseconds: Callable[[int], float] = lambda n: 1.0 + 0.01 * n) -> CostModel:
    """Costs by number of tokens; by default nearly every draft token is worth verifying."""
    return CostModel(CostCurve(0, {n: milliseconds(n) / 1e3 for n in range(1, 33)}, 0, {}))


class FixedCosts(CostModel):
    """Costs that no pass corrects; by default every draft token is worth making and verifying."""

    def __init__(self, seconds: Callable[[int], float] = lambda n: 10.0 + 0.01 * n) -> None:
        super().__init__(CostCurve(0, {n: seconds(n) for n in range(1, 33)}, 0, {}))

    def observe(self, n: int, n_past: int, milliseconds: float, is_disturbed: bool = False) -> None:
        """Nothing is learnt."""

    def correct(self, n: int, n_past: int, milliseconds: float) -> None:
        """Nothing is learnt."""


def with_drafters(
    engine: Engine, *drafters: Drafter, costs: CostModel | None = None, draft_max: int = MAX_TOKENS - 1
) -> Engine:
    """The engine with these drafters instead of its own."""
    engine.speculator = Speculator(engine.session, drafters, costs or FixedCosts(), engine.tokenizer.n_vocab, draft_max)
    return engine


def tokens_of(engine: Engine, request: dict[str, Any], n: int = 48, prompt: str = PROMPT, **more: Any) -> Sequence[int]:
    """The tokens of an answer."""
    return engine.generate(prompt, max_tokens=n, **request, **more).tokens


def let_draft(session: Session) -> list[int]:
    """Give a session a `draft` of chains, as DraftingSession has it; gives the numbers of levels asked for."""
    asked: list[int] = []

    def draft(tokens: Sequence[int], n_levels: int, width: int = 1, n_vocab: int | None = None) -> Nodes:
        asked.append(n_levels)
        chain: list[int] = []
        rows = []
        for _ in range(n_levels):
            logits = session.forward([*tokens, *chain]).logits[0, :n_vocab].astype(np.float64)
            probabilities = np.exp(logits - logits.max())
            best = np.argsort(-probabilities, kind="stable")[:8]
            rows.append((best, probabilities[best] / probabilities.sum()))
            chain.append(int(best[0]))
        candidates, of_candidates = (np.stack(each) for each in zip(*rows, strict=True))
        of_candidates = of_candidates.astype(np.float32)
        return Nodes(
            candidates[:, 0].astype(np.int32),
            np.arange(-1, n_levels - 1, dtype=np.int32),
            of_candidates[:, 0],
            candidates.astype(np.int32),
            of_candidates,
        )

    session.draft = draft  # type: ignore[attr-defined]
    return asked


def tree_of_head(
    head: HeadSession,
    draft_vocab: NDArray[np.int32],
    tokens: Sequence[int],
    features: Features,
    n_levels: int,
    width: int = 1,
    assumed: Sequence[int] = (),
    n_vocab: int | None = None,
) -> Nodes:
    """What `DraftingHead.draft` is to give, made level by level; what is pending behind it is the same too."""
    ids = draft_vocab if n_vocab is None else draft_vocab[draft_vocab < n_vocab]
    out, n_pending = head.forward(tokens, features), len(tokens)
    row = n_pending - 1
    for token in assumed:
        assert out.hidden is not None
        out = head.forward([token], out.hidden[0, -1:], [row], n_pending=n_pending)
        row, n_pending = n_pending, n_pending + 1
    assert out.hidden is not None
    level = [(-1, 1.0, row, out.logits[-1], out.hidden[0, -1])]  # node, path probability, its row, what that gave
    nodes: list[tuple[int, int, float]] = []  # token, parent, p
    candidates, of_candidates = [], []
    for depth in range(n_levels):
        options = []
        for node, path_probability, row, logits, feature in level:
            best, probabilities = _best(logits, len(ids))
            candidates.append(ids[best])
            of_candidates.append(probabilities)
            options += [
                (path_probability * probability, node, row, feature, int(ids[place]))
                for place, probability in zip(best, probabilities, strict=True)
            ]
        options.sort(key=lambda option: -option[0])
        chosen = options[:width]
        first, probability_of = len(nodes), {node: path_probability for node, path_probability, *_ in level}
        nodes += [(token, parent, reached / probability_of[parent]) for reached, parent, _, _, token in chosen]
        if depth + 1 < n_levels:
            path_probabilities, _, rows, before, drafted = zip(*chosen, strict=True)
            out = head.forward(drafted, np.stack(before), rows, n_pending=n_pending, logits="all")
            assert out.hidden is not None
            level = [
                (first + i, path_probabilities[i], n_pending + i, out.logits[i], out.hidden[0, i])
                for i in range(len(drafted))
            ]
            n_pending += len(drafted)
    return _as_nodes(nodes, candidates, of_candidates)


def _as_nodes(
    nodes: Sequence[tuple[int, int, float]],
    candidates: Sequence[NDArray[np.int32]],
    probabilities: Sequence[NDArray[np.float64]],
) -> Nodes:
    tokens, parents, p = zip(*nodes, strict=True)
    return Nodes(
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.array(p, dtype=np.float32),
        np.stack(candidates).astype(np.int32),
        np.stack(probabilities).astype(np.float32),
    )


def _best(logits: NDArray[np.float32], n_ids: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Places of the eight largest of the first n_ids logits, and their probabilities among these."""
    probabilities = np.exp((logits - logits.max())[:n_ids].astype(np.float64))
    probabilities /= probabilities.sum()
    best = np.argsort(-probabilities, kind="stable")[:8]
    return best, probabilities[best]


def let_head_draft(head: HeadSession, draft_vocab: NDArray[np.int32]) -> list[int]:
    """Give a head a `draft`, as DraftingHead has it; gives the numbers of levels asked for."""
    asked: list[int] = []

    def draft(tokens: Sequence[int], features: Features, n_levels: int, *options: Any) -> Nodes:
        asked.append(n_levels)
        return tree_of_head(head, draft_vocab, tokens, features, n_levels, *options)

    head.draft = draft  # type: ignore[attr-defined]
    return asked


FAILURES = ("raises", "NaN", "closed", "cut file")


def let_fail(session: Session, failure: str, path: Path, after: int = 6) -> Callable[[], int]:
    """Kill a draft model, whose file is at that path, behind some passes; gives what counts them.

    failure: one of FAILURES. Of a file that is cut short, no page can be read any more: who tries is killed.
    """
    original, n_calls = session.forward, 0

    def forward(*arguments: Any, **options: Any) -> Output:
        nonlocal n_calls
        n_calls += 1
        output = original(*arguments, **options)
        if n_calls > after and failure == "raises":
            raise OSError("the disk is gone")
        if n_calls > after and failure == "closed":
            session.close()
        if n_calls > after and failure == "NaN":
            output.logits[:] = np.nan
        if n_calls == after and failure == "cut file":
            path.write_bytes(b"")
        return output

    session.forward = forward  # type: ignore[method-assign]
    return lambda: n_calls


class FunctionDrafter:
    """Proposes what a function says; counts how often it was asked."""

    def __init__(self, propose: Callable[[Context, int], DraftTree], name: str = "function") -> None:
        self.name = name
        self.n_asked = 0
        self._propose = propose

    def start(self, context: Context) -> None: ...

    def propose(self, context: Context, limit: int) -> DraftTree:
        self.n_asked += 1
        return self._propose(context, limit)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None: ...

    def close(self) -> None: ...


def random_tree(n_vocab: int, rng: random.Random, limit: int) -> DraftTree:
    """A tree of any shape, whose drafter is sure of it."""
    n = rng.randint(0, limit)
    parents = [rng.randint(-1, node - 1) for node in range(n)]
    return DraftTree([rng.randrange(n_vocab) for _ in range(n)], parents, [0.99] * n, [0] * n)


def knowing(text: Sequence[int], n_vocab: int, rng: random.Random, limit: int, at: int) -> DraftTree:
    """A tree that knows what comes and says so in some places, with wrong siblings and wrong turns."""
    tokens: list[int] = []
    parents: list[int] = []
    above = -1
    for token in text[at : at + max(0, limit // 3)]:
        for _ in range(rng.randint(0, 2)):
            tokens.append(rng.randrange(n_vocab))
            parents.append(above)
        tokens.append(token if rng.random() < 0.9 else rng.randrange(n_vocab))
        parents.append(above)
        above = len(tokens) - 1
    n = min(len(tokens), limit)
    return DraftTree(tokens[:n], parents[:n], [0.95] * n, [1] * n)


def _raising(context: Context, limit: int) -> DraftTree:
    raise RuntimeError("a drafter that fails")


def _forgetful(context: Context, limit: int) -> DraftTree:
    context.tokens.clear()
    return DraftTree([1], [-1], [1.0], [0])


MALICIOUS: dict[str, Callable[[Context, int], DraftTree]] = {
    "raises": _raising,
    "tokens that do not exist": lambda context, limit: DraftTree([10**6], [-1], [1.0], [0]),
    "negative tokens": lambda context, limit: DraftTree([-5], [-1], [1.0], [0]),
    "no integers": lambda context, limit: DraftTree([1.5], [-1], [1.0], [0]),  # type: ignore[list-item]
    "p is NaN": lambda context, limit: DraftTree([1], [-1], [float("nan")], [0]),
    "p above 1": lambda context, limit: DraftTree([1], [-1], [1e9], [0]),
    "parents ahead": lambda context, limit: DraftTree([1, 2], [1, 0], [1.0, 1.0], [0, 0]),
    "a parent of itself": lambda context, limit: DraftTree([1], [0], [1.0], [0]),
    "uneven": lambda context, limit: DraftTree([1, 2, 3], [-1], [1.0], [0]),
    "too large": lambda context, limit: DraftTree([1] * 500, [-1] * 500, [1.0] * 500, [0] * 500),
    "kinds that do not exist": lambda context, limit: DraftTree([1], [-1], [1.0], [10**9]),
    "not a tree": lambda context, limit: None,  # type: ignore[return-value]
    "arrays of two dimensions": lambda context, limit: DraftTree(np.zeros((2, 2)), [-1], [1.0], [0]),  # type: ignore
    "empties the text it was shown": _forgetful,
}
