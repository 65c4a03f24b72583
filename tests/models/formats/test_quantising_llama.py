"""Tensors of whole files that llama.cpp quantises: the bytes of ours."""

import platform
from pathlib import Path

import numpy as np
import pytest
from llama_quantize import quantized
from numpy.testing import assert_array_equal
from tiny_models import write_tiny_model

from edgeinfer.exporters.source import SourceTensor, open_source
from edgeinfer.models.formats import quantize, quantize_plain

FILE_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_S": 11,
}  # with Q4_K and Q6_K in it
FILE_TYPES |= {"Q4_K_S": 14, "Q5_K_S": 16, "Q6_K": 18, "BF16": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "f32.gguf"
    return write_tiny_model(path, "llama", "F32", n_embd=256, n_ff=256, n_layers=1)


def importance_of(tensor: SourceTensor, rng: np.random.Generator) -> np.ndarray:
    return np.square(rng.standard_normal(tensor.n_in, dtype=np.float32)) + np.float32(0.01)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere compilers round llama.cpp's sums otherwise (FMA)")
@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("has_importance", [False, True])
@pytest.mark.parametrize("name", FILE_TYPES)
def test_the_bytes_of_every_tensor_are_llama_cpps(
    model: Path, tmp_path: Path, rng: np.random.Generator, name: str, has_importance: bool
) -> None:
    with open_source(model) as source:
        tensors = {tensor.name: tensor for tensor in source.tensors}
        columns = {
            of.name: importance_of(of, rng) for of in source.tensors if of.name.startswith("blk.") and of.n_rows > 1
        }
        written = quantized(model, tmp_path / "out.gguf", FILE_TYPES[name], columns if has_importance else None)
        types = set()
        with open_source(written) as result:
            for tensor in result.tensors:
                if tensor.n_rows == 1 or tensor.stored is None:
                    continue
                weights = tensors[tensor.name].rows(0, tensor.n_rows)
                known = has_importance and tensor.name in columns
                ours = (
                    quantize(tensor.type, weights, columns[tensor.name])
                    if known
                    else quantize_plain(tensor.type, weights)
                )
                assert_array_equal(ours, tensor.stored(0, tensor.n_rows).reshape(-1), tensor.name)
                types.add(tensor.type.name)
    assert name.removesuffix("_S") in types
