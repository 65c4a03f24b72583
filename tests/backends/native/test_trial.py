"""Passes on made-up weights: that they run for every kind of model, from its header; how long they take is no test."""

import math

import pytest
from tiny_experts import write_tiny_experts
from tiny_gemma4 import GEMMA4_VARIANTS, write_tiny_gemma4
from tiny_mamba import write_tiny_mamba
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.native.trial import PROMPT, SIZES, time_passes, weight_bytes
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models.gguf import ModelFile


@pytest.mark.parametrize("architecture, tensor_type", [("gemma3", "Q6_K"), ("bitnet", "I2_S")])
def test_passes_of_a_model_are_timed_without_its_weights(tmp_path, architecture, tensor_type):
    path = write_tiny_model(tmp_path / "m.gguf", architecture, tensor_type)
    check(path, "f16")


def test_experts_of_a_token_are_timed_as_one_network(tmp_path):
    check(write_tiny_experts(tmp_path / "m.gguf", "gpt-oss"), "q8_0")


@pytest.mark.parametrize("variant", GEMMA4_VARIANTS)
def test_layers_that_need_others_are_timed_alone(tmp_path, variant):
    check(write_tiny_gemma4(tmp_path / "m.gguf", variant, "Q8_0"), "f16")


@pytest.mark.parametrize("n_latent", [64, 192])
def test_experts_with_rows_of_their_own_count_as_much_as_they_are(tmp_path, n_latent):
    path = write_tiny_mamba(
        tmp_path / "m.gguf", "nemotron_h_moe+latent", "Q8_0", kinds=["recurrent", "network"] * 2, n_latent=n_latent
    )
    check(path, "f16")
    with ModelFile.open(path) as file:
        spec = NativeBackend().read_spec(file)
        found = weight_bytes(file, spec, "2")[0]
    of_token = sum(layer.mixer.multiply_adds() + layer.ffn.multiply_adds() for layer in spec.layers) * 34 / 32
    assert of_token * 0.95 < found < of_token * 1.25  # a whole number of 256 rows each


def check(path, cache_type):
    backend = NativeBackend()
    with ModelFile.open(path) as file:
        spec = backend.read_spec(file)
        times = time_passes(file, spec, Device(2), cache_type, "2")
        layer_bytes, output_bytes = weight_bytes(file, spec, "2")
        plan = backend.plan(file, spec, LoadSettings(64))
    assert set(times.layers) == {*SIZES, PROMPT} and set(times.output) == set(SIZES)
    values = [*times.layers.values(), *times.output.values(), times.row_position, times.row_position_long]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert 0 < layer_bytes and 0 < output_bytes
    assert layer_bytes + output_bytes <= plan.use.weights + plan.use.experts
