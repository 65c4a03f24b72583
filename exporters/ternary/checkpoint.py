"""Ternary models of checkpoints of Hugging Face: BitNet and Llama."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint import TernaryCheckpoint
from edgeinfer.exporters.ternary.source import SourceTensor, StoredTensor, TernarySource, TernaryTensor
from edgeinfer.exporters.vocabulary import read_vocabulary
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType, MetadataValue

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
_EMBEDDINGS, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}


def of_checkpoint(checkpoint: TernaryCheckpoint, vocabulary: bool = True) -> TernarySource:
    """The model of a checkpoint. vocabulary: whether its tokenizer is read. Raises UnsupportedModel, ModelFileError."""
    metadata = _checkpoint_metadata(checkpoint, vocabulary)
    output = "token_embd.weight" if _is_tied(checkpoint) else "output.weight"
    return TernarySource(checkpoint.path, metadata, output, list(_of_checkpoint(checkpoint)))


def _architecture(checkpoint: TernaryCheckpoint) -> str:
    kind = (checkpoint.config.get("model_type"), checkpoint.config.get("hidden_act"))
    if kind not in _ARCHITECTURES:
        known = ", ".join(f"{model} with {activation}" for model, activation in _ARCHITECTURES)
        raise UnsupportedModel(f"{checkpoint.path}: model {kind[0]} with {kind[1]} is not supported; {known} is")
    return _ARCHITECTURES[kind]


def _checkpoint_metadata(checkpoint: TernaryCheckpoint, vocabulary: bool) -> dict[str, MetadataValue]:
    architecture, config = _architecture(checkpoint), checkpoint.config
    head_dim = _head_dim(checkpoint)
    values: dict[str, MetadataValue] = {
        "context_length": _size(checkpoint, "max_position_embeddings"),
        "embedding_length": _size(checkpoint, "hidden_size"),
        "feed_forward_length": _size(checkpoint, "intermediate_size"),
        "block_count": _size(checkpoint, "num_hidden_layers"),
        "attention.head_count": _size(checkpoint, "num_attention_heads"),
        "attention.head_count_kv": _size(checkpoint, "num_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", 1e-6),
        "rope.dimension_count": head_dim,
        "rope.freq_base": _rope_base(checkpoint),
    }
    metadata: dict[str, MetadataValue] = {"general.architecture": architecture, "general.name": checkpoint.path.name}
    metadata |= {f"{architecture}.{key}": value for key, value in values.items()}
    if vocabulary:
        n_rows = checkpoint.shape(_embeddings_of(checkpoint))[0]
        metadata |= read_vocabulary(checkpoint.folder, config, n_rows)
    return metadata


def _size(checkpoint: TernaryCheckpoint, key: str) -> int:
    """A positive number of config.json. Raises ModelFileError."""
    return checkpoint.config.integer(key)


def _head_dim(checkpoint: TernaryCheckpoint) -> int:
    if checkpoint.config.get("head_dim"):
        return _size(checkpoint, "head_dim")
    return _size(checkpoint, "hidden_size") // _size(checkpoint, "num_attention_heads")


def _rope_base(checkpoint: TernaryCheckpoint) -> float:
    """Raises UnsupportedModel for a rotation that is scaled."""
    rope = checkpoint.config.rope()
    if rope.kind != "default":
        raise UnsupportedModel(f"{checkpoint.path}: rope_type must be default: found {rope.kind!r:.80}")
    return rope.theta


def _check_names(checkpoint: TernaryCheckpoint) -> None:
    """Raises UnsupportedModel for a tensor that would be left out, such as a bias."""
    in_layer = {f"{name}.weight" for name in (*_LINEARS, *_NORMS)} | {f"{name}.weight_scale" for name in _LINEARS}
    in_layer |= {"self_attn.rotary_emb.inv_freq"}
    known = {_EMBEDDINGS, "model.norm.weight", _OUTPUT}
    known |= {f"model.layers.{n}.{name}" for n in range(_size(checkpoint, "num_hidden_layers")) for name in in_layer}
    unknown = sorted(set(checkpoint.names) - known)
    if unknown:
        raise UnsupportedModel(f"{checkpoint.path}: tensor {unknown[0]} has no place in the models that are known")


def _of_checkpoint(checkpoint: TernaryCheckpoint) -> Iterator[SourceTensor]:
    _check_names(checkpoint)
    yield _stored(checkpoint, _embeddings_of(checkpoint), "token_embd.weight")
    yield _vector(checkpoint, "model.norm.weight", "output_norm.weight")
    if not _is_tied(checkpoint):
        yield _stored(checkpoint, _OUTPUT, "output.weight")
    for layer in range(_size(checkpoint, "num_hidden_layers")):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for module, name in _NORMS.items():
            if f"{theirs}.{module}.weight" in checkpoint.names:
                yield _vector(checkpoint, f"{theirs}.{module}.weight", f"{ours}.{name}.weight")
        for module, name in _LINEARS.items():
            shape = _shape(checkpoint, name)
            matrix = partial(_matrix, checkpoint, f"{theirs}.{module}", name, shape)
            yield TernaryTensor(f"{ours}.{name}.weight", None, shape, matrix)


def _is_tied(checkpoint: TernaryCheckpoint) -> bool:
    return bool(checkpoint.config.get("tie_word_embeddings")) or _OUTPUT not in checkpoint


def _embeddings_of(checkpoint: TernaryCheckpoint) -> str:
    """The output matrix, where a tied checkpoint stores that alone."""
    is_output = _EMBEDDINGS not in checkpoint and _OUTPUT in checkpoint and _is_tied(checkpoint)
    return _OUTPUT if is_output else _EMBEDDINGS


def _stored(checkpoint: TernaryCheckpoint, theirs: str, ours: str) -> StoredTensor:
    return StoredTensor(ours, checkpoint.type(theirs), checkpoint.shape(theirs), partial(checkpoint.data, theirs))


def _vector(checkpoint: TernaryCheckpoint, theirs: str, ours: str) -> StoredTensor:
    values = checkpoint.floats(theirs)
    return StoredTensor(ours, GGMLType.F32, values.shape, lambda *_: values.astype("<f4").view(np.uint8))


def _shape(checkpoint: TernaryCheckpoint, name: str) -> tuple[int, int]:
    n_embd, n_ff = _size(checkpoint, "hidden_size"), _size(checkpoint, "intermediate_size")
    heads, kv_heads = _size(checkpoint, "num_attention_heads"), _size(checkpoint, "num_key_value_heads")
    n_q, n_kv = heads * _head_dim(checkpoint), kv_heads * _head_dim(checkpoint)
    return {
        "attn_q": (n_q, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_q),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }[name]


def _matrix(checkpoint: TernaryCheckpoint, module: str, name: str, shape: tuple[int, int]) -> TernaryMatrix:
    """Rows as GGUF has them: in llama, rotary pairs stand side by side, not half a head apart."""
    matrix = checkpoint.ternary(module, shape)
    if name not in ("attn_q", "attn_k") or _architecture(checkpoint) != "llama":
        return matrix
    order = np.arange(shape[0]).reshape(-1, 2, _head_dim(checkpoint) // 2).swapaxes(1, 2).reshape(-1)
    scales = matrix.scales if matrix.scales.size == 1 else matrix.scales[order]
    return TernaryMatrix(matrix.trits[order], scales)
