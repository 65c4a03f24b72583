"""Matrices that are packed again in place: the logits are those of a model that was loaded so."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from exactness import same_bits
from recurrent_models import write_recurrent_model
from tiny_experts import write_tiny_experts
from tiny_gemma4 import write_tiny_gemma4
from tiny_models import write_tiny_model

from edgeinfer.backends.native.packing.repacking import RepackableModel
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

TOKENS, ROWS = [(5 * i * i + 3 * i) % 259 for i in range(20)], [3, 19]
SCALES = dict[str, float]
HYBRIDS = ("qwen35", "lfm2moe", "nemotron_h_moe+latent", "falcon-h1")
NO_PRODUCT = re.compile("ffn_gate_inp_shexp|ssm_(conv1d|a|d|norm)|shortconv.conv")  # held otherwise than matrices


def opened(path: Path, scales: SCALES) -> ModelFile:
    """A file in float32 of whose tensors every third number is given times these: no norm makes up for it."""
    file = ModelFile.open(path)

    def scaled(name: str, data: np.ndarray, first: int, last: int) -> np.ndarray:
        factors = np.where(np.arange(first // 4, last // 4) % 3, 1.0, scales.get(name, 1.0))
        rows: np.ndarray = data[first // 4 : last // 4] * factors.astype(np.float32)
        return rows.view(np.uint8)

    for name, info in list(file.tensors.items()):
        if len(info.shape) > 1:
            assert info.type == GGMLType.F32
            file.define(name, info.type, info.shape, partial(scaled, name, file.data(name).copy().view(np.float32)))
    return file


def loaded(file: ModelFile) -> RepackableModel:
    return RepackableModel(file, read_spec(file), 32, Device(2))


@pytest.mark.parametrize("name", ["tied", "apart", "experts", "gemma4", *HYBRIDS])
def test_logits_are_those_of_a_model_that_was_loaded_so(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if name == "experts":
        write_tiny_experts(path, "qwen2moe", "F32")
    elif name == "gemma4":
        write_tiny_gemma4(path, "small", "F32")
    elif name in HYBRIDS:
        write_recurrent_model(path, name, "F32")
    else:
        write_tiny_model(path, "llama", "F32", tied=name == "tied")
    scales: SCALES = {}
    file = opened(path, scales)
    model = loaded(file)
    before = model.trace(TOKENS, ROWS)
    for tensor in [name for name, info in file.tensors.items() if len(info.shape) > 1 and not NO_PRODUCT.search(name)]:
        scales[tensor] = 1.25
        model.repack(tensor)
        found = model.logits(before, model.first_layer_of(tensor))
        assert not same_bits(found, before.logits), tensor
        assert same_bits(found, loaded(opened(path, scales)).read(TOKENS, ROWS)), tensor
        del scales[tensor]
        model.repack(tensor)
    assert same_bits(model.read(TOKENS, ROWS), before.logits)
    assert same_bits(model.logits(before, model.spec.n_layers), before.logits)
    assert same_bits(loaded(opened(path, {})).logits(before, 1), before.logits)  # by one that has read nothing yet


def test_rows_that_are_no_rows_of_the_text_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m.gguf", "llama", "F32")
    model = loaded(opened(tmp_path / "m.gguf", {}))
    trace = model.trace(TOKENS, ROWS)
    for rows in ([20], [-1], [0] * 21):
        wrong = type(trace)(trace.tokens, np.array(rows, dtype=np.int32), trace.residuals, trace.logits)
        with pytest.raises(ValueError, match="do not fit together"):
            model.logits(wrong, 1)
