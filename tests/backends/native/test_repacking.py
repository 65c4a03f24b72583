"""A model whose tensors are packed again, and passes that begin behind a layer."""

from pathlib import Path

import numpy as np
import pytest
from tiny_experts import write_tiny_experts
from tiny_models import write_tiny_model

from edgeinfer.backends.native.repacking import RepackableModel
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import Device

TOKENS, ROWS = [3, 77, 150, 9, 200, 12, 31, 8], [2, 5, 7]


def loaded(file: ModelFile) -> RepackableModel:
    return RepackableModel(file, read_spec(file), 16, Device(2))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_pass_from_any_layer_on_gives_the_logits_of_a_whole_one(architecture: str, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", architecture, "Q8_0")) as file:
        model = loaded(file)
        trace = model.trace(TOKENS, ROWS)
        assert np.array_equal(trace.logits, model.read(TOKENS, ROWS))
        for first in range(model.spec.n_layers + 1):
            assert np.array_equal(model.logits(trace, first), trace.logits), first


@pytest.mark.parametrize("tied", [False, True])
def test_a_repacked_tensor_gives_the_logits_of_a_file_that_has_it(tied: bool, tmp_path: Path) -> None:
    paths = [write_tiny_model(tmp_path / f"{seed}.gguf", "phi3", "Q8_0", tied=tied, seed=seed) for seed in (0, 1)]
    with ModelFile.open(paths[0]) as file, ModelFile.open(paths[1]) as other:
        check_all_tensors(file, other)


def test_repacked_experts_are_those_of_a_file_that_has_them(tmp_path: Path) -> None:
    paths = [write_tiny_experts(tmp_path / f"{seed}.gguf", "qwen2moe", "Q8_0", seed=seed) for seed in (0, 1)]
    with ModelFile.open(paths[0]) as file, ModelFile.open(paths[1]) as other:
        check_all_tensors(file, other)


def check_all_tensors(file: ModelFile, other: ModelFile) -> None:
    """Take the matrices from the other file, one after the other: each changes what a pass from its layer on gives."""
    model = loaded(file)
    names = [name for name, info in file.tensors.items() if len(info.shape) > 1 and info.shape[0] > 1]
    for name in names:
        info, trace = file.tensors[name], model.trace(TOKENS, ROWS)
        file.define(name, info.type, info.shape, lambda first, last, name=name: other.data(name, first, last))
        model.repack(name)
        from_layer = model.logits(trace, model.first_layer_of(name))
        whole = model.read(TOKENS, ROWS)
        assert not np.array_equal(whole, trace.logits) and np.array_equal(from_layer, whole), name
    assert np.array_equal(whole, loaded(file).read(TOKENS, ROWS))
