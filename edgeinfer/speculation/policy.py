"""How much to draft: what maximises the expected tokens a millisecond, from measured costs and learnt chances.

A tree of the n - 1 likeliest nodes gives 1 + sum of their chances tokens in c(n); one by one gives 1 in c(1), and wins
where no tree is better. Chances are learnt for each drafter's kinds of nodes and depths, as decayed Beta counts: from
every draft that was made, checked or not, by comparing it with what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgeinfer.speculation.cost import MAX_TOKENS
from edgeinfer.speculation.tree import DraftTree

_PRIOR_WEIGHT = 10.0  # how many observations the drafter's own estimate counts for
_DECAY = 0.98  # of all counts of a kind with each new one
_TRUST, _TRUST_DECAY = 2.0, 0.97  # first nodes as expected before a text is known, and what each counts for later on
_MEAN, _MEAN_WEIGHT = 0.85, 4.0  # nodes of a chain that are right before anything is known, and what that counts for
_N_DEPTHS = 4
_DEPTH = [min(depth, 2) if depth < 4 else 3 for depth in range(MAX_TOKENS + 1)]
_GAIN = 1.06  # by how much a tree must be better than one by one: an estimate may be wrong, one token cannot be


@dataclass(slots=True)
class ChainLengthRule:
    """When a chain that costs something to draft is long enough.

    milliseconds: of the check by number of tokens.  draft: milliseconds of one more drafted token.  spent: those spent
    in this step.
    """

    milliseconds: Sequence[float]
    draft: float = 0.0
    spent: float = 0.0
    room: int = MAX_TOKENS - 1

    def should_extend(self, path_probability: Sequence[float], next_chance: float) -> bool:
        """Whether the next node's tokens a millisecond are above those of the chain so far."""
        n = len(path_probability)
        if n >= self.room:
            return False
        expected, seconds = 1.0 + sum(path_probability), self.milliseconds[n + 1] + self.spent + n * self.draft
        more = (path_probability[-1] if path_probability else 1.0) * next_chance
        longer = self.milliseconds[n + 2] - self.milliseconds[n + 1] + self.draft
        return more * seconds > expected * longer


class AcceptanceTable:
    """What was learnt about the nodes of one drafter. An `AcceptanceModel` (edgeinfer.speculation.drafters.base).

    mean: share of the nodes of a chain that were right elsewhere, where that is known.
    """

    def __init__(self, mean: float | None = None) -> None:
        self.min_probability = 0.0
        self.max_wait_ms = 0.0
        self.length_rule = ChainLengthRule([0.0] * (MAX_TOKENS + 1))
        self.calibration = (
            1.0  # first nodes that were right in this text and those before, over those that should have been
        )
        self._counts: dict[int, tuple[float, float]] = {}  # right, all; both decayed
        self._first = 0.0, 0.0
        self._usual = _MEAN_WEIGHT * (_MEAN if mean is None else mean), _MEAN_WEIGHT
        self._right, self._all = self._usual

    def probability(self, bucket: int, depth: int, p: float) -> float:
        """See AcceptanceModel."""
        counts = self._counts.get(bucket * _N_DEPTHS + _DEPTH[depth])
        if counts is not None:
            p = (_PRIOR_WEIGHT * p + counts[0]) / (_PRIOR_WEIGHT + counts[1])
        return p if depth else p * self.calibration

    @property
    def mean(self) -> float:
        """Share of nodes that were right where their parent was, over all kinds; see _learn_mean."""
        return self._right / self._all

    def should_extend(self, path_probability: Sequence[float]) -> bool:
        """See AcceptanceModel."""
        return self.length_rule.should_extend(path_probability, self.mean)

    def learn(self, tree: DraftTree, came: Sequence[int]) -> None:
        """Compare a draft with the tokens that came: every node whose parent was right tells something."""
        self._learn_trust(tree, came[0])
        self._learn_mean(tree, came)
        depths: list[int] = []  # of the nodes that were right, else -1
        counts = self._counts
        for token, parent, bucket in zip(tree.tokens, tree.parents, tree.buckets, strict=True):
            depth = 0 if parent < 0 else depths[parent] + 1 if depths[parent] >= 0 else -1
            if depth < 0 or depth >= len(came):
                depths.append(-1)
                continue
            right = token == came[depth]
            depths.append(depth if right else -1)
            key = bucket * _N_DEPTHS + _DEPTH[depth]
            before = counts.get(key, (0.0, 0.0))
            counts[key] = (_DECAY * before[0] + right, _DECAY * before[1] + 1.0)

    def _learn_mean(self, tree: DraftTree, came: Sequence[int]) -> None:
        """Count the nodes of a draft's first chain, that of each node's first child."""
        depth, above = 0, -1
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent != above:
                continue
            if depth >= len(came):
                return
            right = token == came[depth]
            self._right, self._all = _DECAY * self._right + right, _DECAY * self._all + 1.0
            if not right:
                return
            depth, above = depth + 1, node

    def _learn_trust(self, tree: DraftTree, token: int) -> None:
        """Compare the chance that the first node had with what became of it."""
        expected = self.probability(tree.buckets[0], 0, tree.p[0]) / self.calibration
        right, all_ = self._first
        right, all_ = _TRUST_DECAY * right + (tree.tokens[0] == token), _TRUST_DECAY * all_ + expected
        self._set_calibration(right, all_)

    def start_request(self) -> None:
        """Believe half of the mean and trust anew, for a new text: who was of no use gets another chance."""
        self._right, self._all = (self._right + self._usual[0]) / 2, (self._all + self._usual[1]) / 2
        self._set_calibration(self._first[0] / 2, self._first[1] / 2)

    def _set_calibration(self, right: float, expected: float) -> None:
        """Set it from the first nodes that were right, and those that should have been."""
        self._first = right, expected
        self.calibration = min(1.0, (_TRUST + right) / (_TRUST + expected))


class Proposal(NamedTuple):
    """A draft and whose it is."""

    drafter: str
    tree: DraftTree
    table: AcceptanceTable


@dataclass(slots=True)
class VerifyTree:
    """The tree to check, merged from all drafts. Empty lists: one token, nothing drafted.

    tokens, parents: as in DraftTree.  depths: of each node, 0 for the first.  owners: the drafter of each; of several,
    the first.  expected: tokens that the step should give.  path: nodes of the likeliest branch.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    expected: float = 1.0
    path: list[int] = field(default_factory=list)


def min_useful_probability(milliseconds: Sequence[float]) -> float:
    """Chance below which a node cannot pay: the least that a further token adds to the cost, in passes of one token."""
    one = milliseconds[1]
    return max(0.01, min((milliseconds[n] - one) / (n - 1) for n in range(2, 9)) / one)


def select_tree(
    proposals: Sequence[Proposal],
    milliseconds: Sequence[float],
    max_nodes: int,
    max_depth: int,
    min_probability: float = 0.0,
    spent: float = 0.0,
) -> VerifyTree:
    """The tree with the most expected tokens a millisecond, or none.

    proposals: of who knows most first.  milliseconds: of a pass by number of tokens.  max_depth: number of levels that
    can be used.  floor: nodes less likely than this are not looked at.  spent: milliseconds that drafting took already.
    """
    merged, path_probability = _merge(proposals, min_probability, max_depth)
    if not path_probability:
        return merged
    # A node is never likelier than its parent, and stands behind it; the sort is stable. So any first part is a tree.
    order = sorted(range(len(path_probability)), key=path_probability.__getitem__, reverse=True)[:max_nodes]
    expected, best, best_n_levels = 1.0, _GAIN / (milliseconds[1] + spent), 0
    chosen = 1.0
    for n, node in enumerate(order, start=1):
        expected += path_probability[node]
        rate = expected / (milliseconds[n + 1] + spent)
        if rate > best:
            best, best_n_levels, chosen = rate, n, expected
    kept = sorted(order[:best_n_levels])
    part = _part(merged, kept, chosen)
    part.path = _likeliest_branch(part.parents, [path_probability[node] for node in kept])
    return part


def chain_rate(probability: float, draft: float, milliseconds: Sequence[float], max_nodes: int) -> float:
    """Most tokens a millisecond of a chain whose nodes are each right with that chance and take `draft` ms to make."""
    best, expected, path_probability = 0.0, 1.0, 1.0
    for n in range(1, max_nodes + 1):
        path_probability *= probability
        expected += path_probability
        rate = expected / (milliseconds[n + 1] + n * draft)
        if rate <= best:
            break
        best = rate
    return best


def overlapped_rate(probability: float, draft: float, milliseconds: Sequence[float], max_nodes: int) -> float:
    """Most tokens a millisecond of chains that are drafted while the target works, `draft` ms a token.

    A chain of n nodes is there when what it follows was right: one token behind a step without a chain, all of the last
    chain and a token behind a step with one. Nor can more be drafted than there is time for: a step with a chain takes
    n + 1 tokens, one without, which gives a single token, takes that one.
    """
    one = milliseconds[1]
    best, expected = 1.0 / one, 1.0
    for n in range(1, max_nodes + 1 if draft < one else 1):
        expected += probability**n
        share = probability / (1.0 + probability - probability ** (n + 1))  # of the steps that have a chain
        share = min(share, (one - draft) / (n * draft)) if draft else share
        tokens = share * expected + 1.0 - share
        best = max(best, tokens / (share * milliseconds[n + 1] + (1.0 - share) * one))
    return best


def beats(ahead: float, in_turns: float, milliseconds: Sequence[float]) -> bool:
    """Whether a draft model that drafts while the target works, and one of the same that takes turns with it, should
    be the former, by milliseconds of a drafted token.
    """
    probability, most = AcceptanceTable().mean, MAX_TOKENS - 1
    there, here = (
        overlapped_rate(probability, ahead, milliseconds, most),
        chain_rate(probability, in_turns, milliseconds, most),
    )
    return there > here


def _merge(proposals: Sequence[Proposal], min_probability: float, max_depth: int) -> tuple[VerifyTree, list[float]]:
    """All nodes that may pay, equal ones once, and the chance that each is reached and right."""
    merged = VerifyTree()
    tokens, parents, depths, owners = merged.tokens, merged.parents, merged.depths, merged.owners
    path_probabilities: list[float] = []
    places: dict[tuple[int, int], int] = {}
    taken: dict[int, float] = {}  # chance that a node's successor is one that an earlier drafter named
    for drafter, tree, table in proposals:
        probability = table.probability
        named: dict[int, float] = {}
        rows: list[int] = []  # node of the merged tree for each of this one, -2 for none
        for token, parent, p, bucket in zip(tree.tokens, tree.parents, tree.p, tree.buckets, strict=True):
            above = -1 if parent < 0 else rows[parent]
            if above == -2 or (above >= 0 and depths[above] + 1 >= max_depth):
                rows.append(-2)
                continue
            depth = 0 if above == -1 else depths[above] + 1
            of_it, of_parent = probability(bucket, depth, p), 1.0 if above == -1 else path_probabilities[above]
            place = places.get((above, token))
            if place is not None:
                rows.append(place)
                path_probabilities[place] = max(path_probabilities[place], of_it * of_parent)
                continue
            # Drafters mostly agree: where they do not, who knows less is right where the others are wrong.
            of_it *= 1.0 - taken.get(above, 0.0)
            path_probability = of_it * of_parent
            if path_probability < min_probability:
                rows.append(-2)
            else:
                rows.append(len(tokens))
                places[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
                depths.append(depth)
                owners.append(drafter)
                path_probabilities.append(path_probability)
                named[above] = min(1.0, named.get(above, 0.0) + of_it)
        for above, of_all in named.items():
            taken[above] = min(1.0, taken.get(above, 0.0) + of_all)
    return merged, path_probabilities


def _part(whole: VerifyTree, nodes: Sequence[int], expected: float) -> VerifyTree:
    """These nodes of a tree, which hold the parents of all of them."""
    place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    return VerifyTree(
        [whole.tokens[node] for node in nodes],
        [place[whole.parents[node]] for node in nodes],
        [whole.depths[node] for node in nodes],
        [whole.owners[node] for node in nodes],
        expected,
    )


def _likeliest_branch(parents: Sequence[int], path_probability: Sequence[float]) -> list[int]:
    """Nodes from the root on, each the likeliest child of the one before."""
    best: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent not in best or path_probability[node] > path_probability[best[parent]]:
            best[parent] = node
    branch, top = [], -1
    while top in best:
        top = best[top]
        branch.append(top)
    return branch
