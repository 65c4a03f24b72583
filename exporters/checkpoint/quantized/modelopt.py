"""What NVIDIA's ModelOpt writes: float8 with one scale a weight, and NVFP4, whose scales have a scale of their own."""

from __future__ import annotations

from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.quantized.fp4 import Fp4Tensor, nvfp4
from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.quantized.scaled import FLOAT8, ScaledTensor, scaled


def read(settings: Config, parts: Parts) -> dict[str, ScaledTensor | Fp4Tensor]:
    """The weights that have scales. Raises ModelFileError, UnsupportedModel."""
    made: dict[str, ScaledTensor | Fp4Tensor] = {}
    for module in parts.ending(".weight_scale_2"):
        codes = parts.take(f"{module}.weight", ("U8",))
        local = parts.take(f"{module}.weight_scale", ("F8_E4M3",))
        whole = parts.take(f"{module}.weight_scale_2", ("F32",))
        made[f"{module}.weight"] = nvfp4(codes, local, whole, False, parts)
    for module in parts.ending(".weight_scale"):
        if parts.dtype(f"{module}.weight") in FLOAT8:
            made[f"{module}.weight"] = scaled(f"{module}.weight", f"{module}.weight_scale", FLOAT8, [], parts)
    parts.drop_activations()
    if not made:
        settings.refuse("quant_algo", "must be of weights with weight_scale beside them")
    return made
