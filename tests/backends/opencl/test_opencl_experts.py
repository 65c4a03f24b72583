"""Experts on an OpenCL device against plain arithmetic: every format, several rows, slots that are used again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_tier import expert_outputs
from tiny_experts import ExpertArchitecture, write_tiny_experts

from edgeinfer.backends.opencl import OpenCLDevice, OpenCLExperts, expert_buffers
from edgeinfer.common.errors import BackendLost, BudgetExceeded
from edgeinfer.models import Experts, read_spec
from edgeinfer.models.gguf import ModelFile

N_BATCH = 12
KINDS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
MODELS: list[tuple[ExpertArchitecture, str, dict[str, Any]]] = [("olmoe", kind, {}) for kind in KINDS]
MODELS += [
    ("gpt-oss", "MXFP4", {}),
    ("gpt-oss", "F32", {"fused": True}),
    ("qwen3moe", "Q8_0", {"scales": True, "types": {"ffn_up_exps": "Q4_0", "ffn_down_exps": "F16"}}),
    ("qwen3moe", "F32", {"n_ff": 40, "n_embd": 64}),
    ("glm4moe", "F32", {"fused": True, "scales": True}),
]


def differences(path: Path, device: OpenCLDevice, rng: np.random.Generator) -> list[float]:
    """Of passes of one row, of several rows of several experts, and with a slot that another expert was in."""
    found = []
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        experts = OpenCLExperts(file, spec, device, 3, N_BATCH)
        layers = [index for index, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)]
        for layer in layers:
            block = spec.layers[layer].ffn
            assert isinstance(block, Experts)
            for slot, expert in ((0, 1), (1, 6), (2, 4), (0, 3)):
                experts.upload(slot, layer, expert)
            for places in ([(0, 1)], [(1, 1), (0, 1)], [(2, 5), (0, 1), (1, 7)]):
                rows = rng.standard_normal((sum(n for _, n in places), spec.n_embd), dtype=np.float32)
                experts.start(layer, places, rows)
                parts = np.split(rows, np.cumsum([n for _, n in places])[:-1])
                of_slot = {0: 3, 1: 6, 2: 4}
                wanted = [
                    expert_outputs(file, block, of_slot[slot], x) for (slot, _), x in zip(places, parts, strict=True)
                ]
                expected = np.concatenate(wanted)
                found.append(float(np.abs(experts.finish() - expected).max() / np.abs(expected).max()))
        buffers = expert_buffers(file, spec, N_BATCH, device.info)
        assert experts.n_bytes == buffers.total(3) and buffers.n_experts == 8 * len(layers)
        experts.close()
    return found


@pytest.mark.parametrize("architecture, tensor_type, shape", MODELS)
def test_outputs_are_near_plain_arithmetic(
    architecture: ExpertArchitecture,
    tensor_type: str,
    shape: dict[str, Any],
    opencl_device: OpenCLDevice,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", architecture, tensor_type, **shape)
    # Activations are rounded to 8 bits where weights are quantised.
    assert max(differences(path, opencl_device, rng)) < (1e-5 if tensor_type in ("F32", "F16") else 4e-2)


@pytest.mark.parametrize("tensor_type", ["F16", "MXFP4"])
def test_groups_as_on_a_gpu_give_the_same(
    tensor_type: str,
    opencl_device: OpenCLDevice,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OpenCLDevice, "is_cpu", False)
    path = write_tiny_experts(tmp_path / "m.gguf", "gpt-oss", tensor_type)
    assert max(differences(path, opencl_device, rng)) < (1e-5 if tensor_type == "F16" else 4e-2)


def test_buffers_larger_than_the_device_has_are_refused(
    opencl_device: OpenCLDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q8_0")) as file:
        with pytest.raises(BudgetExceeded, match="passes of 1000000000 tokens"):
            expert_buffers(file, read_spec(file), 10**9, opencl_device.info)


def test_what_fails_is_a_lost_device(opencl_device: OpenCLDevice, tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q8_0")) as file:
        spec = read_spec(file)
        experts = OpenCLExperts(file, spec, opencl_device, 1, 2)
        experts.upload(0, 0, 0)
        too_many = np.zeros((500, spec.n_embd), np.float32)  # of which only 6 fit into the buffer
        with pytest.raises(BackendLost, match="writing"):
            experts.start(0, [(0, 500)], too_many)
