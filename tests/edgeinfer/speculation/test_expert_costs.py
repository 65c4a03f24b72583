"""What passes cost with experts: calibration with text, unions and waits that are learnt, and what a token needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import PROMPT
from numpy.typing import NDArray
from tiny_experts import write_tiny_experts

import edgeinfer
from edgeinfer.backends.native import NativeSession
from edgeinfer.engine import Engine
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.calibration import load_curve, save_curve
from edgeinfer.speculation.calibration_text import calibration_tokens
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.speculation.expert_calibration import measure_expert_costs
from edgeinfer.speculation.expert_cost import ExpertCostModel
from edgeinfer.speculation.expert_forecast import ExpertForecast, ExpertTable
from edgeinfer.speculation.expert_passes import PassesOf, PassExperts
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.policy import VerifyTree

CURVE = CostCurve(0, {1: 0.010, 2: 0.015, 4: 0.022, 8: 0.030}, 0, {}, {1: 1.0, 2: 1.6, 4: 2.4, 8: 3.2}, 0.006)


class Passes:
    """Says of each pass what it is told."""

    byte_share = 0.6

    def __init__(self, is_cached: bool = False, disk_ms: float = 0.0) -> None:
        self.is_cached, self.disk_ms = is_cached, disk_ms
        self.seen = PassExperts(1.0)

    def last(self) -> PassExperts:
        return self.seen


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("model") / "model.gguf", n_experts=16, n_used=2, n_ctx_train=512)


def native_session(engine: Engine) -> NativeSession:
    assert isinstance(engine.session, NativeSession)
    return engine.session


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("share", ["50%", None])
def test_passes_over_a_text_are_timed_and_their_unions_counted(
    opened: Callable[..., Engine], model: Path, share: str | None
) -> None:
    session = native_session(opened(model, draft="none", expert_cache=share))
    with ModelFile.open(model) as file:
        tokens = calibration_tokens(file)
    assert len(tokens) > 200
    curve = measure_expert_costs(session, PassesOf(session.model), tokens, 10.0)
    assert session.n_past == 0
    assert curve.near.keys() == curve.unions.keys()
    assert max(curve.near) == (32 if share is None else 8) and bool(curve.far) == (share is None)
    assert curve.unions[1] == 1.0 < curve.unions[2] <= 2.0 and curve.unions[8] <= 8.0
    for n in (2, 8):
        session.forward(tokens[8 : 8 + n], logits="all")
        of_layers = [len(set(layer.reshape(-1).tolist())) for layer in session.model.routing()]
        assert curve.unions[n] == pytest.approx(sum(of_layers) / (2 * len(of_layers)))
    assert 0.0 < curve.union_seconds <= curve.near[1]
    assert measure_expert_costs(session, PassesOf(session.model), [], 0.0).near.keys() == {1}


@pytest.mark.usefixtures("native")
def test_what_watches_the_passes_does_not_see_those_of_a_calibration(
    opened: Callable[..., Engine], model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = opened(model, draft="suffix", expert_cache="50%")
    assert isinstance(engine.speculator, Speculator) and isinstance(engine.speculator.costs, ExpertCostModel)
    forecast = engine.speculator._forecast
    assert forecast is not None and forecast._table.experts(range(291))[0] == []
    engine.generate(PROMPT, max_tokens=4, temperature=0.0)
    assert len(forecast._table.experts(range(291))[0]) > 4
    assert engine.experts is not None and sum(engine.experts._usage.counts.reshape(-1)) > 0


@pytest.mark.usefixtures("native")
def test_curves_in_memory_and_with_a_cache_are_kept_apart(
    opened: Callable[..., Engine], model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    monkeypatch.setattr("edgeinfer.speculation.open.measure_expert_costs", lambda *a: CURVE)
    for share, n_files in (("50%", 1), ("25%", 1), (None, 2)):
        opened(model, draft="suffix", expert_cache=share)
        assert len(list(tmp_path.glob("*.json"))) == n_files


def test_unions_are_written_and_read_back(tmp_path: Path) -> None:
    save_curve("key", CURVE, tmp_path)
    assert load_curve("key", tmp_path) == CURVE
    for damage in ('"union_seconds": -1.0', '"union_seconds": NaN', '"union_seconds": "much"'):
        text = (tmp_path / "key.json").read_text().replace('"union_seconds": 0.006', damage)
        (tmp_path / "bad.json").write_text(text)
        assert load_curve("bad", tmp_path) is None
    (tmp_path / "bad.json").write_text((tmp_path / "key.json").read_text().replace('"4": 2.4', '"4": 24.0'))
    assert load_curve("bad", tmp_path) is None


# ---- costs -----------------------------------------------------------------------------------------------------------


def test_a_text_whose_tokens_need_the_same_experts_is_cheaper_to_verify() -> None:
    passes = Passes()
    costs = ExpertCostModel(CURVE, passes)
    before = list(costs.milliseconds(0))
    assert before[4] == pytest.approx(22.0) and costs.union(4) == 2.4
    passes.seen = PassExperts(1.2)
    for _ in range(200):
        costs.observe(4, 0, 22.0 - 6.0 * 1.2)
    now = costs.milliseconds(0)
    assert costs.union(4) == pytest.approx(1.2, abs=0.05) and costs.union(8) < 2.4
    assert now[1] == pytest.approx(10.0, rel=0.05) and now[4] == pytest.approx(22.0 - 6.0 * 1.2, rel=0.05)
    assert now[8] < 0.85 * before[8]


def test_a_pass_that_needed_unusually_many_experts_says_nothing_about_the_machine() -> None:
    passes = Passes()
    costs = ExpertCostModel(CURVE, passes)
    for union in (3.4, 1.4) * 100:
        passes.seen = PassExperts(union)
        costs.observe(4, 0, 22.0 + 6.0 * (union - 2.4))
    assert costs.milliseconds(0)[1] == pytest.approx(10.0, rel=0.05)
    assert costs.milliseconds(0)[4] == pytest.approx(22.0, rel=0.06)


def test_expected_waits_for_the_disk_are_part_of_the_cost() -> None:
    passes = Passes(is_cached=True, disk_ms=40.0)
    costs = ExpertCostModel(CURVE, passes)
    assert costs.milliseconds(0)[1] == pytest.approx(10.0) and not costs.may_be_padded
    for n, union in [(1, 1.0), (4, 2.4)] * 100:
        passes.seen = PassExperts(union, 0.25 * union, 50.0 * 0.25 * union)
        costs.observe(n, 0, 1e3 * CURVE.near[n] + 50.0 * 0.25 * union)
    assert costs.missing_share == pytest.approx(0.25) and costs.wait_ms == pytest.approx(50.0)
    now = costs.milliseconds(0)
    assert now[1] == pytest.approx(10.0 + 12.5, rel=0.05) and now[4] == pytest.approx(22.0 + 30.0, rel=0.05)
    assert costs.without_waits(4, 0) == pytest.approx(22.0, rel=0.1)


def test_what_further_tokens_need_may_be_missing_more_often() -> None:
    passes = Passes(is_cached=True, disk_ms=40.0)
    costs = ExpertCostModel(CURVE, passes)
    for n, union, missing in [(1, 1.0, 0.1), (4, 2.4, 0.1 + 1.4 * 0.5)] * 100:
        passes.seen = PassExperts(union, missing, 50.0 * missing)
        costs.observe(n, 0, 1e3 * CURVE.near[n] + 50.0 * missing)
    assert costs.missing_share == pytest.approx(0.1) and costs.missing_share_of_more == pytest.approx(0.5)
    now = costs.milliseconds(0)
    assert now[1] == pytest.approx(15.0, rel=0.05) and now[4] == pytest.approx(22.0 + 40.0, rel=0.05)


def test_the_kept_curve_has_the_learnt_unions_and_no_waits() -> None:
    kept: list[CostCurve] = []
    passes = Passes(is_cached=True)
    costs = ExpertCostModel(CURVE, passes, kept.append)
    passes.seen = PassExperts(1.8, 0.9, 90.0)
    for _ in range(300):
        costs.observe(4, 0, 22.0 - 6.0 * 0.6 + 90.0)
    costs.close()
    (curve,) = kept
    assert curve.unions[4] == pytest.approx(1.8, abs=0.02) and curve.union_seconds == CURVE.union_seconds
    assert curve.near[4] == pytest.approx(0.022 - 0.006 * 0.6, rel=0.1)
    assert ExpertCostModel(curve, Passes()).milliseconds(0)[4] == pytest.approx(1e3 * curve.near[4], rel=0.01)


def test_no_observation_makes_a_cost_negative() -> None:
    passes = Passes(is_cached=True)
    costs = ExpertCostModel(CURVE, passes)
    for union, waited in ((1.0, 500.0), (4.0, 0.0), (1.0, 0.0)) * 50:
        passes.seen = PassExperts(union, union, waited)
        costs.observe(4, 0, 5.0)
        costs.correct(8, 0, 5.0)
        assert min(costs.milliseconds(0)[1:]) > 0.0


# ---- what tokens need ------------------------------------------------------------------------------------------------


def test_the_table_keeps_the_tokens_that_came_last() -> None:
    table = ExpertTable(2, 2)
    n = len(table._experts)
    for token in range(n + 10):
        table.learn([token], np.full((1, 4), token % 7, np.uint16))
    assert table.experts([0, 9, 10, n + 9])[0] == [2, 3]
    assert table.experts([10])[1].tolist() == [[10 % 7] * 4]
    table.learn([5, 6, 5], np.array([[1] * 4, [2] * 4, [3] * 4], np.uint16))
    assert table.experts([5, 6])[1].tolist() == [[3] * 4, [2] * 4]
    assert table._experts.nbytes <= 4 << 20 and ExpertTable(94, 8)._experts.nbytes <= 4 << 20


class Model:
    """A model of two layers with experts and one without, whose tokens always need the same."""

    pass_hook: Any = None

    def __init__(self) -> None:
        self.needed = {token: [[token % 8, 8], [-1, -1], [9, token % 8]] for token in range(20)}
        self.present = np.zeros((3, 16), np.uint8)
        self._last: list[int] = []

    def routing(self) -> NDArray[np.int32]:
        return np.array([self.needed[token] for token in self._last], np.int32).transpose(1, 0, 2)

    def run(self, tokens: list[int]) -> None:
        self._last = tokens
        self.pass_hook(tokens, lambda: True)


def forecast_of(model: Model) -> ExpertForecast:
    return ExpertForecast(model, lambda: model.present, [0, 2], 2)


def test_precision_is_that_of_absent_experts() -> None:
    model = Model()
    forecast = forecast_of(model)
    for _ in range(20):
        model.run([1, 2, 3])
    assert forecast.precision == 1.0 and forecast.is_trusted
    for shift in range(1, 40):
        model.needed = {token: [[(token + shift) % 8, 10], [-1, -1], [11, (token + shift) % 8]] for token in range(20)}
        model.run([1, 2, 3])
    assert forecast.precision < 0.7


def test_nodes_whose_experts_are_absent_are_left_out_unless_they_are_probable() -> None:
    model, passes = Model(), Passes(is_cached=True)
    forecast, costs = forecast_of(model), ExpertCostModel(CURVE, passes)
    passes.seen = PassExperts(1.0, 0.5, 50.0)
    for _ in range(100):
        model.run([1, 2, 3, 4])
        costs.observe(1, 0, 60.0)
    model.present[:, [1, 2, 8, 9]] = 1  # what tokens 1 and 2 need
    tree = VerifyTree([2, 3, 4, 19], [-1, -1, 1, -1], [0, 0, 1, 0], ["d"] * 4)
    assert forecast.kept(1, tree, [0, 1, 2, 3], [0.9, 0.5, 0.45, 0.4], costs, 0) == [0, 3], "19 is not known"
    assert forecast.kept(1, tree, [0, 1, 2, 3], [0.99, 0.98, 0.97, 0.9], costs, 0) == [0, 1, 2, 3]
    assert forecast.kept(3, tree, [0, 1, 2, 3], [0.9, 0.5, 0.4, 0.4], costs, 0) == [0, 1, 3], "3 is read anyway"


def test_a_pass_that_was_not_whole_teaches_nothing() -> None:
    model = Model()
    forecast = forecast_of(model)
    assert model.pass_hook([1, 2], lambda: False) is False
    assert forecast._table.experts([1, 2])[0] == []


@pytest.mark.usefixtures("native")
def test_dense_models_have_plain_costs(tmp_path: Path) -> None:
    from tiny_models import write_tiny_model

    with edgeinfer.load(write_tiny_model(tmp_path / "dense.gguf"), draft="suffix") as engine:
        assert isinstance(engine.speculator, Speculator) and engine.speculator._forecast is None
        assert not isinstance(engine.speculator.costs, ExpertCostModel)
