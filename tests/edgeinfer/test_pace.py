"""How much of a prompt is read in a pass beside texts that run."""

import pytest

from edgeinfer.scheduling.pace import LEAST_PIECE, Pace


def test_without_texts_that_run_a_pass_takes_all():
    assert Pace().piece(0, 512) == 512


def test_before_anything_is_measured_a_piece_is_small():
    assert Pace().piece(1, 512) == 2 * LEAST_PIECE
    assert Pace().piece(1, 40) == 40


@pytest.mark.parametrize("target, expected", [(100.0, 180), (20.0, LEAST_PIECE), (1000.0, 512)])
def test_a_piece_keeps_a_pass_below_the_target(target, expected):
    pace = Pace(target)
    pace.count(2, 0, 10.0)  # texts alone take 10 ms
    for _ in range(30):
        pace.count(2, 100, 60.0)  # and 100 tokens of a prompt 50 ms
    assert pace.piece(2, 512) == expected


def test_what_is_measured_follows_the_machine():
    pace = Pace(100.0)
    pace.count(1, 0, 10.0)
    for _ in range(30):
        pace.count(1, 100, 60.0)
    for _ in range(30):
        pace.count(1, 100, 110.0)  # half as fast
    assert pace.piece(1, 512) == pytest.approx(90, abs=2)
