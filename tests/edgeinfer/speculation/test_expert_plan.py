"""The plan of drafters beside a model with an expert cache."""

from dataclasses import replace
from pathlib import Path

from tiny_models import write_tiny_model

from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.plan import plan_drafters
from edgeinfer.types import MemoryPlan, MemoryUse

PLAN = MemoryPlan(64, 64, MemoryUse(0, 0, 0))
DRAFTERS = ["suffix", "recycling"]


def test_the_forecast_of_experts_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, "llama")
    cached = replace(PLAN, expert_cache=1 << 20)
    with ModelFile.open(path) as file:

        def n_bytes(plan: MemoryPlan, draft: list[str], budget: int = 1 << 30) -> int:
            return plan_drafters(draft, file, 32, plan, 1, budget).n_bytes

        assert n_bytes(cached, DRAFTERS) == n_bytes(PLAN, DRAFTERS) + ExpertForecast.memory()
        assert n_bytes(cached, DRAFTERS, 1000) == 1000
        assert not plan_drafters(DRAFTERS, file, 32, cached, 1, 1000).free
