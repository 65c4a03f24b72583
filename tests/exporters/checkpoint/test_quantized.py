"""Quantised checkpoints: the weights that the libraries make of the same bytes, in float32 and without rounding.

golden_weights.json has hashes of what AutoGPTQ, AutoAWQ and compressed-tensors give; make_golden_weights.py, beside it,
says how it came about.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_safetensors
from numpy.testing import assert_array_equal
from quantized_checkpoints import CASES, Case, Tensors, float8, fp8, gptq, packed

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.checkpoint.tensor import all_floats
from edgeinfer.exporters.checkpoint.weight_files import read_stored
from edgeinfer.models.gguf import GGMLType

GOLDEN = json.loads((Path(__file__).parent / "golden_weights.json").read_text())


def saved(folder: Path, settings: dict[str, Any], tensors: Tensors) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    write_safetensors(folder / "model.safetensors", tensors)
    return Checkpoint.open(folder)


@pytest.mark.parametrize("make", CASES)
def test_weights_are_those_of_the_library(make: Callable[[], Case], tmp_path: Path) -> None:
    case = make()
    bias = {"m.bias": ("F16", np.ones(4)), "m.input_scale": ("F32", np.ones(1)), "n.weight": ("BF16", np.ones(4))}
    others = {"m.bias", "n.weight"} | ({"m.input_scale"} if case.settings["quant_method"] in ("gptq", "awq") else set())
    checkpoint = saved(tmp_path, case.settings, case.tensors | bias)
    assert set(checkpoint.names) == {"m.weight"} | others and checkpoint.type("m.weight") == GGMLType.F32
    n_out, n_in = checkpoint.shape("m.weight")
    weights = checkpoint.rows("m.weight", 0, n_out)
    assert weights.dtype == np.float32 and weights.shape == (n_out, n_in)
    assert hashlib.sha256((weights + np.float32(0)).tobytes()).hexdigest()[:16] == GOLDEN[case.name]
    checkpoint.release("m.weight")
    for first, last in ((3, 20), (n_out - 1, n_out), (5, 5)):
        assert_array_equal(checkpoint.rows("m.weight", first, last), weights[first:last])


def test_codes_of_three_bits_that_do_not_cross_words(tmp_path: Path) -> None:
    """As compressed-tensors before 0.20 packs them: ten to a word."""
    case = packed(3, 32, False)
    codes = np.random.default_rng(1).integers(0, 8, (32, 96))
    words = np.zeros((32, 10), np.int64)
    for place in range(96):
        words[:, place // 10] |= codes[:, place] << 3 * (place % 10)
    case.tensors["m.weight_packed"] = ("I32", words)
    scales = case.tensors["m.weight_scale"][1].astype(np.float32)
    weights = saved(tmp_path, case.settings, case.tensors).floats("m.weight")
    assert_array_equal(weights, (codes - 4) * np.repeat(scales, 32, axis=1))


def test_groups_of_inputs_that_are_no_runs(tmp_path: Path) -> None:
    case = packed(4, 32, False)
    plain = saved(tmp_path, case.settings, case.tensors).floats("m.weight")
    scales = case.tensors["m.weight_scale"][1].astype(np.float32)
    groups = np.random.default_rng(2).permutation(np.arange(96) // 32)
    case.tensors["m.weight_g_idx"] = ("I32", groups)
    ordered = saved(tmp_path, case.settings, case.tensors).floats("m.weight")
    codes = plain / np.repeat(scales, 32, axis=1)
    np.testing.assert_allclose(ordered, codes * scales[:, groups], rtol=1e-6)
    case.tensors["m.weight_g_idx"] = ("I32", np.full(96, -1))
    assert_array_equal(saved(tmp_path, case.settings, case.tensors).floats("m.weight"), plain)


def test_experts_in_one_tensor_have_blocks_of_their_own(tmp_path: Path) -> None:
    codes = float8((3, 130, 200), 7)
    scales = np.random.default_rng(8).uniform(0.5, 1, (3, 2, 2)).astype(np.float32)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors: Tensors = {"experts.up": codes, "experts.up_scale_inv": ("F32", scales)}
    checkpoint = saved(tmp_path, settings, tensors)
    wide = np.repeat(np.repeat(scales, 128, 1), 128, 2)[:, :130, :200]
    one = saved(tmp_path, settings, {"experts.up": codes, "experts.up_scale_inv": ("F32", np.ones(1))})
    unscaled = one.floats("experts.up")
    checkpoint = saved(tmp_path, settings, tensors)
    assert_array_equal(checkpoint.floats("experts.up"), unscaled * wide)
    assert_array_equal(checkpoint.rows("experts.up", 129, 132), (unscaled * wide).reshape(-1, 200)[129:132])
    exponents = saved(
        tmp_path, settings, {"w.weight": codes, "w.weight_scale_inv": ("F8_E8M0", np.full((3, 2, 2), 125))}
    )
    assert_array_equal(exponents.floats("w.weight"), unscaled / 4)


def test_modelopt_has_scales_of_scales(tmp_path: Path) -> None:
    from quantized_checkpoints import nvfp4

    case = nvfp4()
    divided = saved(tmp_path, case.settings, case.tensors).floats("m.weight")
    tensors: Tensors = {
        "m.weight": case.tensors["m.weight_packed"],
        "m.weight_scale": case.tensors["m.weight_scale"],
        "m.weight_scale_2": ("F32", np.array(1 / 37.5)),
        "n.weight": float8((4, 16), 1),
        "n.weight_scale": ("F32", np.array([0.5])),
    }
    checkpoint = saved(tmp_path, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors)
    np.testing.assert_allclose(checkpoint.floats("m.weight"), divided, rtol=3e-7)
    assert checkpoint.shape("n.weight") == (4, 16)


def test_every_float8_is_torchs(tmp_path: Path) -> None:
    """By the definition of each type, code by code."""
    every = np.arange(256).reshape(1, 256)
    tensors: Tensors = {"a": ("F8_E4M3", every), "b": ("F8_E5M2", every)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    stored = read_stored(checkpoint.folder)
    halves = (every.astype(np.uint16) << 8).view(np.float16)  # E5M2 is the upper half of a float16
    assert_array_equal(all_floats(stored["b"]), halves.astype(np.float32))
    found = all_floats(stored["a"])[0]
    for name in "ab":
        with pytest.raises(ModelFileError, match=f"tensor {name} .* must have numbers"):
            checkpoint.rows(name, 0, 1)
    assert found[[0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE]].tolist() == [0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, -448]
    assert np.isnan(found[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(found, [0x7F, 0xFF])).all()
    assert (np.diff(found[:0x7F]) > 0).all() and checkpoint.type("a") == GGMLType.F16


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    case = gptq(4, "gptq", False)
    for settings, words in [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantised by 'bitsandbytes' cannot be read, those by",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version must be gemm: .* found 'gemv'"),
        (case.settings | {"checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2: found 'marlin'"),
        (case.settings | {"bits": 5}, r"bits must be one of \(2, 3, 4, 8\): found 5"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "format must be naive-quantized or .*marlin-24",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transform_config must be empty"),
    ]:
        with pytest.raises(UnsupportedModel, match=words):
            saved(tmp_path, settings, case.tensors)
    with pytest.raises(ModelFileError, match="quantization_config.quant_method must be a text: it is missing"):
        saved(tmp_path, {"bits": 4}, case.tensors)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="quantization_config must say how m.qweight was quantised"):
        Checkpoint.open(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", fp8("rows", "m.weight_scale", (160, 1)).tensors)
    with pytest.raises(UnsupportedModel, match="quantization_config must say how m.weight was quantised"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("key", ["quantization", "quantization_config", None])
@pytest.mark.parametrize("has_biases", [True, False])
def test_weights_of_mlx_are_refused_by_name(key: str | None, has_biases: bool, tmp_path: Path) -> None:
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    config = {} if key is None else {key: settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    codes = {"model.embed_tokens.weight": ("U32", np.ones((8, 8)))}
    scales = {f"model.embed_tokens.{end}": ("F16", np.ones((8, 1))) for end in ("scales", "biases")[: 1 + has_biases]}
    write_safetensors(tmp_path / "model.safetensors", codes | scales)
    words = "an unknown number of bits" if key is None else "4 bits, groups of 64 weights"
    with pytest.raises(UnsupportedModel, match=f"quantised by MLX .{words}.*mlx_lm.convert .* --dequantize"):
        Checkpoint.open(tmp_path)


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    good = gptq(4, "gptq", False)
    blocks = fp8("blocks", "m.weight_scale_inv", (2, 2), weight_block_size=[128, 128])
    ints = packed(4, 32, False)
    for case, change, words in [
        (good, {"m.scales": None}, "tensor m.scales is missing"),
        (good, {"m.scales": ("F16", np.ones((3, 31)))}, r"m.qweight with 4 bits must be .* found .*\(3, 31\)"),
        (good, {"m.qweight": ("I64", np.ones((12, 32)))}, "m.qweight must be I32: found I64"),
        (good, {"m.weight": ("F16", np.ones((32, 96)))}, "m.weight is there both quantised and as it was"),
        (blocks, {"m.weight_scale_inv": ("F32", np.ones((3, 2)))}, r"must have a scale for all of \(160, 200\)"),
        (ints, {"m.weight_shape": ("I64", np.array([32, 97]))}, r"must hold \(32, 97\) weights of \[4\] bits"),
        (ints, {"m.weight_shape": ("I64", np.array([-1, 2**40]))}, "must be the two sizes of a matrix"),
    ]:
        tensors = {name: entry for name, entry in (case.tensors | change).items() if entry is not None}
        with pytest.raises(ModelFileError, match=words):
            saved(tmp_path, case.settings, tensors)
    for case, change, words in [
        (
            good,
            {"m.g_idx": ("I32", np.full(96, 3))},
            r"m.g_idx must give 96 inputs a group in 0..2: found 96 in 0..3",
        ),
        (good, {"m.g_idx": ("I32", np.full(96, -1))}, "m.g_idx must give 96 inputs a group"),
        (good, {"m.scales": ("F16", np.full((3, 32), np.inf))}, "m.scales must be finite"),
        (blocks, {"m.weight_scale_inv": ("F32", np.full((2, 2), np.nan))}, "m.weight_scale_inv must be finite"),
    ]:
        checkpoint = saved(tmp_path, case.settings, case.tensors | change)
        with pytest.raises(ModelFileError, match=words):
            checkpoint.rows("m.weight", 0, 1)
