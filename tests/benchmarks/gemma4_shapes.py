"""Shapes of Gemma 4 for make_hybrids.py: tensors and keys of models with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from make_experts import Tensor


@dataclass(frozen=True)
class Gemma4Shape:
    """Sizes of a model. period: the layers of which the last one sees everything. Pairs: with a window, and without."""

    layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: tuple[int, int]
    window: int
    period: int
    n_inputs: int = 0  # numbers that each layer has of its own for a token
    shared: float = 0.0  # share of the layers, the last ones, that read the keys of others
    wide: bool = False  # whether these have networks of twice the width
    experts: int = 0
    top_k: int = 0
    n_ff_expert: int = 0
    arch: str = "gemma4"
    head_dim: tuple[int, int] = (256, 512)

    @property
    def n_shared(self) -> int:
        """With both kinds of layers before them."""
        return max(0, min(round(self.layers * self.shared), self.layers - self.period))

    def sees_all(self, layer: int) -> bool:
        return layer % self.period == self.period - 1 or layer == self.layers - 1

    def has_keys(self, layer: int) -> bool:
        return layer < self.layers - self.n_shared


SHAPES = {
    "gemma4-e2b": Gemma4Shape(35, 1536, 6144, 8, (1, 1), 512, 5, n_inputs=256, shared=20 / 35, wide=True),
    "gemma4-e4b": Gemma4Shape(42, 2560, 10240, 8, (2, 2), 512, 6, n_inputs=256, shared=18 / 42),
    "gemma4-26b-a4b": Gemma4Shape(*(30, 2816, 2112, 16, (8, 2), 1024, 6), experts=128, top_k=8, n_ff_expert=704),
}


@dataclass(frozen=True)
class Factors(Tensor):
    """What frequencies of large heads are divided by: a quarter of the pairs turns."""

    def make(self) -> np.ndarray:
        n = self.shape[0]
        return np.where(np.arange(n) < n // 4, 1, 1e30).astype(np.float32)


def model_tensors(shape: Gemma4Shape, n_vocab: int) -> list[Tensor]:
    """All of a model, in the order of the file."""
    d, n_all = shape.n_embd, shape.layers * shape.n_inputs
    inputs = [
        Tensor("per_layer_token_embd.weight", (n_vocab, n_all), "q6_k", 1.0),
        Tensor("per_layer_model_proj.weight", (n_all, d), "f16", d**-0.5),
        Tensor("per_layer_proj_norm.weight", (shape.n_inputs,), "ones"),
    ]
    return [
        Tensor("token_embd.weight", (n_vocab, d), "q6_k", d**-0.5),
        *(inputs if shape.n_inputs else []),
        *(
            replace(tensor, name=f"blk.{layer}.{tensor.name}")
            for layer in range(shape.layers)
            for tensor in layer_tensors(shape, layer)
        ),
        Tensor("output_norm.weight", (d,), "ones"),
        Factors("rope_freqs.weight", (shape.head_dim[1] // 2,), "f32"),
    ]


def layer_tensors(shape: Gemma4Shape, layer: int) -> Iterator[Tensor]:
    """Of one layer."""
    d, sees_all = shape.n_embd, shape.sees_all(layer)
    head_dim, n_kv = shape.head_dim[sees_all], shape.n_kv_heads[sees_all] * shape.head_dim[sees_all]
    n_q = shape.n_heads * head_dim
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        yield Tensor(f"{name}.weight", (d,), "ones")
    yield matrix("attn_q", n_q, d)
    yield Tensor("attn_q_norm.weight", (head_dim,), "ones")
    yield matrix("attn_output", d, n_q)
    if shape.has_keys(layer):
        yield matrix("attn_k", n_kv, d)
        yield Tensor("attn_k_norm.weight", (head_dim,), "ones")
        if shape.n_inputs or not sees_all:
            yield matrix("attn_v", n_kv, d)
    n_ff = shape.n_ff * (1 + (shape.wide and not shape.has_keys(layer)))
    yield from (matrix("ffn_gate", n_ff, d), matrix("ffn_up", n_ff, d), matrix("ffn_down", d, n_ff))
    yield Tensor("layer_output_scale.weight", (1,), "ones")
    if shape.n_inputs:
        yield from (matrix("inp_gate", shape.n_inputs, d), matrix("proj", d, shape.n_inputs))
        yield Tensor("post_norm.weight", (d,), "ones")
    if shape.experts:
        yield from expert_tensors(shape)


def expert_tensors(shape: Gemma4Shape) -> Iterator[Tensor]:
    """Of the experts of a layer, beside its network."""
    d, n, n_ff = shape.n_embd, shape.experts, shape.n_ff_expert
    for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        yield Tensor(f"{name}.weight", (d,), "ones")
    yield Tensor("ffn_gate_inp.weight", (n, d), "f32", 1.5)  # its input is divided by the root of d
    yield Tensor("ffn_gate_inp.scale", (d,), "ones")
    yield Tensor("ffn_down_exps.scale", (n,), "ones")
    yield Tensor("ffn_gate_up_exps.weight", (n, 2 * n_ff, d), "q4_k", d**-0.5)
    yield Tensor("ffn_down_exps.weight", (n, d, n_ff), format_of(n_ff), n_ff**-0.5)


def matrix(name: str, n_out: int, n_in: int) -> Tensor:
    return Tensor(f"{name}.weight", (n_out, n_in), format_of(n_in), n_in**-0.5)


def format_of(n_in: int) -> str:
    """Rows of the network of 26B-A4B are no whole blocks of 256."""
    return "q8_0" if n_in % 256 else "q4_k"


def keys_of(shape: Gemma4Shape) -> Iterator[tuple[str, int | float | list[int] | list[bool]]]:
    """Metadata, without the architecture in front."""
    layers = range(shape.layers)
    yield from [
        ("block_count", shape.layers),
        ("context_length", 32768),
        ("embedding_length", shape.n_embd),
        ("attention.head_count", shape.n_heads),
        ("attention.head_count_kv", [shape.n_kv_heads[shape.sees_all(layer)] for layer in layers]),
        ("attention.layer_norm_rms_epsilon", 1e-6),
        ("attention.sliding_window", shape.window),
        ("attention.sliding_window_pattern", [not shape.sees_all(layer) for layer in layers]),
        ("attention.shared_kv_layers", shape.n_shared),
        ("feed_forward_length", [shape.n_ff * (1 + (shape.wide and not shape.has_keys(layer))) for layer in layers]),
        ("rope.freq_base", 1e6),
        ("rope.freq_base_swa", 1e4),
        ("final_logit_softcapping", 30.0),
        ("embedding_length_per_layer_input", shape.n_inputs),
    ]
    for ending, head_dim in zip(("_swa", ""), shape.head_dim, strict=True):
        yield from ((f"{key}{ending}", head_dim) for key in ("attention.key_length", "attention.value_length"))
        yield f"rope.dimension_count{ending}", head_dim
    if shape.experts:
        yield from [
            ("expert_count", shape.experts),
            ("expert_used_count", shape.top_k),
            ("expert_feed_forward_length", shape.n_ff_expert),
        ]
