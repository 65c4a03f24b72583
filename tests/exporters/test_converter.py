"""Checkpoints of every architecture against llama.cpp's converter: the same keys and the same tensors, bit for bit.

converter_hashes.json has what the converter made of the same checkpoints; tests/support/converter_hashes.py writes it.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from converter_hashes import APART, COMPARED, described
from numpy.testing import assert_allclose
from tiny_checkpoints import stored_pieces, write

from edgeinfer.exporters.huggingface import HuggingFaceSource, open_folder
from edgeinfer.models import supported_architectures

THEIRS = json.loads((Path(__file__).parent / "converter_hashes.json").read_text())
# What a file of ours says beyond theirs: sizes that a reader would derive, or take by default.
ALSO = ("vocab_size", "rope.dimension_count", "rope.freq_base", "attention.key_length", "attention.value_length")
# What theirs says and ours does not, with the reason.
LEFT_OUT = {
    "granitehybrid": {
        **dict.fromkeys(
            ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank"), "no Mamba layers"
        ),
        **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_feed_forward_length"), "no experts"),
    }
}
# Theirs is a constant, whatever config.json says, or of no use: experts of a model without any, the rotated numbers of
# one without positions.
OTHERS = {
    "granitehybrid_mamba": {
        *("context_length", "expert_count", "expert_used_count", "expert_shared_feed_forward_length")
    },
    "granitehybrid_experts": {"context_length"},
    **dict.fromkeys(
        ("nemotron_h_moe", "nemotron_h_moe_latent"),
        {"context_length", "rope.dimension_count", "rope.scaling.finetuned"},
    ),
}
# granitehybrid: theirs is a list with the same number for each layer.
# Theirs are computed in float32, ours are rounded once.
BINARY32 = re.compile(r"rope_freqs\.weight|blk\.\d+\.ssm_a")


@pytest.fixture(params=COMPARED)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ours(case: str, tmp_path: Path) -> HuggingFaceSource:
    write(tmp_path, case)
    return open_folder(tmp_path, vocabulary=False)


def test_keys_and_tensors_are_those_of_the_converter(case: str, ours: HuggingFaceSource) -> None:
    keys = {key: value for key, value in ours.metadata.items() if not key.startswith(APART)}
    architecture = ours.metadata["general.architecture"]
    for key, theirs in THEIRS[case]["keys"].items():
        if key.rpartition(".")[2] in LEFT_OUT.get(case, {}):
            continue
        if key.partition(".")[2] in OTHERS.get(case, set()):
            keys.pop(key, None)
            continue
        found = keys.pop(key)
        is_one = key.endswith("head_count_kv") and isinstance(theirs, list) and not isinstance(found, list)
        expected = theirs[0] if is_one else theirs
        assert (float(np.float32(found)) if isinstance(found, float) else found) == expected, key
    also = {*ALSO, *(("attention.layer_norm_rms_epsilon",) if architecture.startswith("nemotron") else ())}
    assert keys.keys() <= {f"{architecture}.{key}" for key in also}

    tensors = {each.name: described(each.type.name, each.shape, _bytes(each)) for each in ours.tensors}
    assert tensors.keys() == THEIRS[case]["tensors"].keys()
    different = {name for name, described in tensors.items() if described != THEIRS[case]["tensors"][name]}
    assert all(BINARY32.fullmatch(name) for name in different)
    for each in ours.tensors:
        if each.name in THEIRS[case]["factors"]:
            found = each.rows(0, each.n_rows).reshape(-1)
            assert_allclose(found, np.ravel(THEIRS[case]["factors"][each.name]), rtol=1e-6)


def _bytes(tensor: object) -> bytes:
    return b"".join(piece.tobytes() for piece in stored_pieces(tensor))


def test_there_is_a_checkpoint_of_every_architecture_that_runs(tmp_path: Path) -> None:
    made = {next(iter(keys["keys"])).partition(".")[0] for keys in THEIRS.values()}
    ternary = {"bitnet", "bitnet-25", "bitnet-b1.58"}  # edgeinfer.exporters.ternary makes these
    assert made == set(supported_architectures()) - ternary - {"nemotron_h"}
    assert THEIRS.keys() == set(COMPARED)
