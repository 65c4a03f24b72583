"""Models of many layers with room for their weights, but none in it: for what is decided by the header of a file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiny_experts import EXPERT_ARCHITECTURES, write_tiny_experts
from tiny_hybrids import HYBRID_ARCHITECTURES, write_tiny_hybrid
from tiny_latents import write_tiny_latents
from tiny_mamba import MAMBA_MODELS, write_tiny_mamba
from tiny_models import ARCHITECTURES, UNKNOWN_TO_LLAMA_CPP, write_tiny_model

from edgeinfer.exporters.gguf.writer import Tensor, layout
from edgeinfer.models.arrays import Array
from edgeinfer.models.gguf import GGMLType, MetadataValue, ModelFile

_DENSE = [name for name in ARCHITECTURES if name not in UNKNOWN_TO_LLAMA_CPP]
# An architecture with the width of its rows, or the number of its experts; and what llama.cpp takes for a model of 70B.
CASES = [f"{name}-{width}" for name in _DENSE for width in (256, 96)]
CASES += [f"{name}-{n}" for name in EXPERT_ARCHITECTURES for n in (8, 4)]
CASES += ["llama-80 layers", "qwen2-80 layers"]
CASES += [f"{name}-hybrid" for name in HYBRID_ARCHITECTURES]
CASES += [f"{name}-mamba" for name in MAMBA_MODELS]
CASES += ["v3-latents"]
N_LAYERS = 17  # so that an eighth and a sixteenth of them are some


def stretched_model(path: Path, case: str) -> Path:
    """Write a model of 17 layers, or 80, whose other layers are as its last, with F16 matrices of zeros.

    The layers of hybrids, of which there are several kinds, take turns.
    """
    metadata, tensors = _small(case)
    n_layers = 80 if case.endswith("layers") else N_LAYERS
    architecture = str(metadata["general.architecture"])
    n_small = 1 + max(int(tensor.name.split(".")[1]) for tensor in tensors if tensor.name.startswith("blk."))
    n_kinds = n_small if case.endswith(("hybrid", "mamba")) else 1
    small = list(tensors)
    for layer in range(n_small, n_layers):
        as_layer = n_small - n_kinds + (layer - n_small) % n_kinds
        more = [tensor for tensor in small if tensor.name.startswith(f"blk.{as_layer}.")]
        tensors = [*tensors, *(_renamed(tensor, f"blk.{layer}.{tensor.name.split('.', 2)[2]}") for tensor in more)]
    by_layer = ("attention.recurrent_layers", "attention.head_count_kv", "feed_forward_length")
    for key in (f"{architecture}.{each}" for each in by_layer):
        if n_kinds > 1 and isinstance(metadata.get(key), Array):
            metadata = metadata | {key: (list(metadata[key]) * n_layers)[:n_layers]}  # type: ignore[arg-type]
    laid = layout(metadata | {f"{architecture}.block_count": n_layers}, tensors)
    with path.open("wb") as file:
        file.write(laid.header)
        file.truncate(laid.n_bytes)
    return path


def _renamed(tensor: Tensor, name: str) -> Tensor:
    return Tensor(name, tensor.type, tensor.shape, tensor.pieces)


@cache
def _small(case: str) -> tuple[dict[str, MetadataValue], list[Tensor]]:
    name, size = case.rsplit("-", 1)
    wide: dict[str, Any] = {"n_embd": 256}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        if size in ("256", "96", "80 layers"):
            n_embd = 96 if size == "96" else 256
            options = {"n_embd": n_embd, "n_ff": n_embd, "n_kv_heads": 2 if n_embd == 256 else 1, "tied": n_embd == 96}
            write_tiny_model(path, name, "F16", **options)  # type: ignore[arg-type]
        elif size == "hybrid":
            write_tiny_hybrid(path, name, "F16", **wide, kinds=["recurrent", "attention"])  # type: ignore[arg-type]
        elif size == "mamba":
            write_tiny_mamba(path, name, "F16", **wide)  # type: ignore[arg-type]
        elif size == "latents":
            write_tiny_latents(path, name, "F16")  # type: ignore[arg-type]
        else:
            write_tiny_experts(path, name, "F16", **wide, n_ff=64, n_experts=int(size))  # type: ignore[arg-type]
        with ModelFile.open(path) as file:
            tensors = [Tensor(info.name, GGMLType(info.type), info.shape, list) for info in file.tensors.values()]
            keys = {key: value for key, value in file.metadata.items() if "sliding_window_pattern" not in key}
            return keys, tensors
