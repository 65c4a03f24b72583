"""How often drafts are right, of the same head judged twice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest


def assert_matches_agree(found: Sequence[float], expected: Sequence[float], n_positions: int, least: float) -> None:
    """Each depth of `match_by_depth` differs by little, or by one draft that falls differently, as where weights are
    rounded or rows stand in other batches; few are left to compare in the depth.

    n_positions: that were judged, at most.  least: always allowed.
    """
    for depth, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        n_compared = max(1.0, n_positions * math.prod(expected[:depth]))
        assert ours == pytest.approx(theirs, abs=max(least, 1.5 / n_compared)), depth
