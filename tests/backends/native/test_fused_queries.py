"""Queries, keys and values as one matrix, as llama.cpp's converter writes them with --fuse-qkv: the same bits."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from exactness import same_bits
from tiny_experts import EXPERT_ARCHITECTURES, write_tiny_experts
from tiny_gemma4 import GEMMA4_VARIANTS, write_tiny_gemma4
from tiny_models import ARCHITECTURES, write_tiny_model

from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Attention, TensorRows, read_spec
from edgeinfer.models.gguf import ModelFile


def fuse(file: ModelFile) -> list[str]:
    """Put attn_q, attn_k and attn_v of a file together where a block has all three; gives the names of what is made."""
    made = []
    for first in [name for name in file.tensors if ".attn_q." in name]:
        names = [first.replace(".attn_q.", f".attn_{role}.") for role in "qkv"]
        infos = [file.tensors.get(name) for name in names]
        if any(info is None or info.type != file.tensors[first].type for info in infos):
            continue
        data = np.concatenate([file.data(name) for name in names])
        n_rows = sum(file.tensors[name].shape[0] for name in names)
        fused = first.replace(".attn_q.", ".attn_qkv.")
        shape = (n_rows, *file.tensors[first].shape[1:])
        file.define(fused, file.tensors[first].type, shape, partial(lambda data, first, last: data[first:last], data))
        for name in names:
            del file._tensors[name]
        made.append(fused)
    return made


def logits_of(file: ModelFile) -> np.ndarray:
    backend, spec = NativeBackend(tuned=False), read_spec(file)
    session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64)), Device(1)).session()
    return session.forward(np.arange(30) * 7 % 259, logits="all").logits


def write(path: Path, name: str) -> Path:
    if name in EXPERT_ARCHITECTURES and name != "llama":
        return write_tiny_experts(path, name, "Q8_0")  # type: ignore[arg-type]
    if name in GEMMA4_VARIANTS:
        return write_tiny_gemma4(path, name, "Q8_0")  # type: ignore[arg-type]
    return write_tiny_model(path, name, "Q8_0")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*ARCHITECTURES, *(n for n in EXPERT_ARCHITECTURES if n != "llama"), *GEMMA4_VARIANTS])
def test_one_matrix_gives_the_bits_of_three(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", name)
    with ModelFile.open(path) as apart, ModelFile.open(path) as file:
        made = fuse(file)
        queries = [layer.mixer.q for layer in read_spec(file).layers if isinstance(layer.mixer, Attention)]
        parts = {ref.name for ref in queries if isinstance(ref, TensorRows)}
        assert parts == {each for each in made if each.endswith("weight")} or name == "phi3"  # which has one anyway
        assert same_bits(logits_of(file), logits_of(apart))
