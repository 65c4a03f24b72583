"""Drafts from the model's own earlier answers, of this process or, where a file keeps them, of earlier ones.

What followed the same tokens in earlier answers becomes a tree in which each node counts the answers that went there,
as in SuffixDecoding (Oliaro et al., arXiv:2411.04975). Its suffix tree is an index here: every three tokens are linked
to the places where they occurred before, the latest first, so that an answer takes a few bytes a token.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from edgeinfer.common.overriding import override
from edgeinfer.common.types import Logits
from edgeinfer.speculation.drafters.answer_file import AnswerFile
from edgeinfer.speculation.drafters.base import AcceptanceModel, Context, HoldingDrafter, SharedDrafter
from edgeinfer.speculation.tree import DraftTree, no_draft

MOST_TOKENS = 32_768
LEAST_TOKENS = 1024  # of a useful index: some ten short answers
_END = -1  # of an answer
_ORDER = 3  # tokens that are looked up
_LEAST_ANSWER = 8  # tokens of an answer that is kept
_MOST_PLACES, _MOST_MATCH = 8, 24  # places that are compared, and tokens of each
_MOST_CHAIN = 24  # tokens that are drafted
_SAVE_EVERY = 2048  # new tokens after which the file is written, beside when the drafter is closed
# The text, the links, the table of their beginnings, and the spare room of arrays.
_BYTES_PER_TOKEN = 4 + 4 + 8 + 4
_BYTES_PER_LAST = 36  # per token of the last request: a place in a list, and an integer

# Buckets: the class of the match's length, and what followed: one place, several that agree, the more frequent of
# several, or a rarer one. Prior acceptance probabilities of the first node and of later ones, by these and the class,
# for a node that all places have.
_BOUNDS = (3, 4, 6, 9, 14, 20)
_CLASS = [next((i for i, bound in enumerate(_BOUNDS) if length <= bound), len(_BOUNDS)) for length in range(25)]
_ALONE, _AGREED, _FREQUENT, _RARE = range(4)
_FIRST = (
    (0.4, 0.6, 0.7, 0.8, 0.85, 0.88, 0.9),
    (0.6, 0.85, 0.88, 0.92, 0.94, 0.95, 0.96),
    *((0.6,) * (len(_BOUNDS) + 1),) * 2,
)
_LATER = (
    (0.78, 0.78, 0.8, 0.82, 0.85, 0.87, 0.88),
    (0.88, 0.95, 0.96, 0.97, 0.98, 0.98, 0.985),
    *((0.5,) * (len(_BOUNDS) + 1),) * 2,
)


class AnswerIndex:
    """Texts of at most max_tokens tokens in all. When they are full, the older half is forgotten."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.text = array("i")
        self._clear()

    def _clear(self) -> None:
        self._before = array("i")  # by place: the last place before it with the same tokens, -1 for none
        self._heads = array("i", [-1]) * (2 * self.max_tokens)  # the last place of each hash

    def add(self, answer: Sequence[int]) -> None:
        """Add an answer, or the end of one that is too long."""
        answer = answer[-(self.max_tokens // 2) :]
        if len(self.text) + len(answer) + 1 > self.max_tokens:
            kept = self.text[len(self.text) - self.max_tokens // 2 + 1 :]
            start = kept.index(_END) + 1 if _END in kept else 0  # whole answers
            self.text = kept[start:]
            self._clear()
            self._link(0)
        first = len(self.text)
        self.text.extend(answer)
        self.text.append(_END)
        self._link(first)

    def _link(self, first: int) -> None:
        """Index the places from `first` on, each by the three tokens before it."""
        text, before, heads = self.text, self._before, self._heads
        n_heads = len(heads)
        for place in range(len(before), len(text)):
            before.append(-1)
            if text[place] == _END:
                first = place + 1
            elif place - first >= _ORDER:
                slot = hash(tuple(text[place - _ORDER : place])) % n_heads
                before[place], heads[slot] = heads[slot], place

    def places(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(length of the match, place after it) of the longest matches of the end of tokens, the latest first."""
        if len(tokens) < _ORDER:
            return []
        text, found = self.text, list[tuple[int, int]]()
        place = self._heads[hash(tuple(tokens[-_ORDER:])) % len(self._heads)]
        longest = 0
        for _ in range(_MOST_PLACES):
            if place < 0:
                break
            length, most = 0, min(place, len(tokens), _MOST_MATCH)
            while length < most and text[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length >= _ORDER:  # else other tokens have the same hash
                found.append((length, place))
                longest = max(longest, length)
            place = self._before[place]
        return [each for each in found if each[0] == longest]


class AnswersDrafter(HoldingDrafter, SharedDrafter):
    """Keeps the last max_tokens tokens of the answers of all conversations. file: keeps them on disk, None for none."""

    name = "answers"

    def __init__(self, max_tokens: int = MOST_TOKENS, file: AnswerFile | None = None) -> None:
        self._index = AnswerIndex(max_tokens)
        self._running: list[tuple[Context, int]] = []  # of the requests that run, or were the last; and their prompts
        self._file = file
        self._n_unsaved = 0
        for answer in [] if file is None else file.read():
            self._index.add(answer)

    @staticmethod
    def memory(max_tokens: int, n_ctx: int, n_texts: int = 1) -> int:
        """Most bytes that it takes: of the answers, and of the last requests of so many texts at once."""
        return _BYTES_PER_TOKEN * max_tokens + n_texts * _BYTES_PER_LAST * n_ctx

    def start(self, context: Context) -> None:
        """Keep the answers of requests that are over."""
        self._keep_over()
        self._running.append((context, len(context.tokens)))

    def propose(self, context: Context, limit: int) -> DraftTree:
        """What followed the longest match in earlier answers; several places make a tree."""
        places = self._index.places(context.tokens[-_MOST_MATCH:])
        if not places or limit == 0:
            return no_draft()
        return counted_tree(self._index.text, places, context.acceptance, limit)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """See Drafter. An answer is added when it is whole."""

    @override
    def held(self) -> dict[str, int]:
        n_last = sum(len(context.tokens) for context, _ in self._running)
        return {"tables": self.memory(self._index.max_tokens, n_last)}

    def close(self) -> None:
        """Write the file, and forget all answers."""
        for context, _ in self._running:
            context.is_over = True
        self._keep_over()
        self._save()
        self._index = AnswerIndex(0)

    @override
    def beside(self) -> AnswersDrafter:
        return self

    def _keep_over(self) -> None:
        """Add the answers of the requests that are over."""
        running, self._running = self._running, [each for each in self._running if not each[0].is_over]
        for context, n_prompt in running:
            if not context.is_over or len(context.tokens) < n_prompt + _LEAST_ANSWER:
                continue
            # With the last tokens of the prompt, which are the same before each answer, so that its beginning is found.
            answer = context.tokens[max(0, n_prompt - _ORDER) :]
            self._index.add(answer)
            self._n_unsaved += len(answer)
        if self._n_unsaved >= _SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        """Write the file if there is something new."""
        if self._file is not None and self._n_unsaved:
            self._file.write(self._index.text)
        self._n_unsaved = 0


class _Candidate(NamedTuple):
    """A node that may be drafted."""

    negated: float  # path probability, negative, as a heap returns its least element first
    number: int  # counts candidates, so that no two compare equal
    parent: int  # index in the tree, -1 for the end of the text
    depth: int
    token: int
    p: float  # prior acceptance probability
    bucket: int
    at: list[int]  # the places after it in earlier answers


def counted_tree(
    text: Sequence[int], places: Sequence[tuple[int, int]], acceptance: AcceptanceModel, limit: int
) -> DraftTree:
    """The likeliest nodes of the tree of what follows some places of a text. places: as AnswerIndex.places."""
    of_length = _CLASS[places[0][0]]
    heap: list[_Candidate] = []
    tree: list[_Candidate] = []
    numbers = count()

    def push(negated: float, parent: int, depth: int, at: Sequence[int]) -> None:
        for token, those in _followers(text, at).items():
            share = len(those) / len(at)
            kind = (_AGREED if len(at) > 1 else _ALONE) if share == 1.0 else _FREQUENT if share >= 0.5 else _RARE
            p, bucket = (_LATER if depth else _FIRST)[kind][of_length] * share, 4 * of_length + kind
            reached = negated * acceptance.probability(bucket, depth, p)
            heapq.heappush(heap, _Candidate(reached, next(numbers), parent, depth, token, p, bucket, those))

    push(-1.0, -1, 0, [place for _, place in places])
    while heap and len(tree) < limit:
        best = heapq.heappop(heap)
        if -best.negated < acceptance.min_probability and tree:  # one node at least, from which acceptance is learnt
            break
        tree.append(best)
        if best.depth < _MOST_CHAIN:
            push(best.negated, len(tree) - 1, best.depth + 1, best.at)
    return DraftTree(
        [node.token for node in tree],
        [node.parent for node in tree],
        [node.p for node in tree],
        [node.bucket for node in tree],
    )


def _followers(text: Sequence[int], at: Sequence[int]) -> dict[int, list[int]]:
    """The places after each token that is at one of some places."""
    found: dict[int, list[int]] = {}
    for place in at:
        token = text[place]
        if token != _END:
            found.setdefault(token, []).append(place + 1)
    return found
