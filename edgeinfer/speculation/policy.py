"""Which tree to verify: the one expected to be fastest (most tokens per millisecond), from measured costs and learnt
acceptance probabilities.

A tree of the n - 1 most probable nodes gives 1 + the sum of their path probabilities tokens for the cost c(n); decoding
without a draft gives 1 token for c(1), and is chosen where no tree is better.

The path probability of a node is the product of the acceptance probabilities along its path from the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.tree import DraftTree

_MIN_GAIN = 1.06  # of a tree over plain decoding: the tree's rate is an estimate, that of one token is not


class Proposal(NamedTuple):
    """A drafter's name, its draft, and what was learnt about its drafts."""

    drafter: str
    tree: DraftTree
    table: AcceptanceTable

    @property
    def of_first(self) -> float:
        """Probability that the first node, of which there must be one, is accepted."""
        return self.table.probability(self.tree.buckets[0], 0, self.tree.p[0])


@dataclass(slots=True)
class VerifyTree:
    """The tree to verify, merged from all drafts. Empty lists: a pass of one token, without a draft."""

    # tokens, parents: as in DraftTree
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # of each node, 0 for the first
    owners: list[str] = field(default_factory=list)  # the drafter of each node, the first one if several proposed it
    expected: float = 1.0  # tokens that the step should give
    path: list[int] = field(default_factory=list)  # nodes of the most probable path


Keep: TypeAlias = Callable[[VerifyTree, list[int], Sequence[float]], list[int]]
"""Is given a tree, the order of its nodes and their path probabilities; gives the nodes that may be verified, in that
order, each of them with its parent."""


def min_useful_probability(verify_ms: Sequence[float], n_texts: int = 1) -> float:
    """Path probability below which no node is worth verifying: the least cost of one more token over that of one.

    n_texts: that are in the pass, of at least one token each.
    """
    plain = verify_ms[n_texts]
    last = min(n_texts + 8, len(verify_ms))
    least = min(((verify_ms[n] - plain) / (n - n_texts) for n in range(n_texts + 1, last)), default=plain)
    return max(0.01, least * n_texts / plain)


def select_tree(
    proposals: Sequence[Proposal],
    verify_ms: Sequence[float],
    max_nodes: int,
    max_depth: int,
    min_probability: float = 0.0,
    spent_ms: float = 0.0,
    keep: Keep | None = None,
) -> VerifyTree:
    """The tree expected to be fastest (most tokens per millisecond), empty where decoding without a draft is as good.

    proposals: the most reliable drafter first.  verify_ms: cost of a pass by number of tokens.  max_depth: number of
    levels.  min_probability: nodes with a lower path probability are left out.  spent_ms: spent on drafts already.
    keep: which of the nodes may be chosen.
    """
    merged, path_probabilities = _merge(proposals, min_probability, max_depth)
    if not path_probabilities:
        return merged
    # No node has a higher path probability than its parent, and each comes after it; the sort is stable. So the first n
    # nodes are a tree for every n.
    order = sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)
    order = (order if keep is None else keep(merged, order, path_probabilities))[:max_nodes]
    expected, best_rate, best_n, best_expected = 1.0, _MIN_GAIN / (verify_ms[1] + spent_ms), 0, 1.0
    for n, node in enumerate(order, start=1):
        expected += path_probabilities[node]
        rate = expected / (verify_ms[n + 1] + spent_ms)
        if rate > best_rate:
            best_rate, best_n, best_expected = rate, n, expected
    kept = sorted(order[:best_n])
    selected = _subtree(merged, kept, best_expected)
    selected.path = _best_path(selected.parents, [path_probabilities[node] for node in kept])
    return selected


def select_trees(
    proposals: Sequence[Sequence[Proposal]],
    verify_ms: Sequence[float],
    max_nodes: int,
    limits: Sequence[tuple[int, int]],
    min_probability: float,
) -> list[VerifyTree]:
    """The trees of several texts in one pass, whose nodes compete for its rows: the most tokens per millisecond.

    proposals: of each text, the most reliable drafter first.  max_nodes: of all trees.  limits: most nodes and levels
    of each tree.  Otherwise as select_tree.
    """
    merged = [_merge(each, min_probability, depth) for each, (_, depth) in zip(proposals, limits, strict=True)]
    # As in select_tree: within a text parents come first, so the best of all are a tree in each text.
    candidates = []
    for text, (_, path_probabilities) in enumerate(merged):
        order = sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)
        candidates += [(path_probabilities[node], text, node) for node in order[: limits[text][0]]]
    candidates.sort(key=lambda each: -each[0])
    n_texts = len(proposals)
    expected, best_n = float(n_texts), 0
    best_rate = _MIN_GAIN * n_texts / verify_ms[n_texts]
    for n, (probability, *_) in enumerate(candidates[:max_nodes], start=1):
        expected += probability
        rate = expected / verify_ms[n_texts + n]
        if rate > best_rate:
            best_rate, best_n = rate, n
    kept: list[list[int]] = [[] for _ in proposals]
    for _, text, node in candidates[:best_n]:
        kept[text].append(node)
    return [
        _subtree(whole, sorted(nodes), 1.0 + sum(path_probabilities[node] for node in nodes))
        for (whole, path_probabilities), nodes in zip(merged, kept, strict=True)
    ]


def _merge(proposals: Sequence[Proposal], min_probability: float, max_depth: int) -> tuple[VerifyTree, list[float]]:
    """The nodes of all drafts, equal ones once, and the path probability of each."""
    merged = VerifyTree()
    tokens, parents, depths, owners = merged.tokens, merged.parents, merged.depths, merged.owners
    path_probabilities: list[float] = []
    places: dict[tuple[int, int], int] = {}  # node with (parent, token)
    claimed: dict[int, float] = {}  # by parent: probability that the next token is one that an earlier drafter proposed
    for drafter, tree, table in proposals:
        probability = table.probability
        proposed: dict[int, float] = {}  # the same for this drafter
        nodes: list[int] = []  # of the merged tree, for each node of this one; -2 if left out
        for token, parent, p, bucket in zip(tree.tokens, tree.parents, tree.p, tree.buckets, strict=True):
            above = -1 if parent < 0 else nodes[parent]
            if above == -2 or (above >= 0 and depths[above] + 1 >= max_depth):
                nodes.append(-2)
                continue
            depth = 0 if above == -1 else depths[above] + 1
            own, of_parent = probability(bucket, depth, p), 1.0 if above == -1 else path_probabilities[above]
            place = places.get((above, token))
            if place is not None:
                nodes.append(place)
                path_probabilities[place] = max(path_probabilities[place], own * of_parent)
                continue
            # Drafters mostly agree. Where they differ, the less reliable one is right only if the others are wrong.
            own *= 1.0 - claimed.get(above, 0.0)
            path_probability = own * of_parent
            if path_probability < min_probability:
                nodes.append(-2)
                continue
            nodes.append(len(tokens))
            places[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
            depths.append(depth)
            owners.append(drafter)
            path_probabilities.append(path_probability)
            proposed[above] = min(1.0, proposed.get(above, 0.0) + own)
        for above, of_all in proposed.items():
            claimed[above] = min(1.0, claimed.get(above, 0.0) + of_all)
    return merged, path_probabilities


def _subtree(whole: VerifyTree, nodes: Sequence[int], expected: float) -> VerifyTree:
    """Some nodes of a tree, among them the parents of all of them."""
    place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    return VerifyTree(
        [whole.tokens[node] for node in nodes],
        [place[whole.parents[node]] for node in nodes],
        [whole.depths[node] for node in nodes],
        [whole.owners[node] for node in nodes],
        expected,
    )


def _best_path(parents: Sequence[int], path_probabilities: Sequence[float]) -> list[int]:
    """Nodes from the root on, each the most probable child of the one before."""
    best: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent not in best or path_probabilities[node] > path_probabilities[best[parent]]:
            best[parent] = node
    path, last = [], -1
    while last in best:
        last = best[last]
        path.append(last)
    return path
