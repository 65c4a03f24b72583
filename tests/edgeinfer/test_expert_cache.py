"""The expert cache that a load plans: by request, available memory and backend; and what a file says of its experts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.cli.answering import as_record, expert_lines, figures
from edgeinfer.common import devices
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument, UnsupportedModel
from edgeinfer.common.types import ExpertSizes, MemoryPlan, MemoryUse
from edgeinfer.loading import backend_choice
from edgeinfer.loading import plan as load_plan
from edgeinfer.loading.options import LoadOptions
from edgeinfer.loading.plan import plan_model
from edgeinfer.memory.budget import Item, ledger
from edgeinfer.memory.process import Process
from edgeinfer.models.gguf import GGMLType, ModelFile, TensorInfo
from edgeinfer.offload.file_experts import FileExperts, experts_of, has_experts
from edgeinfer.offload.reads import ExpertReads
from edgeinfer.offload.size_search import CacheSizeSearch, save_search, search_key

MIB = 1 << 20
SIZES = ExpertSizes(total=1000 * MIB, least=8 * MIB, a_token=100 * MIB, n_layers=2, n_experts=8, n_used=2)


class CachingBackend:
    """As native: 100 MiB of weights, a cache of what is asked for with 1 MiB of tables, 1 KiB a position."""

    name = "native"

    def read_spec(self, model):
        return SimpleNamespace(n_ctx_train=1024)

    def expert_sizes(self, model, spec):
        return SIZES

    def plan(self, model, spec, settings):
        experts = SIZES.total if settings.expert_cache is None else settings.expert_cache + MIB
        return MemoryPlan(settings, MemoryUse(100 * MIB, settings.n_ctx << 10, 0, 0, experts))

    def load(self, *arguments):
        raise AssertionError("not loaded")


class PlainBackend:
    name = "reference"
    read_spec = CachingBackend.read_spec

    def plan(self, model, spec, settings):
        return MemoryPlan(settings, MemoryUse(1100 * MIB, 0, 0))

    def load(self, *arguments):
        raise AssertionError("not loaded")


def tensor(name, n_bytes):
    return TensorInfo(name, (n_bytes // 4,), GGMLType.F32, 0, n_bytes, 0)


def file_of(tensors, **metadata):
    return SimpleNamespace(
        path=Path("model.gguf"),
        n_bytes=1000 * MIB,
        tensors={info.name: info for info in tensors},
        metadata={"general.architecture": "a"} | metadata,
        makes=lambda name: False,
    )


@pytest.fixture
def file(backends):
    parts = [tensor(f"blk.{layer}.ffn_{part}_exps.weight", 80) for layer in (1, 2) for part in ("gate", "up", "down")]
    others = [tensor("blk.1.ffn_gate_inp.weight", 32), tensor("blk.1.ffn_up_exps.bias", 32)]
    return file_of([*parts, *others], **{"a.expert_count": 4, "a.expert_used_count": 3})


@pytest.fixture
def backends(monkeypatch, tmp_path):
    made = {"native": CachingBackend, "auto": CachingBackend, "reference": PlainBackend, "llama.cpp": PlainBackend}
    monkeypatch.setattr(backend_choice, "open_backend", lambda name, *a: made[name]())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def ledger_of(planned, drafters, process):
    use = planned.plan.use
    return ledger([Item("weights", use.weights), Item("KV cache", use.kv_cache), Item("experts", use.experts)])


def planned(file, monkeypatch, mib, **options):
    monkeypatch.setattr(devices, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
    monkeypatch.setattr(load_plan, "ledger_of", ledger_of)
    return plan_model(file, LoadOptions(n_threads=2, budget=int(mib * MIB), **options)).plan


@pytest.mark.parametrize(
    "request_for, cache_mib",
    [("25%", 250), ("100MiB", 100), (10 * MIB, 10), ("100%", None), (None, None), ("auto", None)],
)
def test_a_request_is_planned_in_bytes(file, monkeypatch, request_for, cache_mib):
    plan = planned(file, monkeypatch, 2000, expert_cache=request_for)
    assert plan.expert_cache == (None if cache_mib is None else cache_mib * MIB)


def test_auto_takes_what_fits_and_leaves_some_memory_free(file, monkeypatch):
    with pytest.warns(RuntimeWarning, match="an expert cache of 498.0 MiB rather than all experts, 1.0 GiB"):
        plan = planned(file, monkeypatch, 640)
    assert plan.expert_cache == (640 - 40 - 102) * MIB and plan.use.total <= 640 * MIB


@pytest.mark.filterwarnings("ignore:the budget is")
def test_auto_takes_what_was_measured_to_be_fastest(file, monkeypatch):
    search = CacheSizeSearch()
    for mib, speed in ((498, 5.0), (398, 7.0), (320, 6.0)):
        search.tell(mib * MIB, speed, 0.5, 100)
    save_search(search_key(file, 2), search)
    assert planned(file, monkeypatch, 640).expert_cache == 398 * MIB
    assert planned(file, monkeypatch, 640, expert_cache="25%").expert_cache == 250 * MIB
    assert planned(file, monkeypatch, 2000).expert_cache is None


def test_a_cache_below_what_a_pass_needs_is_refused_with_the_number_that_works(file, monkeypatch):
    with pytest.raises(InvalidArgument, match=f"--expert-cache {8 * MIB}"):
        planned(file, monkeypatch, 2000, expert_cache="1MiB")


def test_a_cache_that_does_not_fit_becomes_smaller_down_to_what_a_pass_needs(file, monkeypatch):
    with pytest.warns(RuntimeWarning, match=r"cache of 273\.0 MiB rather than 500\.0 MiB$"):
        assert planned(file, monkeypatch, 400, expert_cache="50%").expert_cache == (400 - 25 - 102) * MIB
    with pytest.warns(RuntimeWarning, match=r"cache of 8\.0 MiB rather than 500\.0 MiB$"):
        assert planned(file, monkeypatch, 110.1, expert_cache="50%").expert_cache == 8 * MIB


def test_what_does_not_fit_is_refused_with_the_context_that_would(file, monkeypatch):
    monkeypatch.setattr("edgeinfer.memory.refusal._NOISE", 0)
    with pytest.raises(BudgetExceeded, match=r"at least 110\.0 MiB \(.*experts 9\.0 MiB.*n_ctx 704 fits"):
        planned(file, monkeypatch, 109.7)


@pytest.mark.parametrize("value", ["25%", None, "2GiB"])
def test_a_backend_without_a_cache_refuses_it_for_a_model_with_experts(file, monkeypatch, value):
    with pytest.raises(InvalidArgument, match='must be "auto" with the reference backend'):
        planned(file, monkeypatch, 4000, backend="reference", expert_cache=value)
    for auto in ("auto", "AUTO", " auto "):
        assert planned(file, monkeypatch, 4000, backend="reference", expert_cache=auto).expert_cache is None


def test_the_fallback_to_llama_cpp_refuses_it_too(file, monkeypatch, backends):
    def refuse(self, model):
        raise UnsupportedModel("not this one")

    monkeypatch.setattr(CachingBackend, "read_spec", refuse)
    with pytest.raises(InvalidArgument, match='must be "auto"'):
        planned(file, monkeypatch, 4000, expert_cache="25%")


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_model_without_experts_has_no_use_for_a_cache(tmp_path, monkeypatch, backends, backend):
    with ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf", n_ctx_train=256)) as dense:
        assert planned(dense, monkeypatch, 4000, backend=backend, expert_cache="25%").expert_cache is None
        assert not has_experts(dense) and experts_of(dense) is None


def test_the_experts_of_a_file_are_counted(file):
    assert experts_of(file) == FileExperts(2, 4, 3, (60, 60), 360, 480)
    larger = tensor("blk.2.ffn_down_exps.weight", 160)
    file.tensors[larger.name] = larger
    assert experts_of(file) == FileExperts(2, 4, 3, (60, 80), 420, 560)


@pytest.mark.parametrize("metadata", [{}, {"a.expert_count": 4}, {"a.expert_count": 4, "a.expert_used_count": 5}])
def test_a_file_that_does_not_say_how_many_are_used_has_no_figures(file, metadata):
    file.metadata = {"general.architecture": "a"} | metadata
    assert experts_of(file) is None and has_experts(file)


class CountingControl:
    """An expert cache that reads 100 bytes whenever somebody looks."""

    share = 0.5

    def __init__(self):
        self.n = 0

    def reads(self):
        self.n += 1
        return ExpertReads(
            4096, needed=4 * self.n, hits=3 * self.n, bytes_read=100 * self.n, waited_seconds=0.5 * self.n
        )


def test_an_answer_tells_what_the_cache_did_for_the_prompt_and_for_the_tokens_after_it(tmp_path):
    with edgeinfer.load(write_tiny_model(tmp_path / "tiny.gguf"), draft="none", backend="native") as engine:
        assert engine.generate("a", max_tokens=3).timings.decode_experts is None
        engine.experts = CountingControl()
        completion = engine.generate("some text", max_tokens=3, temperature=0.0)
        timings = completion.timings
        assert timings.prompt_experts == timings.decode_experts == ExpertReads(4096, 4, 3, 100, waited_seconds=0.5)
        assert "experts 75% hits, 50 B read a token" in figures(engine, completion)
        assert expert_lines(timings, 3) == [
            "experts  prompt: 75.0% hits, 100 B read, 0.50 s waited for the disk",
            "experts  answer: 75.0% hits, 100 B read, 50 B a token, 0.50 s waited for the disk",
        ]
        record = as_record(engine, completion)["timings"]["decode_experts"]
        assert record["hit_rate"] == 0.75 and record["cache_bytes"] == 4096
        assert engine.generate("some text", max_tokens=1).timings.decode_experts.needed == 0


def test_options_check_the_cache_before_the_file_is_looked_for():
    with pytest.raises(InvalidArgument, match="expert_cache must be"):
        LoadOptions(expert_cache="much")
    assert replace(LoadOptions(expert_cache=np.int64(5))).expert_cache == 5
