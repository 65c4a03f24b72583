"""Ternary checkpoints of Hugging Face: what their numbers mean, what is refused, and the logits of transformers."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import BITLINEAR, packed, write_packed_llama, write_safetensors
from numpy.testing import assert_array_equal
from parts import missing

from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import ModelFileError, ModelNotFound, UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.checkpoint import TernaryCheckpoint
from edgeinfer.exporters.ternary import export_ternary
from edgeinfer.models import read_spec
from edgeinfer.models.formats import PACK, dequantize
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType, ModelFile

AUTOBITLINEAR = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = AUTOBITLINEAR | {"quantization_mode": "online"}


def a_checkpoint(
    folder: Path, quantization: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]], **config: Any
) -> TernaryCheckpoint:
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization, **config}))
    write_safetensors(folder / "model.safetensors", tensors)
    return TernaryCheckpoint.open(folder)


@pytest.fixture
def trits(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-1, 2, (12, 128), dtype=np.int8)


@pytest.mark.parametrize("quantization, scale", [(BITLINEAR, 1 / 2.5), (AUTOBITLINEAR, 2.5)])
def test_a_packed_scale_divides_or_multiplies_by_the_class_of_the_layer(
    quantization: dict[str, Any], scale: float, trits: np.ndarray, tmp_path: Path
) -> None:
    tensors = {"m.weight": ("U8", packed(trits)), "m.weight_scale": ("BF16", np.array([0x4020]))}  # 2.5
    matrix = a_checkpoint(tmp_path, quantization, tensors).ternary("m", trits.shape)
    assert_array_equal(matrix.trits, trits)
    assert matrix.scales.tolist() == [[np.float32(scale)]]


def test_one_packed_byte_by_hand(tmp_path: Path) -> None:
    tensors = {"m.weight": ("U8", np.array([[0b10_01_00_10]])), "m.weight_scale": ("F32", np.array([1.0]))}
    assert a_checkpoint(tmp_path, BITLINEAR, tensors).ternary("m", (4, 1)).trits.tolist() == [[1], [-1], [0], [1]]


def test_unpacked_trits_have_their_scale_beside_them(trits: np.ndarray, tmp_path: Path) -> None:
    tensors = {"m.weight": ("F16", trits), "m.weight_scale": ("F16", np.array([0.5]))}
    matrix = a_checkpoint(tmp_path, AUTOBITLINEAR, tensors).ternary("m", trits.shape)
    assert_array_equal(matrix.trits, trits)
    assert matrix.scales.tolist() == [[0.5]]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_online_weights_are_rounded_to_their_mean_magnitude(
    dtype: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    weights = rng.standard_normal((8, 128), dtype=np.float32)
    stored = (weights.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else weights
    checkpoint = a_checkpoint(tmp_path, ONLINE, {"m.weight": (dtype, stored)})
    seen = checkpoint.floats("m.weight")
    assert np.abs(seen - weights).max() < (0.02 if dtype == "BF16" else 0.002)
    matrix = checkpoint.ternary("m", (8, 128))
    mean = np.abs(seen).mean()
    assert_array_equal(matrix.trits, np.where(np.abs(seen) > mean / 2, np.sign(seen), 0))
    scale = matrix.scales[0, 0]
    assert abs(scale / mean - 1) < {"F32": 1e-6, "F16": 5e-4, "BF16": 4e-3}[dtype]
    if dtype == "BF16":
        assert scale.view(np.uint32) & 0xFFFF == 0


@pytest.mark.parametrize("format", ["I2_S", "TQ1_0", "TQ2_0"])
def test_a_packed_matrix_gives_the_same_weights_back(format: str, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (7, 512), dtype=np.int8)
    kind = GGMLType[format]
    packed_bytes = PACK[kind]("m", TernaryMatrix.of_one_scale(trits, 0.375))
    weights = dequantize(kind, packed_bytes, trits.shape)
    assert_array_equal(weights, trits * np.float32(0.375))
    again = TernaryMatrix.of_weights("m", weights)
    assert_array_equal(PACK[kind]("m", again), packed_bytes)


@pytest.mark.parametrize("format", ["TQ1_0", "TQ2_0"])
def test_tq_bytes_equal_those_of_the_gguf_package(format: str, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (5, 768), dtype=np.int8)
    scales = rng.uniform(0.01, 2, (5, 3)).astype(np.float16).astype(np.float32)
    weights = (trits.reshape(5, 3, 256) * scales[:, :, None]).reshape(5, 768)
    expected = gguf.quantize(weights, gguf.GGMLQuantizationType[format])
    assert_array_equal(PACK[GGMLType[format]]("m", TernaryMatrix(trits, scales)), expected.reshape(-1))


def test_scales_that_a_format_cannot_hold_are_refused_by_tensor(rng: np.random.Generator) -> None:
    trits = np.where(rng.integers(0, 2, (2, 512)), 1, -1).astype(np.int8)
    for scales, format, words in [
        (np.array([[1.0], [2.0]]), "I2_S", "tensor m: i2_s has one scale a matrix: found 2"),
        (np.ones((2, 8)) * np.arange(1, 9), "TQ2_0", "tensor m: the scales of 256 inputs differ"),
        (np.full((1, 1), 1e-9), "TQ1_0", "tensor m: scales must be float16 numbers"),
        (np.full((1, 1), 1e9), "TQ2_0", "tensor m: scales must be float16 numbers"),
    ]:
        with pytest.raises(UnsupportedModel, match=words):
            PACK[GGMLType[format]]("m", TernaryMatrix(trits, scales.astype(np.float32)))
    with pytest.raises(UnsupportedModel, match="tensor m: rows must be a multiple of 256 inputs: found 128"):
        PACK[GGMLType.TQ1_0]("m", TernaryMatrix.of_one_scale(trits[:, :128], 1))
    trits[1, 64:128] = 0  # a scale of nothing counts for nothing
    uneven = np.where(np.arange(16).reshape(2, 8) == 9, 7, 1).astype(np.float32)
    for pack in PACK.values():
        assert_array_equal(pack("m", TernaryMatrix(trits, uneven)), pack("m", TernaryMatrix.of_one_scale(trits, 1)))


def test_weights_that_are_not_ternary_are_refused_by_tensor(rng: np.random.Generator) -> None:
    weights = rng.integers(-1, 2, (4, 256)).astype(np.float32)
    for at, value in [((2, 70), 2.0), ((0, 0), np.nan), ((3, 255), np.inf)]:
        wrong = weights.copy()
        wrong[at] = value
        with pytest.raises(
            UnsupportedModel, match="tensor m: each 64 weights of a row must be -s, 0 or s: found others"
        ):
            TernaryMatrix.of_weights("m", wrong)


def test_what_is_not_ternary_is_refused_by_tensor(trits: np.ndarray, tmp_path: Path) -> None:
    good = {"m.weight": ("U8", packed(trits)), "m.weight_scale": ("F32", np.array([2.0]))}
    broken = packed(trits)
    broken[1, 1] |= 3
    for change, words in [
        ({"m.weight": ("U8", broken)}, "tensor m.weight must have codes 0, 1 and 2: found 3"),
        ({"m.weight": ("U8", packed(trits)[:2])}, r"m.weight must be \(12, 128\) with four rows packed .* \(2, 128\)"),
        ({"m.weight": ("F32", trits * 2)}, "m.weight must be -1, 0 or 1: found other numbers"),
        ({"m.weight_scale": ("F32", np.ones(3))}, r"m.weight_scale must be one positive number: found 3, \[1.0"),
        ({"m.weight_scale": ("F32", np.array([0.0]))}, "m.weight_scale must be one positive number: found 1"),
        (
            {"m.weight_scale": ("U8", np.array([1]))},
            "m.weight_scale must be F32, F16, BF16, F64 or float8 .*: found U8",
        ),
    ]:
        checkpoint = a_checkpoint(tmp_path, AUTOBITLINEAR, good | change)
        with pytest.raises(ModelFileError, match=words):
            checkpoint.ternary("m", (12, 128))
    with pytest.raises(ModelFileError, match="tensor n.weight is missing"):
        checkpoint.ternary("n", (12, 128))


def test_a_checkpoint_that_names_no_quantisation_must_be_ternary_as_it_stands(
    trits: np.ndarray, tmp_path: Path
) -> None:
    scales = np.linspace(0.25, 3, 12, dtype=np.float16)[:, None]
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(
        tmp_path / "model.safetensors", {"m.weight": ("F16", trits * scales), "n.weight": ("F16", trits * 3 + scales)}
    )
    checkpoint = TernaryCheckpoint.open(tmp_path)
    matrix = checkpoint.ternary("m", (12, 128))
    assert_array_equal(matrix.trits, trits)
    assert_array_equal(matrix.scales, np.repeat(scales, 2, axis=1))
    with pytest.raises(UnsupportedModel, match="tensor n.weight of .* this matrix is not ternary"):
        checkpoint.ternary("n", (12, 128))


def test_a_folder_that_is_no_ternary_model_is_refused(trits: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"needs config.json and .safetensors files: found nothing"):
        TernaryCheckpoint.open(tmp_path)
    with pytest.raises(UnsupportedModel, match="must be that of bitnet: found .gptq"):
        a_checkpoint(tmp_path, {"quant_method": "gptq", "bits": 4}, {})
    with pytest.raises(UnsupportedModel, match="use_rms_norm must be False: found True"):
        a_checkpoint(tmp_path, BITLINEAR | {"use_rms_norm": True}, {})
    checkpoint = a_checkpoint(tmp_path, BITLINEAR, {}, model_type="bitnet", hidden_act="gelu")
    with pytest.raises(UnsupportedModel, match="model bitnet with gelu is not supported; bitnet with relu2, llama"):
        export_ternary(checkpoint, tmp_path / "m.gguf", vocabulary=False)
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type must be default: found 'llama3'"),
        ({"num_hidden_layers": 1}, r"tensor model\.layers\.1\..* has no place in the models that are known"),
    ],
)
def test_what_would_be_left_out_is_refused(
    change: dict[str, object], message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    write_packed_llama(tmp_path, rng)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=message):
        export_ternary(TernaryCheckpoint.open(tmp_path), tmp_path / "a.gguf")


def test_a_safetensors_file_that_is_cut_short_is_refused(trits: np.ndarray, tmp_path: Path) -> None:
    a_checkpoint(tmp_path, BITLINEAR, {"m.weight": ("U8", packed(trits)), "n": ("F32", np.ones(7))})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 40, len(whole) - 4):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match="cut short"):
            TernaryCheckpoint.open(tmp_path)
    path.write_bytes(whole.replace(b'"shape": [7]', b'"shape": [9]'))
    with pytest.raises(ModelFileError, match=r"tensor n F32 \(9,\) cannot have 28 bytes"):
        TernaryCheckpoint.open(tmp_path)
    path.write_bytes(whole.replace(b'"shape": [7]', b'"shapE": [7]'))
    with pytest.raises(ModelFileError, match="broken header: tensor 'n': shape must be a list"):
        TernaryCheckpoint.open(tmp_path)


# ---- transformers ------------------------------------------------------------------------------------------------


def tiny_transformer(kind: str, folder: Path, rng: np.random.Generator) -> Any:
    """A random model of transformers with ternary layers, also written to the folder as such models are published."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        missing("transformers", "transformers and torch are not installed: pip install torch transformers")
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights, replace_with_bitnet_linear
    from transformers.utils.quantization_config import BitNetQuantConfig

    torch._dynamo.config.disable = True  # its functions are compiled otherwise, for minutes
    torch.manual_seed(int(rng.integers(1 << 30)))
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256, "initializer_range": 0.3}
    if kind == "bitnet":
        config = transformers.BitNetConfig(**sizes, tie_word_embeddings=True)
        quantization = BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="offline")
        model = transformers.BitNetForCausalLM(config)
    else:  # as Falcon3-1.58bit
        config = transformers.LlamaConfig(**sizes, head_dim=64, tie_word_embeddings=False, rope_theta=1000042.0)
        quantization = BitNetQuantConfig()
        model = transformers.LlamaForCausalLM(config)
    replace_with_bitnet_linear(model, ["lm_head"], quantization)
    saved = {}
    for name, module in model.named_modules():
        if isinstance(module, AutoBitLinear | BitLinear):
            trits = torch.randint(-1, 2, (module.out_features, module.in_features)).float()
            scale = torch.rand(1) * 0.05 + 0.08
            if isinstance(module, BitLinear):
                scale = 1 / scale
            module.to_empty(device="cpu")
            module.weight_scale.data = scale
            weight = pack_weights(trits.clone()) if isinstance(module, BitLinear) else trits
            module.weight = torch.nn.Buffer(weight) if isinstance(module, BitLinear) else torch.nn.Parameter(weight)
            module.dtype = torch.float32
            saved |= {f"{name}.weight": pack_weights(trits.clone()), f"{name}.weight_scale": scale}
    for name, values in model.named_parameters():
        if name not in saved:
            if name.endswith("norm.weight"):
                values.data += 0.2 * torch.randn_like(values)
                values.data[3] = 20  # against which the others are rounded coarsely
            values.data = values.data.half().float()
            saved[name] = values.data.clone()
    save_file(saved, folder / "model.safetensors")
    text = config.to_dict() | {"quantization_config": quantization.to_dict()}
    (folder / "config.json").write_text(json.dumps(text, default=str))
    return model.eval()


@pytest.mark.parametrize("kind", ["bitnet", "llama"])
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    model = tiny_transformer(kind, tmp_path, rng)
    import torch

    export_ternary(TernaryCheckpoint.open(tmp_path), tmp_path / "m.gguf", vocabulary=False)
    tokens = rng.integers(0, 300, 100)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    # Sums that differ in their last bit, and a cache in f16, tip a rounding of the activations over now and then: by
    # one step of 1/127 of the largest in a token. Without that rounding the logits part by three times as much.
    native, floats = (
        np.sqrt(np.mean((logits_of(backend, tmp_path / "m.gguf", tokens) - theirs) ** 2, axis=1)) / theirs.std()
        for backend in (NativeBackend(), ReferenceBackend())
    )
    assert native.min() < 1e-3  # where none tips over
    assert np.median(native) < 0.02 and np.median(native) < 0.4 * np.median(floats)
    ours = logits_of(NativeBackend(), tmp_path / "m.gguf", tokens)
    first, second = np.sort(theirs, axis=1)[:, [-1, -2]].T
    clear = first - second > 0.1 * theirs.std()
    assert clear.mean() > 0.5
    assert_array_equal(ours.argmax(axis=1)[clear], theirs.argmax(axis=1)[clear])


def logits_of(backend: Any, path: Path, tokens: np.ndarray) -> np.ndarray:
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        session = backend.load(
            file, spec, backend.plan(file, spec, LoadSettings(128, n_batch=128)), Device(2)
        ).session()
        return np.asarray(session.forward(tokens, logits="all").logits)
