"""Shapes of models with latent attention, for make_hybrids.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from make_experts import Tensor


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a model, as models/spec.py names them."""

    arch: str
    layers: int
    n_embd: int
    n_ff: int  # of a dense network
    n_heads: int
    n_plain: int
    n_turned: int
    n_latent: int
    n_value: int
    n_q_latent: int
    experts: int
    top_k: int
    n_ff_expert: int
    n_dense: int = 1  # layers with a dense network before those with experts


LATENT_SHAPES = {
    "glm-4.7-flash": LatentShape("deepseek2", 47, 2048, 10240, 20, 192, 64, 512, 256, 768, 64, 4, 1536),
}


def latent_tensors(shape: LatentShape, n_vocab: int) -> list[Tensor]:
    """All of a model, in the order of the file."""
    return [
        Tensor("token_embd.weight", (n_vocab, shape.n_embd), "q4_k", 1.0),
        Tensor("output.weight", (n_vocab, shape.n_embd), "q6_k", shape.n_embd**-0.5),
        *(tensor for layer in range(shape.layers) for tensor in _layer(shape, layer)),
        Tensor("output_norm.weight", (shape.n_embd,), "ones"),
    ]


def _layer(shape: LatentShape, layer: int) -> Iterator[Tensor]:
    block, d = f"blk.{layer}.", shape.n_embd
    norms = {"attn_norm": d, "ffn_norm": d, "attn_q_a_norm": shape.n_q_latent, "attn_kv_a_norm": shape.n_latent}
    named = [Tensor(name, (n,), "ones") for name, n in norms.items()]
    named += [*_attention(shape), *(_experts(shape) if layer >= shape.n_dense else _network("", d, shape.n_ff))]
    yield from (replace(each, name=f"{block}{each.name}.weight") for each in named)
    if layer >= shape.n_dense:
        yield Tensor(f"{block}exp_probs_b.bias", (shape.experts,), "f32", 0.1)


def _attention(shape: LatentShape) -> Iterator[Tensor]:
    n, d = shape.n_heads, shape.n_embd
    yield _matrix("attn_q_a", shape.n_q_latent, d)
    yield _matrix("attn_q_b", n * (shape.n_plain + shape.n_turned), shape.n_q_latent)
    yield _matrix("attn_kv_a_mqa", shape.n_latent + shape.n_turned, d)
    yield Tensor("attn_k_b", (n, shape.n_latent, shape.n_plain), "q8_0", shape.n_plain**-0.5)  # rows of 192
    yield Tensor("attn_v_b", (n, shape.n_value, shape.n_latent), "q4_k", shape.n_latent**-0.5)
    yield _matrix("attn_output", d, n * shape.n_value, 0.3)


def _experts(shape: LatentShape) -> Iterator[Tensor]:
    d, n, n_ff = shape.n_embd, shape.experts, shape.n_ff_expert
    yield Tensor("ffn_gate_inp", (n, d), "f32", 1.5 * d**-0.5)
    for role in ("gate", "up"):
        yield Tensor(f"ffn_{role}_exps", (n, n_ff, d), "q4_k", d**-0.5)
    yield Tensor("ffn_down_exps", (n, d, n_ff), "q4_k", 1.5 * n_ff**-0.5)
    yield from _network("_shexp", d, n_ff)


def _matrix(name: str, n_out: int, n_in: int, size: float = 1.0) -> Tensor:
    return Tensor(name, (n_out, n_in), "q4_k", size * n_in**-0.5)


def _network(ending: str, d: int, n_ff: int) -> Iterator[Tensor]:
    yield _matrix(f"ffn_gate{ending}", n_ff, d)
    yield _matrix(f"ffn_up{ending}", n_ff, d)
    yield _matrix(f"ffn_down{ending}", d, n_ff, 0.5)


def latent_keys(shape: LatentShape) -> dict[str, int | float | bool]:
    """Metadata, without the architecture in front."""
    return {
        "block_count": shape.layers,
        "context_length": 32768,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": shape.n_latent + shape.n_turned,
        "attention.value_length": shape.n_latent,
        "attention.key_length_mla": shape.n_plain + shape.n_turned,
        "attention.value_length_mla": shape.n_value,
        "attention.kv_lora_rank": shape.n_latent,
        "attention.q_lora_rank": shape.n_q_latent,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.n_turned,
        "rope.freq_base": 1e6,
        "leading_dense_block_count": shape.n_dense,
        "expert_count": shape.experts,
        "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.n_ff_expert,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.8,
    }
