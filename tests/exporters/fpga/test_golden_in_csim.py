"""The golden layer of an exported folder in the C simulation of the HLS kernels: the same bits."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from parts import is_there, missing
from tiny_models import write_tiny_model

from edgeinfer.exporters.fpga import FpgaTarget
from edgeinfer.exporters.request import Request
from edgeinfer.hls.csim import CSimulation
from edgeinfer.hls.files.folder import BoardFolder

NORMS = {"qkv": ("input", "attn_norm"), "o": ("attention", "attn_sub_norm"), "down": ("gated", "ffn_sub_norm")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BoardFolder:
    if not is_there("compiler"):
        missing("compiler", "a C++ compiler compiles the kernels: apt install g++ cmake")
    folder = tmp_path_factory.mktemp("board")
    source = write_tiny_model(folder / "a.gguf", "bitnet-b1.58", "I2_S", n_layers=1)
    FpgaTarget().write(Request(source, folder / "out", check=False, more={"golden": 2}), lambda share: None)
    return BoardFolder.open(folder / "out")


def test_norms_and_products_of_the_golden_layer_are_those_of_the_kernels(folder: BoardFolder) -> None:
    def stage(name: str) -> np.ndarray:
        return folder.array(f"golden.layers.0.{name}")

    facts = folder.manifest.facts["model"]
    simulation = CSimulation(folder.geometry)
    for phase, (before, norm) in NORMS.items():
        weight = folder.array(f"layers.0.{norm}")
        q, scales = simulation.norm(stage(before), weight, facts["norm_epsilon"])
        assert_array_equal(q, stage(f"{phase}.x"))
        assert_array_equal(scales, stage(f"{phase}.x_scale"))
        name = f"layers.0.{phase}"
        y = simulation.linear(folder.stream(name), folder.scales(name), stage(norm))
        assert_array_equal(y, stage(phase))
    for golden in folder.golden():
        for x, y in zip(golden.x, golden.y, strict=True):
            assert_array_equal(simulation.product(folder.stream(golden.tensor.name), x, golden.tensor.n_out), y)
