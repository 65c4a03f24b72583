"""From a ternary checkpoint of Hugging Face to a GGUF file with I2_S matrices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint import Checkpoint, TernaryMatrix
from edgeinfer.exporters.gguf import Tensor, write_gguf
from edgeinfer.gguf import I2_S_TAIL_BYTES, GGMLType

_ARCHITECTURES = {("bitnet", "relu2"): "bitnet-b1.58", ("llama", "silu"): "llama"}  # by model_type and hidden_act
_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}


def export_ternary(checkpoint: Checkpoint, target: Path) -> None:
    """Write a model of BitNet or Llama with ternary matrices, embeddings and output in F16.

    The file has no vocabulary: it serves sessions, which take token ids.
    Raises UnsupportedModel, ModelFileError, OSError.
    """
    write_gguf(target, _metadata(checkpoint), list(_tensors(checkpoint)))


def pack_i2_s(matrix: TernaryMatrix) -> NDArray[np.uint8]:
    """The bytes of an I2_S tensor; see edgeinfer.backends.dequantize. Rows must be a multiple of 128."""
    codes = (matrix.trits + 1).astype(np.uint8).reshape(-1, 4, 32)
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    tail = np.zeros(I2_S_TAIL_BYTES // 4, dtype="<f4")
    tail[0] = matrix.scale
    return np.concatenate([packed.reshape(-1), tail.view(np.uint8)])


def _architecture(checkpoint: Checkpoint) -> str:
    kind = (checkpoint.config.get("model_type"), checkpoint.config.get("hidden_act"))
    if kind not in _ARCHITECTURES:
        known = ", ".join(f"{model} with {activation}" for model, activation in _ARCHITECTURES)
        raise UnsupportedModel(f"{checkpoint.folder}: model {kind[0]} with {kind[1]} is not supported; {known} is")
    return _ARCHITECTURES[kind]


def _metadata(checkpoint: Checkpoint) -> dict[str, str | int | float]:
    architecture, config = _architecture(checkpoint), checkpoint.config
    head_dim = _head_dim(config)
    values: dict[str, int | float] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": _rope_base(checkpoint),
    }
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in values.items()}}


def _head_dim(config: Any) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope_base(checkpoint: Checkpoint) -> float:
    """Raises UnsupportedModel for a rotation that is scaled."""
    config = checkpoint.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedModel(f"{checkpoint.folder}: rope_type must be default: found {rope['rope_type']!r:.80}")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _tensors(checkpoint: Checkpoint) -> Iterator[Tensor]:
    config = checkpoint.config
    yield _half("token_embd.weight", checkpoint.floats("model.embed_tokens.weight"))
    yield _float("output_norm.weight", checkpoint.floats("model.norm.weight"))
    if not config.get("tie_word_embeddings") and "lm_head.weight" in checkpoint.names:
        yield _half("output.weight", checkpoint.floats("lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for module, name in _NORMS.items():
            if f"{theirs}.{module}.weight" in checkpoint.names:
                yield _float(f"{ours}.{name}.weight", checkpoint.floats(f"{theirs}.{module}.weight"))
        for module, name in _LINEARS.items():
            matrix = checkpoint.ternary(f"{theirs}.{module}", _shape(config, name))
            yield _ternary(f"{ours}.{name}.weight", _in_order(checkpoint, name, matrix))


def _shape(config: Any, name: str) -> tuple[int, int]:
    n_embd, n_ff, head_dim = config["hidden_size"], config["intermediate_size"], _head_dim(config)
    n_q, n_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "attn_q": (n_q, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_q),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }[name]


def _in_order(checkpoint: Checkpoint, name: str, matrix: TernaryMatrix) -> TernaryMatrix:
    """Rows as GGUF has them: in llama, rotary pairs stand side by side, not half a head apart."""
    if name not in ("attn_q", "attn_k") or _architecture(checkpoint) != "llama":
        return matrix
    n_out, n_in = matrix.trits.shape
    halves = matrix.trits.reshape(-1, 2, _head_dim(checkpoint.config) // 2, n_in)
    return TernaryMatrix(halves.swapaxes(1, 2).reshape(n_out, n_in), matrix.scale)


def _ternary(name: str, matrix: TernaryMatrix) -> Tensor:
    n_in = matrix.trits.shape[1]
    if n_in % GGMLType.I2_S.block_elements:
        raise UnsupportedModel(f"tensor {name}: I2_S needs rows of a multiple of 128 inputs: found {n_in}")
    return Tensor(name, GGMLType.I2_S, matrix.trits.shape, pack_i2_s(matrix))


def _half(name: str, values: NDArray[np.float32]) -> Tensor:
    return Tensor(name, GGMLType.F16, values.shape, values.astype("<f2").reshape(-1).view(np.uint8))


def _float(name: str, values: NDArray[np.float32]) -> Tensor:
    return Tensor(name, GGMLType.F32, values.shape, values.astype("<f4").reshape(-1).view(np.uint8))
