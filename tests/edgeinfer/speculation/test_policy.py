"""Verdicts, checks of trees, and the policy: which tree is verified."""

import random

import numpy as np
import pytest

from edgeinfer.common.errors import NumericalError, ShapeError
from edgeinfer.sampling import SamplingParams, sample
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.policy import Proposal, select_tree
from edgeinfer.speculation.tree import DraftTree, checked
from edgeinfer.speculation.verify import accept

pytestmark = pytest.mark.usefixtures("native")


def test_accept_follows_the_path_to_the_first_token_that_was_not_drafted():
    rows = np.array([[0, 9, 0], [9, 0, 0], [0, 0, 9], [9, 0, 0]], dtype=np.float32)
    text = [7]
    params = SamplingParams(temperature=0.0)

    def draw(logits, text):
        return sample(logits, params, len(text), text)

    verdict = accept(rows, {(0, 1): 2, (0, 2): 1, (2, 2): 3}, draw, text, ())
    assert verdict == ([1, 2, 0], [0, 2, 3]) and text == [7, 1, 2, 0]


def test_accept_ends_the_path_before_logits_that_are_not_numbers():
    rows = np.array([[0, 9, 0], [np.nan, 0, 0]], dtype=np.float32)
    text: list[int] = []
    params = SamplingParams(temperature=0.0)

    def draw(logits, text):
        return sample(logits, params, len(text), text)

    assert accept(rows, {(0, 1): 1}, draw, text, ()) == ([1], [0])
    with pytest.raises(NumericalError):
        accept(rows[1:], {}, draw, text, ())


def test_checked_takes_numpy_and_refuses_what_is_no_tree():
    tree = checked(DraftTree(np.array([3, 4]), np.array([-1, 0]), np.array([0.5, 1.0]), np.array([0, 1])), 10, 4)
    assert tree == DraftTree([3, 4], [-1, 0], [0.5, 1.0], [0, 1]) and type(tree.tokens[0]) is int
    for bad in (
        DraftTree([10], [-1], [0.5], [0]),
        DraftTree([1, 1], [-1, 1], [0.5, 0.5], [0, 0]),
        DraftTree([1], [-1], [float("nan")], [0]),
        DraftTree([1] * 5, [-1] * 5, [0.1] * 5, [0] * 5),
    ):
        with pytest.raises(ShapeError):
            checked(bad, 10, 4)


def proposal(tokens, parents, p):
    return Proposal("d", DraftTree(tokens, parents, p, [0] * len(tokens)), AcceptanceTable())


def test_the_selected_tree_is_the_optimum_of_a_search_over_all_trees():
    rng = random.Random(1)
    for _ in range(300):
        n = rng.randint(1, 7)
        parents = [rng.randint(-1, node - 1) for node in range(n)]
        p = [rng.random() for _ in range(n)]
        slope = rng.choice([0.01, 0.1, 0.3, 1.0])
        milliseconds = [0.0] + [1.0 + slope * (m - 1) for m in range(1, 40)]
        path_probabilities = []
        for node in range(n):
            path_probabilities.append(p[node] * (1.0 if parents[node] < 0 else path_probabilities[parents[node]]))
        best = 1.06 / milliseconds[1]
        for mask in range(1, 1 << n):
            nodes = [node for node in range(n) if mask >> node & 1]
            if all(parents[node] < 0 or mask >> parents[node] & 1 for node in nodes):
                best = max(best, (1 + sum(path_probabilities[node] for node in nodes)) / milliseconds[len(nodes) + 1])
        choice = select_tree([proposal(list(range(n)), parents, p)], milliseconds, 31, 31)
        rate = choice.expected / milliseconds[len(choice.tokens) + 1]
        assert rate == pytest.approx(best) or (not choice.tokens and best == 1.06)


def test_no_tree_is_selected_where_verifying_costs_as_much_as_it_may_gain():
    milliseconds = [float(n) for n in range(40)]
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], milliseconds, 31, 31).tokens == []
    flat = [1.0] * 40
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], flat, 31, 31).tokens == [1, 2]
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], flat, 31, 1).tokens == [1]
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], flat, 1, 31).tokens == [1]


def test_drafts_of_several_drafters_are_merged():
    flat = [1.0] * 40
    choice = select_tree([proposal([1, 2], [-1, 0], [0.9, 0.5]), proposal([1, 3], [-1, 0], [0.6, 0.4])], flat, 31, 31)
    assert (choice.tokens, choice.parents, choice.depths) == ([1, 2, 3], [-1, 0, 0], [0, 1, 1])
    # 0.9, then 0.5, and of the other half 0.4
    assert choice.expected == pytest.approx(1 + 0.9 + 0.45 + 0.9 * 0.4 * 0.5)
