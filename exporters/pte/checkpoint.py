"""A model as ExecuTorch's exporter wants it: params.json and a checkpoint with the names of Meta's Llama."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import Attention, Dense, ModelSpec, TensorRef, attention_of, check_blocks, dense_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.spec import RopeSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "norm"),
        *("qk_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "norm"),
}


def params_of(file: ModelFile, spec: ModelSpec) -> dict[str, Any]:
    """The content of params.json. Raises UnsupportedModel for what the exporter has no word for."""
    if spec.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{file.path}: ExecuTorch gets {known} from here: found {spec.architecture!r}")
    check_blocks(spec.blocks(), _BLOCKS, "ExecuTorch", file.path)
    if (spec.embedding_scale, spec.residual_scale, spec.logit_scale) != (1, 1, 1) or spec.logit_soft_cap is not None:
        raise UnsupportedModel(f"{file.path}: its embeddings, layers or logits are scaled, which ExecuTorch lacks")
    first = _attention(file, spec, 0)
    for index in range(1, spec.n_layers):
        if _sizes(_attention(file, spec, index)) != _sizes(first):
            raise UnsupportedModel(f"{file.path}: heads of layer {index} are others than of layer 0: use --to gguf")
    assert first.rope is not None
    return {
        "dim": spec.n_embd,
        "n_layers": spec.n_layers,
        "n_heads": first.n_heads,
        "n_kv_heads": first.n_kv_heads,
        "head_dim": first.head_dim,
        "hidden_dim": dense_of(spec.layers[0]).n_ff,
        "vocab_size": spec.n_vocab,
        "norm_eps": spec.norm_epsilon,
        "rope_theta": _rope_theta(file, first.rope),
        "use_hf_rope": first.rope.kind == "halves",
        "use_scaled_rope": False,
        "attention_qkv_bias": first.q_bias is not None,
        "use_qk_norm": first.qk_norm is not None,
        "qk_norm_before_rope": True,
    }


def weights_of(spec: ModelSpec) -> Iterator[tuple[str, TensorRef]]:
    """Names in the checkpoint, and the tensors of the GGUF file. Tied embeddings are named twice.

    Rows of queries and keys stay in the order of the file: pairs beside each other where it rotates those, as Meta's
    own checkpoints have them, and halves with use_hf_rope.
    """
    assert spec.token_embd is not None and spec.output_norm is not None and spec.output is not None
    yield "tok_embeddings.weight", spec.token_embd
    yield "norm.weight", spec.output_norm
    yield "output.weight", spec.output
    for index, layer in enumerate(spec.layers):
        mixer, dense = attention_of(layer), dense_of(layer)
        assert isinstance(mixer, Attention)
        names = {
            "attention_norm.weight": mixer.norm,
            "attention.wq.weight": mixer.q,
            "attention.wk.weight": mixer.k,
            "attention.wv.weight": mixer.v,
            "attention.wo.weight": mixer.output,
            "attention.wq.bias": mixer.q_bias,
            "attention.wk.bias": mixer.k_bias,
            "attention.wv.bias": mixer.v_bias,
            "attention.q_norm_fn.weight": mixer.q_norm,
            "attention.k_norm_fn.weight": mixer.k_norm,
            "ffn_norm.weight": dense.norm,
            "feed_forward.w1.weight": dense.gate,
            "feed_forward.w2.weight": dense.down,
            "feed_forward.w3.weight": dense.up,
        }
        yield from ((f"layers.{index}.{name}", tensor) for name, tensor in names.items() if tensor is not None)


def _attention(file: ModelFile, spec: ModelSpec, index: int) -> Attention:
    """The attention of a layer. Raises UnsupportedModel where its sizes or scale are none of ExecuTorch's."""
    block = attention_of(spec.layers[index])
    assert isinstance(block, Attention)
    biases = {each is not None for each in (block.q_bias, block.k_bias, block.v_bias)}
    wrong = {
        "no rotation": block.rope is None,
        "rotates a part of a head": block.rope is not None and block.rope.n_dims != block.head_dim,
        f"scale {block.scale}": not math.isclose(block.scale, block.head_dim**-0.5, rel_tol=1e-5),
        "norms of all heads together": block.qk_norm == "whole",
        "a bias for some of q, k and v": len(biases) > 1,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise UnsupportedModel(f"{file.path}: layer {index} has attention with {what}, which ExecuTorch lacks")
    return block


def _sizes(block: Attention) -> tuple[object, ...]:
    return block.n_heads, block.n_kv_heads, block.head_dim, block.rope, block.q_bias is None, block.qk_norm


def _rope_theta(file: ModelFile, rope: RopeSpec) -> float:
    """The base of the frequencies. Raises UnsupportedModel where they are scaled."""
    key = f"{file.metadata['general.architecture']}.rope.freq_base"
    theta = float(file.metadata.get(key, 10000.0))  # type: ignore[arg-type]
    wanted = theta ** (-np.arange(0, rope.n_dims, 2) / rope.n_dims)
    plain = np.allclose(rope.inverse_frequencies, wanted, rtol=1e-5, atol=0)
    if not plain or rope.magnitude != 1 or rope.long is not None:
        raise UnsupportedModel(f"{file.path}: its rotary embedding is scaled, which is not written for ExecuTorch here")
    return theta
