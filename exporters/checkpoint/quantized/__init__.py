"""Quantised checkpoints: which method made the weights, and what reads them.

Each method gives float32 weights under their plain names, made when rows are asked for. Where the libraries that load
such checkpoints round the product of code and scale to float16 or bfloat16, here it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.quantized import awq, compressed, gptq, modelopt, scaled
from edgeinfer.exporters.checkpoint.quantized.parts import Parts
from edgeinfer.exporters.checkpoint.quantized.scaled import FLOAT8
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import Tensor

_AS_STORED = ("bitnet", "mxfp4")  # read by what knows the architecture
_ENDS = (".qweight", ".weight_packed", ".qscale_weight", ".SCB", ".absmax")
_CODES = ("I8", "U8", *FLOAT8)
# Each gives the tensors that it makes of the parts that it takes.
_READERS: dict[str, Callable[[Config, Parts], Mapping[str, Tensor]]] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "fp8": scaled.read_fp8,
    "fbgemm_fp8": scaled.read_fp8,
    "compressed-tensors": compressed.read,
    "modelopt": modelopt.read,
}


def read_tensors(config: Config, stored: Mapping[str, StoredTensor]) -> tuple[str, dict[str, Tensor]]:
    """(method, tensors by their plain names) of what a folder stores. Raises UnsupportedModel, ModelFileError.

    The method is "" where nothing is quantised; of "bitnet" and "mxfp4" the tensors are as they are stored.
    """
    _refuse_mlx(config, stored)
    parts = Parts(config.path.parent, stored)
    settings = config.part("quantization_config") or config.language().part("quantization_config")
    if settings is None:
        _check_unquantised(config, stored)
        return "", parts.rest()
    method = settings.text("quant_method")
    if method in _AS_STORED:
        return method, parts.rest()
    if method not in _READERS:
        raise UnsupportedModel(
            f"{config.path}: weights that were quantised by {method!r:.80} cannot be read, those by "
            f"{', '.join(_READERS)} can: export the model that it was made of, or dequantise it first"
        )
    made = dict(_READERS[method](settings, parts))
    rest = parts.rest()
    twice = next((name for name in made if name in rest), None)
    if twice is not None:
        parts.refuse(twice, "is there both quantised and as it was")
    return method, made | rest


def _refuse_mlx(config: Config, stored: Mapping[str, StoredTensor]) -> None:
    """Raises UnsupportedModel for weights of MLX: codes in U32, with scales and biases of groups."""
    ends = [".scales", ".biases"]
    codes = (name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dtype == "U32")
    found = next((name for name in codes if any(name + end in stored for end in ends)), None)
    if found is None:
        return
    settings = config.get("quantization") or config.get("quantization_config")
    known = settings if isinstance(settings, dict) else {}
    bits, group = (known.get(key, "an unknown number of") for key in ("bits", "group_size"))
    raise UnsupportedModel(
        f"{config.path}: the weights were quantised by MLX ({bits!s:.20} bits, groups of {group!s:.20} weights; first "
        f"{found:.120}), which is not read: export the model that they were made of, or dequantise them where MLX "
        "runs: mlx_lm.convert --hf-path FOLDER --mlx-path OTHER --dequantize"
    )


def _check_unquantised(config: Config, stored: Mapping[str, StoredTensor]) -> None:
    """Raises UnsupportedModel for tensors that only quantised weights have: their codes must not pass for weights."""
    codes = {name for name, tensor in stored.items() if tensor.dtype in _CODES}
    scaled = (name for name in codes if not stored.keys().isdisjoint(name + end for end in ("_scale", "_scale_inv")))
    found = next((name for name in stored if name.endswith(_ENDS)), None) or next(scaled, None)
    if found is not None:
        raise UnsupportedModel(
            f"{config.path}: quantization_config must say how {found:.120} was quantised: it is missing"
        )
