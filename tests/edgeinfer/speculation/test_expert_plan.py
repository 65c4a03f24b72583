"""The plan of drafters beside a model with an expert cache."""

from dataclasses import replace
from pathlib import Path

from tiny_models import write_tiny_model

from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import MemoryPlan, MemoryUse
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.plan import find_drafters

PLAN = MemoryPlan(LoadSettings(64, n_batch=64), MemoryUse(0, 0, 0))


def test_the_forecast_of_experts_is_counted_where_something_drafts(tmp_path: Path) -> None:
    cached = replace(PLAN, settings=replace(PLAN.settings, expert_cache=1 << 20))
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama")) as file:
        choice = find_drafters(["suffix", "recycling"], file, 32, PLAN, 1)
        n_bytes = choice.plan(PLAN).n_bytes
        assert choice.plan(cached).n_bytes == n_bytes + ExpertForecast.memory()
        assert choice.plan(cached, tables=None).n_bytes == 0
