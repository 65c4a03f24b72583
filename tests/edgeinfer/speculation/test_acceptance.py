"""Acceptance probabilities and rates, and when a chain is long enough."""

import numpy as np
import pytest

from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.throughput import chain_rate
from edgeinfer.speculation.tree import DraftTree

pytestmark = pytest.mark.usefixtures("native")


def test_probabilities_are_learnt_by_bucket_and_depth_and_old_observations_fade():
    table = AcceptanceTable()
    tree = DraftTree([5, 6, 9], [-1, 0, -1], [0.5, 0.5, 0.5], [1, 1, 2])
    for _ in range(200):
        table.learn(tree, [5, 7])
    assert (
        table.probability(1, 0, 0.5) > 0.85
        and table.probability(1, 1, 0.5) < 0.1
        and table.probability(2, 0, 0.5) < 0.1
    )
    assert table.probability(1, 0, 0.5) / table.calibration <= 1.0 and table.probability(7, 1, 0.25) == 0.25
    for _ in range(200):
        table.learn(tree, [9, 7])
    assert table.probability(1, 0, 0.5) < 0.1 and table.probability(2, 0, 0.5) > 0.1


def test_the_calibration_of_one_request_carries_over_to_the_next_and_fades():
    table, draft = AcceptanceTable(), DraftTree([5], [-1], [0.5], [0])
    for _ in range(20):
        table.learn(draft, [6])
    lost = table.calibration
    table.start_request()
    assert 0.1 < lost < table.calibration < 0.5
    for _ in range(6):
        table.learn(draft, [5])
    assert table.calibration > 0.8
    for _ in range(3):
        table.start_request()
    assert table.calibration > 0.9


def test_a_new_request_returns_the_acceptance_rate_towards_its_prior():
    table, usual = AcceptanceTable(0.4), AcceptanceTable()
    assert table.acceptance_rate == pytest.approx(0.4) and usual.acceptance_rate == pytest.approx(0.85)
    for one in (table, usual):
        for _ in range(200):
            one.learn(DraftTree([5], [-1], [0.5], [0]), [5])
        assert one.acceptance_rate > 0.98
        for _ in range(12):
            one.start_request()
    assert table.acceptance_rate == pytest.approx(0.4, abs=0.01) and usual.acceptance_rate == pytest.approx(
        0.85, abs=0.01
    )


def test_a_chain_is_extended_up_to_the_best_expected_tokens_per_millisecond():
    milliseconds = [0.0] + [1.0 + 0.1 * (n - 1) for n in range(1, 40)]
    length_rule = ChainLengthRule(milliseconds, draft_ms=0.3)
    path_probabilities: list[float] = []
    while length_rule.should_extend(path_probabilities, 0.8):
        path_probabilities.append(0.8 ** (len(path_probabilities) + 1))
    rates = [(1 + sum(0.8**i for i in range(1, k + 1))) / (milliseconds[k + 1] + 0.3 * k) for k in range(31)]
    assert len(path_probabilities) == int(np.argmax(rates))
    assert chain_rate(0.8, 0.3, milliseconds, 31) == pytest.approx(max(rates))
