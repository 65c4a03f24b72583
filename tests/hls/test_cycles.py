"""The model of cycles, and the walk that fills the tables."""

import numpy as np
import pytest

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.hls.cycles import TIMINGS, cycles
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.stalls import Stalls, goes
from edgeinfer.hls.walk import RTL, rom_source, walk


@pytest.mark.parametrize("n_trits", [3, 5])
def test_the_walk_reaches_each_entry_once_with_the_right_sum(n_trits: int) -> None:
    x = np.random.default_rng(1).integers(-128, 128, n_trits)
    total, seen = 0, set()
    for move in walk(n_trits):
        total += -x[move.digit] if move.negative else x[move.digit]
        assert total == sum((move.entry // 3**j % 3 - 1) * x[j] for j in range(n_trits))
        seen.add(move.entry)
    assert seen == set(range(3**n_trits)) and len(walk(n_trits)) == 3**n_trits


@pytest.mark.parametrize("n_trits", [3, 5])
def test_the_rom_is_that_of_the_walk(n_trits: int) -> None:
    source = RTL / f"ei_walk_rom_g{n_trits}.sv"
    assert source.read_text() == rom_source(n_trits), "run python -m edgeinfer.hls.walk"


def test_a_walk_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="3 or 5 trits: found 4"):
        walk(4)


@pytest.mark.parametrize("tables", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("n_steps, n_tiles", [(1, 1), (2, 3), (9, 17), (3, 244), (3, 245), (4, 246), (5, 1000)])
def test_without_stalls_the_model_is_a_formula(tables: int, n_steps: int, n_tiles: int) -> None:
    """Filling is hidden behind 245 tiles or more."""
    log_tables = tables.bit_length() - 1
    for encoding, constant, step in (("base3", 257, max(245, n_tiles)), ("g3x5", 40, n_tiles + 29)):
        geometry = Geometry(encoding, 8, tables)
        wanted = tables + log_tables + constant + (n_steps - 1) * step + n_tiles
        shape = (geometry.step_inputs * n_steps, 8 * n_tiles)
        assert cycles(geometry, *shape) == cycles(geometry, *shape, Stalls()) == wanted


@pytest.mark.parametrize("encoding", TIMINGS)
def test_a_stall_never_makes_a_product_faster(encoding: str) -> None:
    geometry = Geometry(encoding, 4, 16)
    ready = cycles(geometry, 500, 100)
    for shares in ((0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.9)):
        assert cycles(geometry, 500, 100, Stalls(*shares, seed=3)) > ready


def test_draws_have_the_share_that_was_asked_for() -> None:
    for share in (0.0, 0.3, 0.9):
        assert abs(1 - goes(5, share, 0, 100_000).mean() - share) < 0.01
    assert np.array_equal(goes(7, 0.5, 0, 100)[40:], goes(7, 0.5, 40, 60))
    assert np.array_equal(goes(7, 0.5, 0, 90, 30), goes(7, 0.5, 0, 3).repeat(30))
    with pytest.raises(InvalidArgument, match="1 cycle or more: found 0"):
        Stalls(length=0)
    with pytest.raises(InvalidArgument, match="stalls of w must be 0 to 0.999: found 1.0"):
        Stalls(w=1.0)
