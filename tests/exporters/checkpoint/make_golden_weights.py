"""What the libraries make of the layers of tests/support/quantized_checkpoints.py: golden_weights.json.

python tests/exporters/checkpoint/make_golden_weights.py --auto-gptq FOLDER --auto-awq FOLDER > golden_weights.json

The folders are the sources of AutoGPTQ 0.7.1 (its QuantLinear for the CPU is applied to an identity matrix) and of
AutoAWQ 0.2.9 (dequantize_gemm). Also needed: torch, compressed-tensors 0.20 (its decompressors). Scales are given as
float32, so that products are not rounded. Without a library at hand: float8 is torch's own, times the scale; and
"gptq_v2" with act order, which AutoGPTQ lacks, is written out from the documentation of GPTQModel.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from quantized_checkpoints import CASES, N_IN, N_OUT, Case  # noqa: E402


def from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensor(case: Case, name: str) -> Any:
    dtype, values = case.tensors[f"m.{name}"]
    found = torch.from_numpy(values.copy())
    if dtype == "F8_E4M3":
        return found.view(torch.float8_e4m3fn).float()
    return found.float() if dtype in ("F16", "F32") else found


def gptq(case: Case, library: Any) -> Any:
    bits = case.settings["bits"]
    codes, zeros, scales = (tensor(case, name) for name in ("qweight", "qzeros", "scales"))
    if case.settings["checkpoint_format"] == "gptq":
        layer = library.QuantLinear(bits, 32, N_IN, N_OUT, False, weight_dtype=torch.float32)
        layer.qweight, layer.qzeros, layer.scales = codes, zeros, scales
        return layer(torch.eye(N_IN)).T
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (codes[:, None] >> shifts[None, :, None] & 2**bits - 1).reshape(N_IN, N_OUT)
    zeros = (zeros[:, :, None] >> shifts & 2**bits - 1).reshape(3, N_OUT)
    groups = tensor(case, "g_idx").long()
    return (scales[groups] * (codes - zeros[groups])).T


def compressed(case: Case) -> Any:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weights = dict(case.settings["config_groups"]["group_0"]["weights"])
    if "scale_dtype" in weights:
        weights["scale_dtype"] = torch.uint8
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    state = {name[2:]: tensor(case, name[2:]) for name in case.tensors}
    if "fp4" not in case.name:
        return BaseCompressor.get_value_from_registry(case.settings["format"]).decompress(state, scheme)["weight"]
    codes = unpack_fp4_from_uint8(state["weight_packed"], N_OUT, N_IN).float()  # the rest of it is in bfloat16
    scales = state["weight_scale"] if case.name == "nvfp4" else decompress_mx_scale(state["weight_scale"]).float()
    whole = state.get("weight_global_scale")
    return dequantize(codes, scales, args=scheme.weights, global_scale=whole, dtype=torch.float32)


def fp8(case: Case) -> Any:
    codes = tensor(case, "weight")
    if "m.weight_scale" in case.tensors:
        return codes * tensor(case, "weight_scale")
    blocks = tensor(case, "weight_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * blocks[: codes.shape[0], : codes.shape[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--auto-gptq", type=Path, required=True)
    parser.add_argument("--auto-awq", type=Path, required=True)
    options = parser.parse_args()
    auto_gptq = from_file(options.auto_gptq / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py")
    auto_awq = from_file(options.auto_awq / "awq/utils/packing_utils.py")
    found = {}
    for case in (make() for make in CASES):
        method = case.settings["quant_method"]
        if method == "gptq":
            weights = gptq(case, auto_gptq)
        elif method == "awq":
            parts = (tensor(case, name) for name in ("qweight", "qzeros", "scales"))
            weights = auto_awq.dequantize_gemm(*parts, 4, 32).T
        else:
            weights = fp8(case) if method == "fp8" else compressed(case)
        data = (weights.float().contiguous() + 0.0).numpy().tobytes()  # -0 becomes 0
        found[case.name] = hashlib.sha256(data).hexdigest()[:16]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
