"""Promise 1 as a list of comparisons: the bits of the logits, whatever was done to be fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Session, run_sequence
from edgeinfer.models import ModelSpec

OpenSession = Callable[..., Session]  # open_session(n_threads=, isa=, n_batch=)

# Thirteen nodes in four branches: 0-1-2-3, 4-5-6-7 after 1, 8-9-10 from the root, 11-12 after 5.
TREE = np.array([-1, 0, 1, 2, 1, 4, 5, 6, -1, 8, 9, 5, 11], dtype=np.int32)
LEAVES = (3, 7, 10, 12)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Whether two float32 arrays have the same shape and the same bits."""
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def branch_to(leaf: int, parents: Sequence[int] | NDArray[np.int32]) -> list[int]:
    """Rows from the root to a leaf."""
    rows = []
    row = leaf
    while row >= 0:
        rows.append(int(row))
        row = int(parents[row])
    return rows[::-1]


def decode_one_by_one(session: Session, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits (n, n_vocab) of committing one token after the other."""
    rows = []
    for token in tokens:
        rows.append(session.forward([int(token)]).logits[0])
        session.commit([0])
    return np.stack(rows)


def has_windows(session: Session) -> bool:
    """Whether some layers see a window only: no more than n_batch tokens can then be uncommitted."""
    spec = session.spec
    return isinstance(spec, ModelSpec) and any(layer.mixer.state_kind == "window_kv" for layer in spec.layers)


def prefill(session: Session, tokens: NDArray[np.int32], chunk: int) -> NDArray[np.float32]:
    """Logits (1, n_vocab) after the last token, committed in chunks, or in smaller ones where there are windows."""
    if has_windows(session):
        chunk = min(chunk, session.n_batch)
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        logits = session.forward(part).logits
        session.commit(range(len(part)))
    return logits


def back_to(session: Session, prompt: NDArray[np.int32]) -> None:
    """Cut the text to its prompt; what a state no longer has there is read again."""
    if rest := prompt[session.truncate(len(prompt)) :].tolist():
        prefill(session, np.array(rest, dtype=np.int32), len(prompt))


def comparisons(
    open_session: OpenSession, isas: Sequence[str], tokens: NDArray[np.int32], sizes: Sequence[int] = range(1, 17)
) -> Iterator[tuple[str, bool]]:
    """(what was compared, whether all bits were equal). tokens: a prompt of at least 64 ids."""
    session = open_session()
    prompt, rest = tokens[:-16], tokens[-16:]
    prefill(session, prompt, len(prompt))
    n_prompt = len(prompt)
    expected = decode_one_by_one(session, rest)
    for n in sizes:
        back_to(session, prompt)
        yield f"{n} in one pass and one by one", same_bits(session.forward(rest[:n], logits="all").logits, expected[:n])
    yield from _trees(session, prompt, rest)

    prefill(session, prompt[session.truncate(n_prompt // 2) :], n_prompt)
    again = session.forward(rest, logits="all").logits
    yield "truncate and redo, and a fresh session", same_bits(again, expected)
    session.close()

    for chunk in (1, 7, 64, 512):
        yield f"prefill in chunks of {chunk}", _after(open_session(), prompt, rest, chunk, expected)
    for n_batch in (5, 32):
        session = open_session(n_batch=n_batch)
        yield f"passes of {n_batch} tokens at most", _after(session, prompt, rest, len(prompt), expected)
    for n_threads in (1, 2, 3):
        session = open_session(n_threads=n_threads)
        yield f"{n_threads} threads", _after(session, prompt, rest, len(prompt), expected)
    for isa in isas:
        yield f"instruction set {isa}", _after(open_session(isa=isa), prompt, rest, len(prompt), expected)


def _after(
    session: Session, prompt: NDArray[np.int32], rest: NDArray[np.int32], chunk: int, expected: NDArray[np.float32]
) -> bool:
    prefill(session, prompt, chunk)
    if len(rest) <= session.n_batch or not has_windows(session):
        equal = same_bits(session.forward(rest, logits="all").logits, expected)
    else:
        equal = same_bits(run_sequence(session, rest, logits="all").logits, expected)
        equal = equal and session.truncate(len(prompt)) == len(prompt)
    equal = equal and same_bits(decode_one_by_one(session, rest[:3]), expected[:3])
    session.close()
    return equal


def _trees(session: Session, prompt: NDArray[np.int32], rest: NDArray[np.int32]) -> Iterator[tuple[str, bool]]:
    nodes = rest[: len(TREE)]
    back_to(session, prompt)
    of_tree = session.forward(nodes, TREE, logits="all").logits
    for leaf in LEAVES:
        branch = branch_to(leaf, TREE)
        back_to(session, prompt)
        alone = decode_one_by_one(session, nodes[branch])
        yield f"tree branch to node {leaf} and alone", same_bits(of_tree[branch], alone)
        follow = decode_one_by_one(session, rest[-3:])

        back_to(session, prompt)
        session.forward(nodes, TREE)
        session.commit(branch)
        committed = decode_one_by_one(session, rest[-3:])
        yield f"after committing the branch to node {leaf}", same_bits(committed, follow)
    back_to(session, prompt)
