"""Costs of verify passes: calibration, correction by passes, and the files that keep them."""

import json
import random
import subprocess
import sys
import time

import pytest
from drafting import (
    PROMPT,
    FixedCosts,
    FunctionDrafter,
    cost_model,
    knowing,
    tokens_of,
    with_drafters,
)
from steady_clock import SteadyClock
from tiny_models import write_tiny_model
from virtual_time import slow_target

from edgeinfer.common.other_work import MOST_SHARE, LoadMeter, MachineClock
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.calibration import (
    SIZES,
    cached_costs,
    cost_key,
    default_folder,
    load_curve,
    measure_costs,
    save_curve,
)
from edgeinfer.speculation.cost import CostCurve, CostModel
from edgeinfer.speculation.tree import no_draft

GREEDY = {"temperature": 0.0}

pytestmark = pytest.mark.usefixtures("native")


def test_calibration_keeps_its_time_budget_and_leaves_the_session_empty(plain, monkeypatch):
    """On a machine where a pass takes 10 ms, and each of its tokens one more."""
    clock = SteadyClock()
    monkeypatch.setattr("edgeinfer.speculation.calibration.time", clock.as_module())
    slow_target(plain.session, lambda n: 0.01 + 0.001 * n, clock.sleep)
    for budget, n_sizes in ((10.0, len(SIZES)), (0.5, 8), (0.2, 7), (0.0, 1)):
        began = clock.now()
        curve = measure_costs(plain.session, budget)
        assert plain.session.n_past == 0 and clock.now() - began <= max(budget, 0.03)  # a warm-up and a pass at least
        assert list(curve.near) == list(SIZES[:n_sizes]) and bool(curve.far) == (budget > 0)
        assert list(curve.near.values()) == pytest.approx([0.01 + 0.001 * n for n in curve.near], rel=0.01)


def test_costs_between_and_beyond_measured_sizes_are_linear():
    costs = CostModel(CostCurve(0, {1: 0.010, 2: 0.012, 4: 0.020, 8: 0.040}, 100, {1: 0.012, 8: 0.056}))
    near = list(costs.milliseconds(0))
    assert near[0] == 0.0 and near[1:5] == pytest.approx([10, 12, 16, 20]) and near[16] == pytest.approx(80)
    far = costs.milliseconds(96)
    assert far[1] == pytest.approx(10 + 0.02 * 96) and far[8] == pytest.approx(40 + 0.16 * 96)
    assert costs.chain_ms(64, 0) == pytest.approx(2 * near[32])


def test_no_size_costs_more_than_a_larger_one(plain, monkeypatch):
    def time_passes(session, tokens, sizes, deadline, seconds):
        seconds.update({size: 0.060 if size == 2 else 0.010 * size for size in sizes})

    monkeypatch.setattr("edgeinfer.speculation.calibration.time_passes", time_passes)
    near = measure_costs(plain.session, 0.5).near
    assert [near[size] for size in (1, 2, 3, 4)] == [0.010, 0.030, 0.030, 0.040]


def test_no_pass_costs_more_than_a_longer_one_or_two_shorter_ones():
    costs = CostModel(CostCurve(0, {1: 0.010, 2: 0.060, 4: 0.100, 8: 0.120}, 0, {}))
    assert costs.is_doubtful
    assert costs.milliseconds(0)[1:9] == pytest.approx([10, 20, 30, 40, 50, 60, 70, 80])
    costs.correct(4, 0, 14.0)
    costs.correct(2, 0, 12.0)
    costs.correct(2, 0, 500.0)
    assert not costs.is_doubtful
    assert costs.milliseconds(0)[1:9] == pytest.approx([10, 12, 13, 14, 14.7, 15.4, 16.1, 16.8])


def test_a_disturbed_calibration_does_not_end_drafting(opened, plain, model):
    engine = opened(model)
    disturbed = CostModel(CostCurve(0, {n: 0.05 * n for n in range(1, 9)}, 0, {}))
    text = engine.tokenize(PROMPT) + list(tokens_of(plain, GREEDY, n=200))
    drafter = FunctionDrafter(lambda context, limit: knowing(text, 259, random.Random(1), limit, len(context.tokens)))
    with_drafters(engine, drafter, costs=disturbed)
    completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
    assert list(completion.tokens) == text[-200:]
    assert completion.timings.speculation.tokens_per_step > 1.2
    assert disturbed.milliseconds(0)[2] < 0.5 * 100.0  # of what it was taken for


def test_doubtful_costs_are_measured_again_by_padded_passes(opened, plain, model):
    engine, sizes, costs = opened(model), [], Doubtful()
    with_drafters(engine, FunctionDrafter(lambda context, limit: no_draft()), costs=costs)
    forward = engine.session.forward
    engine.session.forward = lambda tokens, *given, **options: (
        sizes.append(len(tokens)) or forward(tokens, *given, **options)
    )
    completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
    assert completion.tokens == tokens_of(plain, GREEDY, n=200)
    of_steps = sizes[-completion.timings.speculation.steps :]
    assert len(of_steps) == 199 and {1, 2, 4, 8} == set(of_steps) and of_steps.count(1) > 190
    assert completion.timings.speculation.by_drafter == completion.timings.speculation.dropped == {}
    assert set(costs.observed) == {1} and costs.corrected == [2, 4, 8, 2, 4], "a wrong cost says nothing of the others"


def test_costs_of_long_passes_are_measured_again_now_and_then(opened, plain, model):
    engine, sizes = opened(model), []
    believed = CostCurve(0, {1: 2.0, 4: 2.1, 5: 6.0, 8: 12.0, 16: 24.0}, 0, {})  # far beyond any outlier
    costs = CostModel(believed)
    text = engine.tokenize(PROMPT) + list(tokens_of(plain, GREEDY, n=200))
    drafter = FunctionDrafter(lambda context, limit: knowing(text, 259, random.Random(1), limit, len(context.tokens)))
    with_drafters(engine, drafter, costs=costs)
    forward = engine.session.forward
    engine.session.forward = lambda tokens, *given, **options: (
        sizes.append(len(tokens)) or forward(tokens, *given, **options)
    )
    before = list(costs.milliseconds(0))
    for n in range(3):
        completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
        assert list(completion.tokens) == text[-200:], n
    assert 8 in sizes
    assert costs.milliseconds(0)[8] < before[8] / 2 and costs.milliseconds(0)[16] < before[16] / 2


class Doubtful(FixedCosts):
    """Costs that stay in doubt whatever is measured, which is noted."""

    def __init__(self):
        super().__init__(lambda n: 0.05 * n)
        self.observed, self.corrected = [], []

    def observe(self, n, n_past, milliseconds, is_disturbed=False):
        self.observed.append(n)

    def correct(self, n, n_past, milliseconds):
        self.corrected.append(n)


def test_a_doubtful_calibration_is_not_written(opened, model, tmp_path, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    for second, n_files in ((0.016, 0), (0.012, 1)):
        curve = CostCurve(0, {1: 0.010, 2: second}, 0, {})
        monkeypatch.setattr("edgeinfer.speculation.open.measure_costs", lambda session, budget, curve=curve: curve)
        opened(model)
        assert len(list(tmp_path.glob("*.json"))) == n_files


def test_a_calibration_while_others_worked_is_used_and_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    monkeypatch.setattr("edgeinfer.speculation.calibration.MOST_SHARE", MOST_SHARE)
    curve = CostCurve(0, {1: 0.010, 2: 0.012, 4: 0.015}, 0, {})
    for cores, n_files in ((0.5, 0), (0.05, 1)):
        monkeypatch.setattr("edgeinfer.speculation.calibration.LoadMeter.load", lambda self, cores=cores: cores)
        costs = cached_costs("key", lambda: curve)
        assert costs.milliseconds(0)[4] == pytest.approx(15.0)
        for _ in range(200):
            costs.observe(1, 0, 10.0)
        costs.close()
        assert len(list(tmp_path.glob("*.json"))) == n_files


def test_work_of_other_processes_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            work, patience = LoadMeter(MachineClock()), time.monotonic() + 60
            while work.load() <= 0.3 and time.monotonic() < patience:  # it may begin late, and share its core
                time.sleep(0.1)
            assert work.load() > 0.3
        finally:
            other.kill()


def test_a_draft_model_has_a_cost_curve_of_its_own(opened, model, tmp_path, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    monkeypatch.setattr(
        "edgeinfer.speculation.open.measure_costs", lambda session, budget: CostCurve(0, {1: 0.010, 2: 0.012}, 0, {})
    )
    opened(model, draft=str(model))
    assert len(list(tmp_path.glob("*.json"))) == 2  # its weights are rounded


def test_the_corrected_curve_is_kept():
    kept: list[CostCurve] = []
    measured = CostCurve(0, {1: 0.030, 4: 0.060}, 100, {1: 0.032})
    costs = CostModel(measured, kept.append)
    for _ in range(63):
        costs.observe(1, 0, 10.0)
    costs.close()
    assert not kept  # a few passes tell less than the measurement
    for _ in range(40):
        costs.observe(1, 0, 10.0)
    costs.close()
    (curve,) = kept
    assert curve.near[1] == pytest.approx(0.010, rel=0.1) and curve.near[4] < 0.75 * measured.near[4]
    assert list(CostModel(curve).milliseconds(0)) == pytest.approx(list(costs.milliseconds(0)), rel=0.05)


def test_the_next_engine_starts_with_the_corrected_curve(opened, model, draft_model, tmp_path, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    engine = opened(model, draft=str(draft_model))
    (drafter,) = (one for one in engine.speculator.drafters if one.name == "model")
    for costs in (engine.speculator.costs, drafter._costs):
        for milliseconds in (0.001, 50.0):  # the machine is faster than was measured, and then it is busy
            for _ in range(200):
                costs.observe(1, 0, milliseconds)
    engine.close()
    again = opened(model, draft=str(draft_model))
    (drafter,) = (one for one in again.speculator.drafters if one.name == "model")
    assert again.speculator.costs.milliseconds(0)[1] == pytest.approx(0.001, rel=0.1)
    assert drafter._costs.milliseconds(0)[1] == pytest.approx(0.001, rel=0.1)


def test_a_slower_machine_shifts_the_curve_and_an_outlier_does_not():
    costs = cost_model(lambda n: 10.0 + n)
    before = list(costs.milliseconds(0))
    costs.observe(1, 0, 5000.0)
    assert costs.milliseconds(0)[1] < 1.1 * before[1]
    for _ in range(60):
        costs.observe(1, 0, 2.0 * before[1])
    now = costs.milliseconds(0)
    assert now[1] == pytest.approx(2.0 * before[1], rel=0.1) and now[8] > 1.3 * before[8]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"null",
        b"[" * 100000,
        b'{"near": {"1": 1.0}}',
        json.dumps({"n_near": 0, "near": {"1": -1.0}, "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"1": float("nan")}, "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"2": 1.0}, "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"1": 1.0}, "n_far": 0, "far": {"1": 1.0}}).encode(),
        json.dumps({"n_near": 0, "near": [1], "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"99": 1.0, "1": 1.0}, "n_far": 0, "far": {}}).encode(),
    ],
)
def test_a_damaged_cost_file_is_ignored(tmp_path, content):
    (tmp_path / "key.json").write_bytes(content)
    assert load_curve("key", tmp_path) is None


def test_a_cost_file_is_written_whole_and_read_back(tmp_path):
    curve = CostCurve(0, {1: 0.01, 4: 0.02}, 64, {1: 0.011})
    folder = tmp_path / "costs"
    save_curve("key", curve, folder)
    assert load_curve("key", folder) == curve and [path.name for path in folder.iterdir()] == ["key.json"]
    assert load_curve("another", folder) is None
    (tmp_path / "file").write_text("")
    save_curve("key", curve, tmp_path / "file")  # no folder can be made there: nothing happens


def test_the_key_tells_models_and_machines_apart(plain, tmp_path):
    other = write_tiny_model(tmp_path / "other.gguf", n_ff=512)
    with ModelFile.open(plain.path) as one, ModelFile.open(other) as two:
        keys = {cost_key(one, "cpu", 1), cost_key(one, "cpu", 2), cost_key(one, "x", 1), cost_key(two, "cpu", 1)}
        assert len(keys) == 4 and cost_key(one, "cpu", 1) in keys


def test_the_curve_is_measured_once_and_then_read(opened, model, monkeypatch):
    opened(model)
    monkeypatch.setattr("edgeinfer.speculation.open.measure_costs", lambda *a: pytest.fail("measured again"))
    opened(model)
    for path in default_folder().iterdir():
        path.write_bytes(b"{")
    monkeypatch.undo()
    assert opened(model).speculator is not None


def test_noting_one_pass_is_the_same_as_noting_all_of_them_anew():
    rng = random.Random(5)
    model, again = cost_model(), cost_model()
    for number in range(400):
        size = rng.choice([1, 1, 1, 2, 3, 8]) if number < 300 else 4  # at the end only one size is left
        model._add(size, rng.uniform(0.8, 1.5))
        again._note(model._recent)
        assert model._own == again._own and list(model._recent) == list(again._recent)
    assert set(model._own) == {4} and len(model._recent) == 64


def test_passes_of_one_token_wait_for_each_other_and_none_is_lost():
    curve = CostCurve(0, {1: 0.01, 2: 0.012, 32: 0.1}, 0, {})
    together, kept = CostModel(curve, lambda curve: kept.append(curve)), []
    for i in range(62):
        together.observe(1, 0, 20.0)
        assert (together.milliseconds(0)[1] == pytest.approx(10.0)) == (i < 3)
    together.observe(2, 0, 24.0)  # what came before it is observed first
    assert [size for size, _ in together._recent] == [1] * 62 + [2]
    together.observe(1, 0, 20.0)
    together.close()
    assert len(kept) == 1 and len(together._recent) == 64
