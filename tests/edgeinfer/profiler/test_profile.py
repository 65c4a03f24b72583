"""Profiles of tiny models: sums, what fits, speeds of other machines, hit rates, and the check in another process."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_experts import write_tiny_experts
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.native.trial import PassTimes
from edgeinfer.cli import main
from edgeinfer.cli.profile_text import profile_lines
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.sizes import parse_amount
from edgeinfer.loading import plan as load_plan
from edgeinfer.memory.process import Process
from edgeinfer.models import Attention
from edgeinfer.profiler import machine, passes, report
from edgeinfer.profiler.hits import recency_hit_rate, union_of
from edgeinfer.profiler.machine import Machine, described
from edgeinfer.profiler.passes import Passes

GB = 1e9
HERE = Machine("this CPU", 2, 8 << 30, 20 * GB, 100 * GB, 1 * GB)
# 20 ms for one token as the weights are read, 2 ms of multiply-adds for each more beyond ten.
TIMES = PassTimes({1: 0.018, 2: 0.018, 16: 0.03, 32: 0.06}, {1: 0.002, 2: 0.002, 16: 0.002}, 1e-6, 1e-7, False)


@pytest.fixture(autouse=True)
def _given_speeds(monkeypatch):
    """Times of passes and limits of the machine that are not measured: timings decide no test."""
    monkeypatch.setattr(report, "this_machine", lambda n_threads, needs_limits: HERE)
    monkeypatch.setattr(report, "trial_times", lambda *_: TIMES)
    monkeypatch.setattr(report, "measure_disk", lambda path: 1 * GB)
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(40 << 20, 0))  # this one grows while tests run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("profile") / "tiny.gguf", "llama", "Q4_0")


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("profile") / "experts.gguf", "qwen3moe")


def run(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def test_the_table_is_the_ledger_and_json_has_all_of_it(tiny):
    found = edgeinfer.profile(tiny, n_ctx=64)
    assert sum(item.planned for item in found.ledger.items) == found.ledger.planned
    purposes = {item.purpose for item in found.ledger.items}
    assert {"process", "weights", "KV cache", "activations", "drafters"} <= purposes
    output = run(tiny, "-c", 64, "--json", "--fit-into", "1GiB")
    record = json.loads(output.stdout)
    assert output.exit_code == 0
    sizes = {item["purpose"]: item["planned"] for item in record["ledger"]["items"]}
    assert sizes["weights"] == found.ledger.of("weights")
    assert record["expected"]["speed"]["tokens_per_second"] == found.speed.tokens_per_second
    assert found.speed.tokens_per_second == pytest.approx(1 / 0.02)
    assert [row["n_ctx"] for row in record["contexts"]] == [64, found.n_ctx_train]
    assert record["fit"][0]["settings"]["n_ctx"] == found.n_ctx_train


def test_what_is_listed_fits_and_is_what_load_plans(tiny):
    whole = edgeinfer.profile(tiny, n_ctx=256, draft="none")
    budget = whole.ledger.peak
    found = edgeinfer.profile(tiny, fit=budget)
    assert found.fit and all(row.peak <= budget for row in found.fit)
    first = found.fit[0]
    assert not first.changes_text and first.settings.n_ctx >= 256
    order = [(row.changes_text, -row.settings.n_ctx) for row in found.fit]
    assert order == sorted(order)
    for row in found.fit:
        assert edgeinfer.profile(tiny, **vars(row.settings)).ledger.peak == row.peak
    planned = edgeinfer.profile(tiny, **vars(first.settings)).ledger
    with edgeinfer.load(tiny, **vars(first.settings)) as engine:
        use = engine.memory_plan.use
    assert use.weights + use.kv_cache + use.activations == sum(
        planned.of(purpose) for purpose in ("weights", "KV cache", "activations")
    )


def test_a_shorter_context_is_listed_where_the_trained_one_does_not_fit(tmp_path):
    model = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0", n_ctx_train=8192)
    budget = edgeinfer.profile(model, n_ctx=64, draft="none").ledger.peak
    first = next(row for row in edgeinfer.profile(model, fit=budget).fit if not row.changes_text)
    assert 64 <= first.settings.n_ctx < 8192 and first.peak <= budget
    whole = replace(first.settings, n_ctx=8192)
    assert edgeinfer.profile(model, **vars(whole)).ledger.peak > budget


def test_the_only_settings_that_fit_are_said_as_flags_that_load_them(tiny):
    found = edgeinfer.profile(tiny, fit="1GiB", n_ctx=64, draft="none")
    text, row = "\n".join(profile_lines(found)), found.fit[0].settings
    assert len(found.fit) == 1
    said = f"Only this fits into 1024 MiB: -c {row.n_ctx} --cache-type f16 -ub {row.n_batch} --drafter none\n"
    assert said in text and "tokens/s are expected." in text
    several = "\n".join(profile_lines(replace(found, fit=found.fit * 2)))
    assert "Only this" not in several and "-c   cache type  drafts  -ub" in several


def test_a_model_larger_than_the_machine_is_profiled_and_exit_code_4_says_so(tiny):
    found = edgeinfer.profile(tiny, memory="1MiB")
    assert not found.fits and found.ledger.peak > 1 << 20
    output = run(tiny, "--memory", "1MiB")
    assert output.exit_code == 4 and "too few" in output.stdout and "weights" in output.stdout
    output = run(tiny, "--fit-into", "1MiB")
    assert output.exit_code == 4 and "no settings fit" in output.stderr
    broken = tiny.with_name("broken.gguf")
    broken.write_bytes(tiny.read_bytes()[:100])
    assert run(broken).exit_code == 3


def test_experts_are_expected_to_be_read_from_the_disk_as_the_hit_rate_says(experts):
    found = edgeinfer.profile(experts, draft="none")
    assert [row.share for row in found.caches] == sorted(row.share for row in found.caches)
    for row in found.caches[:-1]:
        hits = row.speed.hit_rate
        read = (1 - hits.share) * found.speeds.work.expert_bytes / 1e9
        assert row.speed.tokens_per_second == pytest.approx(1 / (found.passes.seconds(1, 0) + read))
        assert hits.origin == "traces"
    assert found.caches[-1].speed.hit_rate.share == 1.0
    slow = edgeinfer.profile(experts, draft="none", disk=1e3, expert_cache="25%", prompt_tokens=500)
    all_experts = found.speeds.work.expert_bytes * 8 / 3
    assert slow.speed.first_token_seconds == pytest.approx(0.75 * all_experts / 1e3, rel=0.01)
    assert found.caches[0].peak < found.caches[-1].peak
    faster = edgeinfer.profile(experts, draft="none", disk="100GB/s")
    assert faster.caches[0].speed.tokens_per_second > found.caches[0].speed.tokens_per_second


def test_another_machine_reads_and_computes_at_its_own_rate(tiny):
    half = edgeinfer.profile(tiny, draft="none", bandwidth="10GB/s")
    assert half.speed.tokens_per_second == pytest.approx(1 / 0.04)  # half the bandwidth, twice the time
    slow = edgeinfer.profile(tiny, draft="none", compute="1G", bandwidth="20GB/s")
    assert slow.passes.seconds(16, 0) == pytest.approx(100 * (16 * 0.06 / 32 + 0.002))
    assert half.machine.given == ("bandwidth",)
    assert "given" in run(tiny, "--bandwidth", "10GB/s").stdout


def test_what_cannot_be_tried_has_the_limits_of_the_machine_as_its_speed(tiny, monkeypatch):
    monkeypatch.setattr(report, "trial_times", lambda *_: None)
    found = edgeinfer.profile(tiny, draft="none")
    work = found.speeds.work
    assert found.passes.origin == "limits"
    assert found.speed.tokens_per_second == pytest.approx(
        1 / max(work.n_bytes / (20 * GB), work.multiply_adds / (100 * GB))
    )


def test_times_of_passes_grow_with_the_context_up_to_the_window():
    windowed = Attention(96, 96, 4, 2, 24, 0.2, "q", "k", "v", "output", window=100)
    made = Passes({1: 0.02, 2: 0.02, 16: 0.032}, 0.06, 0.002, 1e-6, 1e-7, [None, windowed], "made-up weights")
    assert made.seconds(1, 1000) == pytest.approx(0.02 + 1100e-6)
    assert made.seconds(9, 0) == pytest.approx(0.026)
    assert made.seconds(32, 0) == pytest.approx(0.064)
    seen = 1000 * 1000 / 2 + 100 * 100 / 2 + 900 * 100
    assert made.prompt_seconds(1000, 512) == pytest.approx(1000 * 0.06 / 32 + 0.002 + seen * 1e-7)
    with_experts = replace(made, expert_share=0.5, n_experts=8, n_used=2)
    assert with_experts.seconds(2, 0) == pytest.approx(0.02 * (1 + 0.5 * 0.75))


def test_a_cache_of_recently_used_experts_hits_as_often_as_a_simulated_one():
    rng = np.random.default_rng(1)
    counts = rng.exponential(size=(1, 64)) * 1000
    chances = counts[0] / counts.sum()
    held: list[int] = []
    hits = 0
    for expert in rng.choice(64, size=20000, p=chances).tolist():
        hits += expert in held
        held = [expert, *(other for other in held if other != expert)][:16]
    assert recency_hit_rate(counts, 0.25, 1) == pytest.approx(hits / 20000, abs=0.02)
    assert union_of(1, 64, 8) == pytest.approx(1.0)
    assert union_of(1000, 64, 8) == pytest.approx(8.0)


@pytest.mark.parametrize(
    "text, value", [("4GiB", 4 << 30), ("50GB/s", 50e9), ("300G", 300e9), ("1.5e3", 1500), (7, 7), ("2 kb", 2000)]
)
def test_sizes_and_rates_are_read_with_their_units(text, value):
    assert parse_amount("memory", text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "3x", "60%", True, "nan", float("inf")])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(InvalidArgument, match="memory must be"):
        parse_amount("memory", text)


def test_flags_of_drafts_mean_the_same_as_for_a_chat(tiny):
    assert run(tiny, "--drafter", "none", "-md", tiny).exit_code == 2
    record = json.loads(run(tiny, "--drafter", "suffix", "-md", tiny, "--json").stdout)
    assert record["drafters"]["names"] == ["suffix", "model"]


def test_what_a_caller_does_not_say_is_as_here():
    there = described(HERE, machine.Wishes(disk=2 * GB))
    assert there == replace(HERE, disk_bytes_per_second=2 * GB, given=("disk",)) and there.is_here


def test_damaged_records_are_measured_again():
    record = json.loads(json.dumps({"layers": TIMES.layers, "output": TIMES.output, "row_position": 0.0}))
    assert passes._times_in(record) is None
    assert passes._times_in(record | {"row_position_long": 0.0}).layers == TIMES.layers
    assert passes._times_in(record | {"row_position_long": float("nan")}) is None
    assert machine._limits_in({"read_bytes_per_second": 1}) is None


def test_the_check_loads_the_model_in_another_process_and_finds_what_was_planned(tiny, tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('of the folder that a user is in')")
    monkeypatch.chdir(tmp_path)
    checked = edgeinfer.profile(tiny, n_ctx=64, draft="none", check=True).verification
    assert checked.n_tokens >= 62
    taken = {item.purpose: item.taken for item in checked.ledger.items}
    planned = {item.purpose: item.planned for item in checked.ledger.items}
    assert taken["weights"] == planned["weights"] and taken["KV cache"] == planned["KV cache"]
    assert checked.ledger.peak_taken > taken["weights"]
    assert {of.unit for of in checked.speeds} == {"tokens/s", "s"} and all(of.measured > 0 for of in checked.speeds)
    assert [of.n_past for of in checked.speeds if of.unit == "tokens/s"] == [40, 56]


@pytest.mark.parametrize("more", [{"parallel": 4}, {"parallel": 1, "cache_ram": "256KiB"}])
def test_the_check_fills_the_cache_of_several_texts(more, tiny):
    found = edgeinfer.profile(tiny, n_ctx=256, draft="none", check=True, **more)
    ledger = found.verification.ledger
    taken = {item.purpose: item.taken for item in ledger.items}
    one = edgeinfer.profile(tiny, n_ctx=256, draft="none", parallel=1).ledger
    assert taken["KV cache"] == found.ledger.of("KV cache") > one.of("KV cache")
    assert ledger.peak_taken <= 1.05 * ledger.peak


def test_several_texts_are_planned_and_said(tiny):
    def kv_cache(*flags):
        output = run(tiny, "-c", 256, "--drafter", "none", "--json", *flags)
        assert output.exit_code == 0, output.stderr
        items = json.loads(output.stdout)["ledger"]["items"]
        return next(item["planned"] for item in items if item["purpose"] == "KV cache")

    one = kv_cache("-np", 1)
    assert [kv_cache("-np", n) for n in (4, 8)] == [one * 5 // 2, one * 9 // 2], "two segments, and one for each"
    assert kv_cache() == kv_cache("-np", 4)
    assert one < kv_cache("-np", 1, "--cache-ram", "100KiB") <= one + (100 << 10)
    found = edgeinfer.profile(tiny, fit="1GiB", n_ctx=64, draft="none", parallel=3, cache_ram="1MiB")
    text = "\n".join(profile_lines(found))
    assert "n_ctx 64, 3 texts at once" in text and "-np 3 --cache-ram 1048576B" in text


def test_the_check_is_not_of_another_machine(tiny):
    output = run(tiny, "--measure", "--bandwidth", "10GB/s")
    assert output.exit_code == 2 and "leave out bandwidth" in output.stderr
