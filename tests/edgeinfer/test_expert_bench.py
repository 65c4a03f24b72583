"""Models whose experts are read from disk: the policy as simulated, what is kept for the next load, and the bench."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_experts import write_tiny_experts
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli, expert_bench
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.expert_bench import measure_caches
from edgeinfer.loading import plan as load_plan
from edgeinfer.loading.options import LoadOptions
from edgeinfer.loading.plan import plan_model
from edgeinfer.memory.process import Process
from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.policies import PassRecency, count_hits
from edgeinfer.offload.pressure import MemoryPressure
from edgeinfer.offload.routing import Routing
from edgeinfer.offload.size_search import load_search, search_key
from edgeinfer.offload.usage import load_usage, usage_key


@pytest.fixture(scope="module")
def model(tmp_path_factory, native):
    return write_tiny_experts(tmp_path_factory.mktemp("experts") / "tiny.gguf", n_layers=4, n_experts=16, n_used=3)


@pytest.fixture(scope="module")
def native():
    return pytest.importorskip("edgeinfer.backends.native")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch):
    """Whatever else this machine holds: a cache has the size that was planned."""
    monkeypatch.setattr(MemoryPressure, "between_passes", lambda self: None)


@pytest.mark.parametrize("share", ["10%", "30%", "60%"])
def test_the_store_hits_what_the_simulated_policy_hits(model, share):
    with ModelFile.open(model) as file:
        loaded = plan_model(file, LoadOptions(n_threads=2, expert_cache=share)).load()
        session, routing = loaded.session(), []
        tokens = np.random.default_rng(3).integers(0, 290, 41)
        for rows in ([tokens[0]], *([token] for token in tokens)):
            session.forward(rows)
            session.commit([0])
            routing.append(loaded.routing().transpose(1, 0, 2))
        stats = loaded.expert_stats()
        whole = Routing(np.concatenate(routing), 16)
        simulated = count_hits(whole, PassRecency(stats.n_slots))
        assert sum(of.lookups for of in stats.layers) == simulated.needed == 42 * 12
        assert sum(of.hits for of in stats.layers) == simulated.hits
        loaded.close()


def test_the_next_load_knows_which_experts_were_used_and_how_fast_it_was(model):
    with edgeinfer.load(model, n_threads=1, expert_cache="50%", draft="none") as engine:
        completion = engine.generate(
            [1, 2, 3],
            max_tokens=120,
            temperature=0.8,
            seed=1,
            logit_bias={i: -100.0 for i in engine.tokenizer.stop_ids},
        )
        assert completion.usage.completion_tokens == 120
        reads = completion.timings.decode_experts
        assert 0 < reads.hits < reads.needed == 119 * 12 and reads.bytes_read > 0
        assert reads.cache_bytes == engine.memory_plan.expert_cache
        assert engine.session.memory().experts == engine.memory_plan.use.experts
    with ModelFile.open(model) as file:
        assert load_usage(usage_key(file), 4, 16).counts.sum() == pytest.approx(122 * 12, rel=0.05)
        assert list(load_search(search_key(file, 1)).runs) == [engine.memory_plan.expert_cache]
    with edgeinfer.load(model, n_threads=1, expert_cache="50%", draft="none") as engine:
        again = engine.generate([1, 2, 3], max_tokens=2, temperature=0.0)
        assert again.timings.prompt_experts.hits + again.timings.decode_experts.hits > 0
    assert engine.experts.reads().needed > 0  # closed: the last figures


def test_the_text_is_that_of_the_whole_model(model):
    texts = set()
    for size in (None, "20%", "50%"):
        with edgeinfer.load(model, expert_cache=size) as engine:
            texts.add(engine.generate("some text", max_tokens=60, temperature=1.0, seed=5).tokens)
            assert (engine.experts is None) == (size is None)
    assert len(texts) == 1


def test_auto_keeps_to_the_memory_that_there_is(model, monkeypatch):
    with ModelFile.open(model) as file:
        whole = plan_model(file, LoadOptions(n_ctx=256)).plan
        assert whole.expert_cache is None
        monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
        budget = whole.use.total - whole.use.experts // 2
        with pytest.warns(RuntimeWarning, match="an expert cache of"):
            planned = plan_model(file, LoadOptions(n_ctx=256, budget=budget))
        assert 0 < planned.plan.expert_cache < whole.use.experts // 2
        assert planned.plan.use.total <= whole.use.total - whole.use.experts // 2


# ---- edgeinfer bench -------------------------------------------------------------------------------------------------


def bench(*arguments):
    return CliRunner().invoke(cli.main, ["bench", *map(str, arguments)], prog_name="edgeinfer")


def test_bench_prints_a_line_for_each_size(model):
    result = bench(model, "--expert-cache", "25%,100%", "--check-logits", "-t", 1)
    assert result.exit_code == 0, result.stderr
    head, first, last = result.stdout.splitlines()
    assert head.split() == "cache share tok/s read a token hits Belady wait a token logits".split()
    assert "25%" in first and first.endswith("==") and last.split()[0] == "all" and "100.0%" in last


def test_bench_gives_json_with_a_belady_rate_above_the_own_one(model):
    result = bench(model, "--expert-cache", "30%", "--json", "-t", 1)
    (point,) = json.loads(result.stdout)["expert_caches"]
    assert 0 < point["hit_rate"] <= point["belady"] <= 1 and point["is_equal"] is None
    assert point["bytes_a_token"] > 0 and point["share"] == pytest.approx(0.3, abs=0.01)


def test_prove_fails_where_a_logit_differs(model, monkeypatch):
    def one_is_off(*arguments):
        run = original(*arguments)
        return run if arguments[2] is None else replace(run, logits=[run.logits[0] + np.float32(1e-6), *run.logits[1:]])

    original = expert_bench._run
    monkeypatch.setattr(expert_bench, "_run", one_is_off)
    result = bench(model, "--expert-cache", "50%", "--check-logits", "-t", 1)
    assert result.exit_code == 1 and "expert cache of 50% differ" in result.stderr and "differ" in result.stdout


def test_bench_refuses_what_does_not_go_together(model, tmp_path):
    assert "name their sizes with --expert-cache" in bench(model, "--check-logits").stderr
    assert "--against measure different" in bench(model, "--expert-cache", "25%", "--against", "llama.cpp").stderr
    assert "use --expert-cache" in bench(model, "--expert-cache", "1").stderr
    with ModelFile.open(write_tiny_model(tmp_path / "dense.gguf")) as dense:
        with pytest.raises(InvalidArgument, match="no cache to measure"):
            next(measure_caches(dense, ["25%"], 1, False))


def test_inspect_tells_the_experts(model):
    result = CliRunner().invoke(cli.main, ["inspect", str(model)], prog_name="edgeinfer")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("experts"))
    assert "4 layers of 16, 3 for a token" in line and "an expert" in line
    result = CliRunner().invoke(cli.main, ["inspect", str(model), "--json"], prog_name="edgeinfer")
    experts = json.loads(result.stdout)["experts"]
    assert experts["token_bytes"] * 16 == experts["total_bytes"] * 3
