"""The netlists of small engines in Icarus against numpy and the model of cycles."""

from __future__ import annotations

import re

import numpy as np
import pytest
from parts import is_there, missing

from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.hls.cycles import cycles
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import Trits, pack
from edgeinfer.hls.synth.netlist import Netlist

MOST_IN, MOST_OUT = 40, 12
GEOMETRIES = {"base3": Geometry("base3", 1, 2, 1), "g3x5": Geometry("g3x5", 2, 4, 1)}


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def netlist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Netlist:
    for part in ("pyosys", "iverilog"):
        if not is_there(part):
            missing(part, "it is not installed")
    return Netlist(GEOMETRIES[request.param], MOST_IN, MOST_OUT, tmp_path_factory.mktemp(request.param))


def trits(rng: np.random.Generator, n_out: int, n_in: int) -> Trits:
    return rng.integers(-1, 2, (n_out, n_in)).astype(np.int8)


def test_a_netlist_gives_the_exact_product_in_the_cycles_of_the_model(netlist: Netlist) -> None:
    rng = np.random.default_rng(38)
    n_in, n_out = 37, 11  # neither fills the last step or tile
    w, x = trits(rng, n_out, n_in), rng.integers(-128, 128, (1, n_in)).astype(np.int8)
    y, n_cycles = netlist.product(x, pack(w, netlist.geometry), n_out)
    np.testing.assert_array_equal(y, x.astype(np.int32) @ w.T.astype(np.int32))
    assert n_cycles == [cycles(netlist.geometry, n_in, n_out)]


@pytest.mark.parametrize("weight", [-1, 1])
def test_the_largest_sums_fit_and_streams_may_pause(netlist: Netlist, weight: int) -> None:
    w, x = np.full((3, MOST_IN), weight, dtype=np.int8), np.full((1, MOST_IN), -128, dtype=np.int8)
    y, n_cycles = netlist.product(x, pack(w, netlist.geometry), len(w), stalls=5)
    assert (y == -128 * weight * MOST_IN).all() and n_cycles[0] > cycles(netlist.geometry, MOST_IN, len(w))


def test_a_netlist_sees_one_weight(netlist: Netlist) -> None:
    w, x = np.zeros((2, 5), dtype=np.int8), np.array([[1, 2, 3, 4, 5]], dtype=np.int8)
    w[1, 3] = -1
    y, _ = netlist.product(x, pack(w, netlist.geometry), 2)
    assert y.tolist() == [[0, -4]]


def test_a_netlist_refuses_what_it_is_not_made_for(netlist: Netlist) -> None:
    stream = pack(np.zeros((2, 5), dtype=np.int8), netlist.geometry)
    with pytest.raises(ShapeError, match=r"must take \d+ bytes: found"):
        netlist.product(np.zeros((1, 5), dtype=np.int8), stream[:-1], 2)
    large = pack(np.zeros((2, 99), dtype=np.int8), netlist.geometry)
    with pytest.raises(InvalidArgument, match="has room for"):
        netlist.product(np.zeros((1, 99), dtype=np.int8), large, 2)


def test_a_fault_in_a_netlist_is_seen(netlist: Netlist) -> None:
    """An exclusive or of a row's total, or of two tables' sum, is inverted; in an odd number of steps."""
    text, exclusive_or = netlist.text, r"(LUT2 #\(\s+\.INIT\(4'h)6(\)\s+\) \S+ \(\s+\.I0\(\\g_tree)"
    faulty, n_faults = re.subn(exclusive_or, r"\g<1>9\2", text, count=1)
    assert n_faults == 1
    rng = np.random.default_rng(39)
    w, x = trits(rng, 12, 25), rng.integers(-128, 128, (1, 25)).astype(np.int8)
    netlist.take(faulty)
    try:
        y, _ = netlist.product(x, pack(w, netlist.geometry), len(w))
        assert (y != x.astype(np.int32) @ w.T.astype(np.int32)).any()
    except EdgeInferError as error:
        assert "failed: " in str(error)
    finally:
        netlist.take(text)
