"""Layers as libraries store quantised ones, of random codes: any bits are codes, so nothing is quantised here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

N_OUT, N_IN = 32, 96  # as multiples of 32, which AutoGPTQ needs
Tensors = dict[str, tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """One layer called "m"."""

    name: str
    settings: dict[str, Any]  # its quantization_config
    tensors: Tensors  # (dtype, values) by name


def _words(rng: np.random.Generator, *shape: int) -> tuple[str, np.ndarray]:
    return "I32", rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def _scales(rng: np.random.Generator, *shape: int) -> tuple[str, np.ndarray]:
    return "F16", rng.uniform(0.01, 1, shape).astype(np.float16)


def _zeros(rng: np.random.Generator, bits: int) -> tuple[str, np.ndarray]:
    """For each of three groups, below the largest code: AutoGPTQ reads that as 0 or, in 3 bits, as 8."""
    codes = rng.integers(0, 2**bits - 1, (3, N_OUT))
    stream = (codes[:, :, None] >> np.arange(bits) & 1).reshape(3, -1).astype(np.uint8)
    return "I32", np.packbits(stream, axis=1, bitorder="little").view("<i4")


def gptq(bits: int, checkpoint_format: str, act_order: bool) -> Case:
    """Three groups of 32 inputs, or with act_order of inputs here and there."""
    rng = np.random.default_rng(bits)
    groups = np.arange(N_IN, dtype=np.int32) // 32
    tensors = {
        "m.qweight": _words(rng, N_IN * bits // 32, N_OUT),
        "m.qzeros": _zeros(rng, bits),
        "m.scales": _scales(rng, 3, N_OUT),
        "m.g_idx": ("I32", rng.permutation(groups) if act_order else groups),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": checkpoint_format}
    return Case(f"gptq {bits} bits {checkpoint_format}{' act order' if act_order else ''}", settings, tensors)


def awq() -> Case:
    """Three groups of 32 inputs."""
    rng = np.random.default_rng(100)
    tensors = {"m.qweight": _words(rng, N_IN, N_OUT // 8), "m.qzeros": _words(rng, 3, N_OUT // 8)}
    tensors["m.scales"] = _scales(rng, 3, N_OUT)
    return Case("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, tensors)


def float8(shape: tuple[int, ...], seed: int, dtype: str = "F8_E4M3") -> tuple[str, np.ndarray]:
    """Codes of float8 numbers without NaN and infinities."""
    codes = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    return dtype, np.where((codes & 0x7F) >= (0x7F if dtype == "F8_E4M3" else 0x7C), 0, codes).astype(np.uint8)


def fp8(name: str, scale: str, scale_shape: tuple[int, ...], **settings: Any) -> Case:
    """Float8 with scales under this name."""
    rng = np.random.default_rng(200)
    tensors = {"m.weight": float8((160, 200), 201), scale: ("F32", rng.uniform(0.1, 1, scale_shape))}
    return Case(f"fp8 {name}", {"quant_method": "fp8", **settings}, tensors)


def packed(bits: int, group: int | None, zeros: bool) -> Case:
    """compressed-tensors 0.20, pack-quantized. group: inputs with one scale, None for one a row."""
    rng = np.random.default_rng(300 + bits)
    tensors = {
        "m.weight_packed": _words(rng, N_OUT, N_IN * bits // 32),
        "m.weight_shape": ("I64", np.array([N_OUT, N_IN])),
        "m.weight_scale": _scales(rng, N_OUT, N_IN // group if group else 1),
    }
    if zeros:
        tensors["m.weight_zero_point"] = _words(rng, N_OUT * bits // 32, tensors["m.weight_scale"][1].shape[1])
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "group_size": group}
    weights["strategy"] = "group" if group else "channel"
    return Case(
        f"packed {bits} bits {weights['strategy']}{' zeros' if zeros else ''}", _compressed("pack", weights), tensors
    )


def int8(zeros: bool) -> Case:
    """compressed-tensors, int-quantized with a scale for each row."""
    rng = np.random.default_rng(400)
    tensors: Tensors = {"m.weight": ("I8", rng.integers(-128, 128, (N_OUT, N_IN)).astype(np.int8))}
    tensors["m.weight_scale"] = _scales(rng, N_OUT, 1)
    if zeros:
        tensors["m.weight_zero_point"] = ("I8", rng.integers(-128, 128, (N_OUT, 1)).astype(np.int8))
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": not zeros}
    return Case(f"int8{' zeros' if zeros else ''}", _compressed("int", weights), tensors)


def nvfp4() -> Case:
    """compressed-tensors: a scale of 16 inputs, and one of all."""
    rng = np.random.default_rng(500)
    tensors: Tensors = {"m.weight_packed": ("U8", rng.integers(0, 256, (N_OUT, N_IN // 2)).astype(np.uint8))}
    dtype, scales = float8((N_OUT, N_IN // 16), 501)
    tensors |= {"m.weight_scale": (dtype, scales & 0x7F), "m.weight_global_scale": ("F32", np.array([37.5]))}
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Case("nvfp4", _compressed("nvfp4-pack", weights), tensors)


def mxfp4() -> Case:
    """compressed-tensors: exponents of 32 inputs."""
    rng = np.random.default_rng(600)
    tensors: Tensors = {"m.weight_packed": ("U8", rng.integers(0, 256, (N_OUT, N_IN // 2)).astype(np.uint8))}
    tensors["m.weight_scale"] = ("U8", rng.integers(100, 140, (N_OUT, N_IN // 32)).astype(np.uint8))
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return Case("mxfp4", _compressed("mxfp4-pack", weights), tensors)


def _compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": f"{format}-quantized", "config_groups": {"group_0": scheme}}


CASES: list[Callable[[], Case]] = [
    *(lambda bits=bits: gptq(bits, "gptq", False) for bits in (2, 3, 4, 8)),  # type: ignore[misc]
    lambda: gptq(4, "gptq_v2", True),
    awq,
    lambda: fp8("blocks", "m.weight_scale_inv", (2, 2), weight_block_size=[128, 128]),
    lambda: fp8("tensor", "m.weight_scale", ()),
    lambda: fp8("rows", "m.weight_scale", (160, 1)),
    *(lambda bits=bits: packed(bits, 32, False) for bits in (3, 4, 8)),  # type: ignore[misc]
    lambda: packed(4, 32, True),
    lambda: packed(4, None, False),
    lambda: int8(False),
    lambda: int8(True),
    nvfp4,
    mxfp4,
]
