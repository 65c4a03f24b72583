"""compressed-tensors (github.com/vllm-project/compressed-tensors), what llm-compressor writes.

Its formats differ in how codes are stored; all have `weight_scale`, for the whole weight, each row, each block, or each
run of inputs:

- naive-quantized, int-quantized, float-quantized, mxfp8-quantized: `weight` in int8 or float8; `weight_zero_point` if
  not symmetric.
- pack-quantized: `weight_packed`, codes of 1 to 8 bits plus half their range in 32-bit words along a row;
  `weight_zero_point` the same along a column; `weight_shape`; `weight_g_idx`, the group of each input.
- nvfp4-pack-quantized, mxfp4-pack-quantized: `weight_packed`, two E2M1 to a byte. NVFP4's scales are divided by
  `weight_global_scale`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.quantized.fp4 import Fp4Tensor, mxfp4, nvfp4
from edgeinfer.exporters.checkpoint.quantized.packed import PackedTensor, packed
from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.quantized.scaled import FLOAT8, ScaledTensor
from edgeinfer.exporters.checkpoint.quantized.scales import SCALES, scales_of, stored_scales
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import Floats, Tensor

_FORMATS = (
    *("naive-quantized", "int-quantized", "float-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
)


def read(settings: Config, parts: Parts) -> dict[str, Tensor]:
    """The weights that have scales. Raises ModelFileError, UnsupportedModel."""
    settings.choice("format", _FORMATS, "dense")
    for key in ("sparsity_config", "transform_config"):
        part = settings.part(key)
        if part is not None and part.values and part.get("format") != "dense":
            settings.refuse(key, "must be empty: sparse and transformed weights are not read")
    schemes = _schemes(settings)
    made: dict[str, Tensor] = {}
    for module in parts.ending(".weight_packed"):
        if parts.dtype(f"{module}.weight_packed") == "U8":
            made[f"{module}.weight"] = _fp4(module, parts)
        else:
            made[f"{module}.weight"] = _packed(module, schemes, parts)
    for module in parts.ending(".weight_scale"):
        made[f"{module}.weight"] = _eight_bits(module, schemes, parts)
    parts.drop_activations()
    return made


def _schemes(settings: Config) -> list[Config]:
    """What the configuration says of weights, for each group of layers."""
    groups = settings.part("config_groups")
    found = [groups.part(name) for name in groups.values] if groups is not None else []
    weights = [group.part("weights") for group in found if group is not None]
    return [scheme for scheme in weights if scheme is not None]


def _blocks(schemes: list[Config]) -> list[int]:
    """Sizes of blocks, or of a run of inputs, that a scheme names."""
    for scheme in schemes:
        if "block_structure" in scheme:
            return scheme.integers("block_structure", 2, least=1)
        if scheme.get("group_size") not in (None, -1):
            return [scheme.integer("group_size")]
    return []


def _eight_bits(module: str, schemes: list[Config], parts: Parts) -> ScaledTensor:
    name, blocks = f"{module}.weight_scale", _blocks(schemes)
    codes, stored = parts.take(f"{module}.weight", ("I8", *FLOAT8)), parts.take(name, SCALES)
    zeros = parts.take_if_there(f"{module}.weight_zero_point", ("I8", *FLOAT8))
    scales = stored_scales(stored, codes.shape, blocks, parts)
    if zeros is None or zeros.dtype != "I8":  # of float8 they are all 0
        return ScaledTensor(codes, scales)
    return ScaledTensor(
        codes, scales, scales_of(zeros.name, partial(_int8, zeros), zeros.shape, codes.shape, blocks, parts)
    )


def _int8(stored: StoredTensor) -> Floats:
    return stored.read().view(np.int8).astype(np.float32)


def _packed(module: str, schemes: list[Config], parts: Parts) -> PackedTensor:
    widths = {scheme.integer("num_bits", most=8) for scheme in schemes if scheme.get("type") in (None, "int")}
    return packed(module, widths, _blocks(schemes), parts)


def _fp4(module: str, parts: Parts) -> Fp4Tensor:
    codes = parts.take(f"{module}.weight_packed", ("U8",))
    scale = parts.take(f"{module}.weight_scale", ("F8_E4M3", "U8", "F8_E8M0"))
    if scale.dtype != "F8_E4M3":
        return mxfp4(codes, scale, parts)
    return nvfp4(codes, scale, parts.take(f"{module}.weight_global_scale", ("F32",)), True, parts)
