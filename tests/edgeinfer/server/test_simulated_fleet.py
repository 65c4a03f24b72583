"""tests/benchmarks/simulate_fleet.py, from which docs/scaling.md has its numbers, against what is known otherwise."""

import importlib.util
import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "simulate_fleet.py"


@pytest.fixture(scope="module")
def fleet():
    spec = importlib.util.spec_from_file_location("simulate_fleet", FILE)
    module = sys.modules["simulate_fleet"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["simulate_fleet"]


@pytest.fixture(scope="module")
def replica(fleet):
    return fleet.Replica(((1, 20.0), (4, 40.0)), prefill=100.0, n_places=4, tbt=0.1)


def test_one_user_waits_for_its_own_prompt_and_tokens(fleet, replica):
    found = fleet.simulate(replica, fleet.Habits(30.0, 200.0, 100.0, spread=0.0), 1, 6000)
    assert found.first_p95 == pytest.approx(2.0) and found.between == pytest.approx(1 / 20)
    assert found.stays == pytest.approx(2.0 + 5.0) and found.tokens == pytest.approx(100.0) and found.moved == 0
    assert found.busy == pytest.approx(7 / 37, rel=0.1) and found.asked == pytest.approx(1 / 37, rel=0.1)


def test_a_busy_replica_draws_what_it_can(fleet, replica):
    found = fleet.simulate(replica, fleet.Habits(1.0, 1e-9, 100.0, spread=0.0), 12, 3000)
    assert found.busy == pytest.approx(1.0, abs=0.01)
    assert 12 * found.asked * found.tokens == pytest.approx(40.0, rel=0.05)  # tokens a second of four texts
    four = fleet.simulate(replica, fleet.Habits(1.0, 1e-9, 100.0, spread=0.0), 48, 1000, n_replicas=4)
    assert four.busy == pytest.approx(1.0, abs=0.02)
    assert 12 * found.asked * (found.stays + 1.0) == pytest.approx(12.0, rel=0.05)  # Little's law


def test_as_many_users_as_the_limits_allow(fleet, replica):
    habits, limits = fleet.Habits(30.0, 100.0, 50.0), {"first": 4.0, "between": 0.1, "seconds": 2000}
    n_users, waits = fleet.most_users(replica, habits, **limits)
    assert n_users > 1 and waits.first_p95 <= 4.0 and waits.between <= 0.1
    more = fleet.simulate(replica, habits, n_users + 1, 2000)
    assert more.first_p95 > 4.0 or more.between > 0.1
    assert fleet.most_users(replica, habits, **{**limits, "first": 0.1})[0] == 0
    four, _ = fleet.most_users(replica, habits, **limits, n_replicas=4)
    assert 3 * n_users <= four <= 5 * n_users  # replicas share nothing


def test_a_consistent_hash_keeps_most_users_where_they_are(fleet):
    before, after = (fleet.homes(2000, n, "hash", random.Random(5)) for n in (10, 11))
    assert all(len(set(each)) == len(each) == 4 for each in before)
    shares = Counter(each[0] for each in before)
    assert len(shares) == 10 and 100 < min(shares.values()) < max(shares.values()) < 350
    even = Counter(each[0] for each in fleet.homes(2000, 10, "even", random.Random(5)))
    assert set(even.values()) == {200} and len(after) == 2000 and {each[0] for each in after} == set(range(11))


def test_requests_are_passed_on_where_a_replica_has_its_number(fleet):
    one_by_one = fleet.Replica(((1, 20.0),), prefill=100.0, n_places=1, tbt=0.1)

    def waits(history, most):
        habits = fleet.Habits(20.0, 1.0, 100.0, history=history)
        return fleet.simulate(one_by_one, habits, 8, 5000, n_replicas=4, routing="hash", most=most)

    hashed, passed, costly = waits(0.0, math.inf), waits(0.0, 1), waits(1000.0, 1)
    assert hashed.moved == 0 < passed.moved < 1 and passed.first_p95 < 0.5 * hashed.first_p95
    assert costly.first_p95 > 2 * passed.first_p95  # the whole conversation is read again


def test_routers_carry_what_is_asked_and_check_all_replicas(fleet):
    router = fleet.Router(request=1e-4, event=1e-5, check=5e-5, replica_check=3e-4, stream_bytes=2.0**20)
    waits = fleet.Waits(1.0, 0.05, 0.9, asked=0.01, stays=10.0, tokens=200.0)
    small, large = (fleet.fleet_of(n, 10.0, waits).routed(router, 500) for n in (1000, 1_000_000))
    assert small["router_gib"] == pytest.approx(100 / 1024, abs=0.01)
    assert small["open_streams"] == 100 and small["events_per_second"] == 2000
    assert small["flat"]["router_cores"] == small["cells"]["router_cores"] == small["cells"]["cells"] == 1
    assert small["cells"]["busy"] == pytest.approx(10 * 1e-4 + 2000 * 1e-5 + 100 * 5e-5)
    assert large["flat"]["router_cores"] is None and large["flat"]["share_of_a_core_for_checks"] == 5.0
    assert large["cells"]["cells"] == 200 and large["cells"]["users_of_a_cell"] == 5000
    assert large["cells"]["busy"] == pytest.approx((10_000 * 1e-4 + 2e6 * 1e-5) / 200 + 500 * 5e-5)
    middle = fleet.fleet_of(50_000, 10.0, waits).routed(router, 500)["flat"]
    assert middle["router_cores"] == math.ceil((500 * 1e-4 + 1e5 * 1e-5) / (0.5 - 5000 * 5e-5))
    assert middle["share_of_a_replica_for_checks"] == pytest.approx(middle["router_cores"] * 3e-4)
