"""What processes take against the plan, for models of some size: points of tests/benchmarks/bench_memory_grid.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from large_vocabularies import add_large_bpe, add_large_spm
from tiny_hybrids import write_tiny_hybrid
from tiny_models import write_tiny_model

from edgeinfer.memory.process import peak_bytes

GRID = Path(__file__).parents[2] / "benchmarks" / "bench_memory_grid.py"
pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(not peak_bytes(), reason="this system does not tell how much memory a process took at most"),
]


def check(path: Path, folder: Path, **options: Any) -> None:
    """Load and use a model in a process of its own: it takes at most what is planned, and little less."""
    job = json.dumps({"path": str(path), "options": {"n_threads": 2, "parallel": 1, **options}})
    command = [sys.executable, str(GRID), "--child", job]
    environment = {"XDG_CACHE_HOME": str(folder), "PATH": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert 0.95 * found["peak"] <= found["peak_taken"] <= found["peak"], found


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the vocabulary and the windows of Gemma 3's smallest, and fewer layers."""
    sizes = {"n_embd": 640, "n_layers": 6, "n_heads": 4, "n_kv_heads": 1, "head_dim": 256, "n_ff": 2048}
    return write_tiny_model(
        tmp_path_factory.mktemp("gemma") / "gemma.gguf",
        "gemma3",
        "Q4_0",
        n_vocab=262_144,
        n_distinct=64,
        tied=True,
        vocabulary=add_large_spm,
        metadata={"gemma3.attention.sliding_window": 512},
        **sizes,
    )


@pytest.mark.parametrize("n_ctx, cache_type", [(512, "f16"), (512, "q8_0"), (64, "f16")])
def test_a_vocabulary_of_262144_tokens_takes_what_is_planned(
    gemma: Path, tmp_path: Path, n_ctx: int, cache_type: str
) -> None:
    check(gemma, tmp_path, n_ctx=n_ctx, cache_type=cache_type, draft="none")


@pytest.mark.parametrize("n_ctx, draft", [(512, "auto"), (64, "auto"), (64, "none")])
def test_the_default_model_takes_what_is_planned(default_model: Path, tmp_path: Path, n_ctx: int, draft: str) -> None:
    check(default_model, tmp_path, n_ctx=n_ctx, draft=draft)


@pytest.mark.parametrize("tied, write", [(True, add_large_bpe), (False, add_large_spm)])
def test_other_vocabularies_take_what_is_planned(tmp_path: Path, tied: bool, write: Callable[..., None]) -> None:
    sizes = {"n_embd": 512, "n_layers": 4, "n_heads": 8, "n_ff": 2048, "n_vocab": 100_000}
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_distinct=64, tied=tied, vocabulary=write, **sizes)
    check(path, tmp_path, n_ctx=512, draft="auto")


@pytest.mark.parametrize("architecture, draft, parallel", [("qwen35", "none", 1), ("qwen35moe", "auto", 4)])
def test_states_of_several_texts_take_what_is_planned(
    tmp_path: Path, architecture: Literal["qwen35", "qwen35moe"], draft: str, parallel: int
) -> None:
    """Six recurrent layers, states of 19 MB. With experts there is a block that drafts, too."""
    sizes = {"n_embd": 256, "n_state": 128, "n_key_heads": 16, "n_nextn": int(draft == "auto"), "n_vocab": 4000}
    kinds = [*["recurrent"] * 6, "attention"]
    path = write_tiny_hybrid(tmp_path / "m.gguf", architecture, "Q8_0", kinds=kinds, n_ctx_train=4096, **sizes)
    check(path, tmp_path, n_ctx=448 * parallel, n_batch=256, parallel=parallel, draft=draft)
