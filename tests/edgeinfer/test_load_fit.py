"""How large weights may be: what a plan and a profile say of models of that size."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from stretched import stretched_model

from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.exporters.auto.candidates import Subject, subjects_of
from edgeinfer.exporters.gguf.skeleton import write_skeleton
from edgeinfer.exporters.gguf.writer import Tensor, layout
from edgeinfer.exporters.source import GgufSource
from edgeinfer.loading import plan as load_plan
from edgeinfer.loading.options import LoadOptions
from edgeinfer.loading.weight_size import weight_bytes_that_fit
from edgeinfer.memory.process import Process
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.profiler import planner

N_VOCAB, N_CTX = 8192, 256


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(40_000_000, 0))


def model(path: Path, tied: bool) -> Path:
    """A model of 17 layers with room for its weights, in F16."""
    with ModelFile.open(stretched_model(path, "llama-256")) as file:
        metadata, infos = GgufSource(file).metadata, list(file.tensors.values())
    found = []
    for info in infos:
        shape = (N_VOCAB, info.shape[1]) if info.name in ("token_embd.weight", "output.weight") else info.shape
        if info.name != "output.weight" or not tied:
            found.append(Tensor(info.name, GGMLType(info.type), shape, list))
    write_skeleton(path, layout(metadata, found), found)
    return path


def written(source: Path, path: Path, types: Mapping[str, GGMLType]) -> Path:
    """The same model in other types."""
    with ModelFile.open(source) as file:
        found = [
            Tensor(each.name, types.get(each.name, each.type), each.shape, list) for each in GgufSource(file).tensors
        ]
        write_skeleton(path, layout(GgufSource(file).metadata, found), found)
    return path


def mixed(subjects: list[Subject], room: int, formats: str) -> dict[str, GGMLType]:
    """Types of as many bytes as there is room for, in some formats where they fit."""
    types = {each.name: each.formats[0] for each in subjects}
    room -= sum(each.n_bytes(each.formats[0]) for each in subjects)
    for each in subjects:
        for format in reversed(each.formats):
            more = each.n_bytes(format) - each.n_bytes(types[each.name])
            if 0 < more <= room and format.name in formats.split():
                types[each.name], room = format, room - more
    return types


def peak_of(path: Path) -> tuple[int, int]:
    """The peak that a profile tells, with all that is wanted, and the bytes of the weights in it."""
    with ModelFile.open(path) as file:
        plans = planner.Planner(file, LoadOptions(n_ctx=N_CTX))
        ledger = plans.planned(plans.wanted).ledger
        plans.close()
        return ledger.peak, ledger.of("weights")


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_that_size_fits_as_the_profile_says(tied: bool, tmp_path: Path) -> None:
    source = model(tmp_path / "source.gguf", tied)
    with ModelFile.open(source) as file:
        subjects = subjects_of(GgufSource(file), read_spec(file))
        kept = sum(info.n_bytes for info in file.tensors.values()) - sum(
            each.n_bytes(GGMLType.F16) for each in subjects
        )
    least = written(source, tmp_path / "least.gguf", {each.name: each.formats[0] for each in subjects})
    for more in (0, 1_000_000, 3_000_000):
        memory = peak_of(least)[0] + 250_000 + more
        with ModelFile.open(source) as file:
            n_bytes = weight_bytes_that_fit(file, memory, N_CTX)
        for formats in ("Q2_K Q3_K Q4_0 Q4_1 Q4_K Q5_0 Q5_K Q6_K Q8_0 F16", "Q6_K", "Q3_K", "Q8_0"):
            path = written(source, tmp_path / "mixed.gguf", mixed(subjects, n_bytes - kept, formats))
            assert peak_of(path)[0] <= memory, formats
            with ModelFile.open(path) as file:
                assert not load_plan.plan_load(file, LoadOptions(budget=memory, n_ctx=N_CTX)).steps


def test_embeddings_count_where_a_product_reads_them(tmp_path: Path) -> None:
    sizes, n_embd = {}, 256
    for tied in (True, False):
        source = model(tmp_path / "source.gguf", tied)
        with ModelFile.open(source) as file:
            sizes[tied] = weight_bytes_that_fit(file, 80_000_000, N_CTX)
        peak, weights = peak_of(source)
        with ModelFile.open(source) as file:
            in_file = sum(info.n_bytes for info in file.tensors.values())
        assert in_file - weights == (0 if tied else 2 * N_VOCAB * n_embd)
        assert sizes[tied] < 80_000_000 - (peak - weights) + N_VOCAB * n_embd
    assert sizes[False] - sizes[True] == GGMLType.Q2_K.n_bytes(N_VOCAB * n_embd)


def test_what_does_not_fit_in_the_smallest_types_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "source.gguf", True)
    with ModelFile.open(source) as file, pytest.raises(BudgetExceeded, match="source.gguf needs at least"):
        weight_bytes_that_fit(file, 45_000_000, N_CTX)
