"""Random models with recurrent layers, latent attention, and of Gemma 4, for benchmarks: of the shapes of released
ones, or of fewer layers.

    python tests/benchmarks/make_hybrids.py OUT.gguf --like qwen3.5-0.8b
    python tests/benchmarks/make_hybrids.py OUT.gguf --like qwen3.6-35b-a3b --layers 8

--like names the sizes: `qwen3.5-0.8b` and `qwen3.5-4b` are dense with gated delta nets, `qwen3.6-35b-a3b` has experts,
`lfm2-8b-a1b` short convolutions and experts; their weights take 0.3, 2.2, 19 and 4.8 GB. `granite-4-h-tiny` and
`nemotron-3-nano` have Mamba2 and experts, the latter without gates and in blocks of one branch; 4 and 20 GB.
`glm-4.7-flash` has latent attention and experts (latent_shapes.py), and takes 17 GB. `gemma4-e2b`, `gemma4-e4b` and
`gemma4-26b-a4b` are in gemma4_shapes.py; their matrices with short rows are in Q8_0. The sizes are those of the
released configurations, the vocabulary that of --vocabulary, by default of the default model, and smaller than theirs.
Weights are random, of mean zero, in Q4_K and, in the output matrix, Q6_K, or where rows are no multiple of 256 in Q5_0
and Q8_0; the same flags give the same bytes. So the figures of passes are those of the shapes, but the texts say
nothing. It writes tensor by tensor. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import gemma4_shapes
import numpy as np
from gemma4_shapes import Gemma4Shape
from latent_shapes import LATENT_SHAPES, LatentShape, latent_keys, latent_tensors
from make_experts import Late, Tensor, add_vocabulary

from edgeinfer.loading.open import default_model

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")


@dataclass(frozen=True)
class HybridShape:
    """Sizes of a model. period: the layers of which one has attention, the one that is `attention_at` in it."""

    arch: str
    layers: int
    n_embd: int
    n_ff: int  # of a dense network
    n_heads: int
    n_kv_heads: int
    head_dim: int
    period: int = 4
    attention_at: int = 3
    n_key_heads: int = 0
    n_value_heads: int = 0
    n_state: int = 128
    n_conv: int = 4
    experts: int = 0
    top_k: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    n_dense: int = 0  # layers with a dense network before those with experts
    pattern: str = ""  # of Nemotron: M, E and * for each block; of Granite M and *
    n_per_head: int = 64  # numbers of v of a head of Mamba2

    @property
    def is_lfm2(self) -> bool:
        return self.arch.startswith("lfm2")

    @property
    def is_mamba(self) -> bool:
        return bool(self.pattern)

    @property
    def is_nemotron(self) -> bool:
        return self.arch.startswith("nemotron")

    def kind(self, layer: int) -> str:
        """Of a block of a model with Mamba2."""
        return self.pattern[layer % len(self.pattern)]

    @property
    def n_v(self) -> int:
        return self.n_value_heads * (self.n_per_head if self.is_mamba else self.n_state)

    @property
    def n_channels(self) -> int:
        return 2 * self.n_key_heads * self.n_state + self.n_v

    def has_attention(self, layer: int) -> bool:
        if self.is_mamba:
            return self.kind(layer) == "*"
        return layer % self.period == self.attention_at

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.n_dense


SHAPES: dict[str, HybridShape | Gemma4Shape] = {
    **gemma4_shapes.SHAPES,
    "qwen3.5-0.8b": HybridShape("qwen35", 24, 1024, 3584, 8, 2, 256, n_key_heads=16, n_value_heads=16),
    "qwen3.5-4b": HybridShape("qwen35", 32, 2560, 9216, 16, 4, 256, n_key_heads=16, n_value_heads=32),
    "qwen3.6-35b-a3b": HybridShape(
        *("qwen35moe", 40, 2048, 0, 16, 2, 256),
        n_key_heads=16,
        n_value_heads=32,
        experts=256,
        top_k=8,
        n_ff_expert=512,
        n_ff_shared=512,
    ),
    "lfm2-8b-a1b": HybridShape(
        *("lfm2moe", 24, 2048, 7168, 32, 8, 64),
        attention_at=2,
        n_conv=3,
        experts=32,
        top_k=4,
        n_ff_expert=1792,
        n_dense=2,
    ),
    "granite-4-h-tiny": HybridShape(
        *("granitehybrid", 40, 1536, 512, 12, 4, 128),
        n_key_heads=1,
        n_value_heads=48,
        experts=64,
        top_k=6,
        n_ff_expert=512,
        n_ff_shared=1024,
        pattern="MMMMM*MMMMMMMMM*MMMMMMMMM*MMMMMMMMM*MMMM",
    ),
    "nemotron-3-nano": HybridShape(
        *("nemotron_h_moe", 52, 2688, 1856, 32, 2, 128),
        n_key_heads=8,
        n_value_heads=64,
        experts=128,
        top_k=6,
        n_ff_expert=1856,
        n_ff_shared=3712,
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
}
ALL_SHAPES: dict[str, HybridShape | Gemma4Shape | LatentShape] = {**SHAPES, **LATENT_SHAPES}


# ---- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decay(Tensor):
    """What the steps of a head are multiplied by: below 0, mostly between -0.1 and -0.5."""

    def make(self) -> np.ndarray:
        return -np.exp(super().make() - np.float32(1.5))


def mixer_tensors(shape: HybridShape, layer: int) -> Iterator[Tensor]:
    d, n = shape.n_embd, shape.n_value_heads
    if shape.is_mamba and shape.kind(layer) != "*":
        if shape.kind(layer) == "M":
            yield matrix("ssm_in", shape.n_v + shape.n_channels + n, d)
            yield Tensor("ssm_conv1d", (shape.n_channels, shape.n_conv), "f32", 0.5)
            n_groups = shape.n_key_heads
            yield Tensor("ssm_norm", (n_groups, shape.n_v // n_groups) if n_groups > 1 else (shape.n_v,), "ones")
            yield matrix("ssm_out", d, shape.n_v, 0.3)
    elif shape.has_attention(layer):
        n_q, n_kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        yield matrix("attn_q", n_q if shape.is_lfm2 or shape.is_mamba else 2 * n_q, d)
        yield matrix("attn_k", n_kv, d)
        yield matrix("attn_v", n_kv, d)
        yield matrix("attn_output", d, n_q, 0.3)
        for name in () if shape.is_mamba else ("attn_q_norm", "attn_k_norm"):
            yield Tensor(name, (shape.head_dim,), "ones")
    elif shape.is_lfm2:
        yield matrix("shortconv.in_proj", 3 * d, d)
        yield Tensor("shortconv.conv", (d, shape.n_conv), "f32", 0.5)
        yield matrix("shortconv.out_proj", d, d, 0.3)
    else:
        yield matrix("attn_qkv", shape.n_channels, d)
        yield matrix("attn_gate", shape.n_v, d)
        yield Tensor("ssm_beta", (n, d), "q8_0", d**-0.5)
        yield Tensor("ssm_alpha", (n, d), "q8_0", d**-0.5)
        yield Tensor("ssm_conv1d", (shape.n_channels, shape.n_conv), "f32", 0.5)
        yield Tensor("ssm_norm", (shape.n_state,), "ones")
        yield matrix("ssm_out", d, shape.n_v, 0.3)


def network_tensors(shape: HybridShape, layer: int) -> Iterator[Tensor]:
    d, n = shape.n_embd, shape.experts
    if shape.is_nemotron and shape.kind(layer) != "E":
        return
    if not shape.has_experts(layer):
        return (yield from network("", d, shape.n_ff))
    yield Tensor("ffn_gate_inp", (n, d), "f32", 1.5 * d**-0.5)
    for role in ("up",) if shape.is_nemotron else ("gate", "up"):
        yield Tensor(f"ffn_{role}_exps", (n, shape.n_ff_expert, d), format_of(d), d**-0.5)
    width = shape.n_ff_expert
    yield Tensor("ffn_down_exps", (n, d, width), format_of(width), 1.5 * width**-0.5)
    if shape.n_ff_shared:
        shared = network("_shexp", d, shape.n_ff_shared)
        yield from (each for each in shared if not (shape.is_nemotron and "gate" in each.name))
    if shape.n_ff_shared and not shape.is_mamba:
        yield Tensor("ffn_gate_inp_shexp", (d,), "f32", d**-0.5)


def matrix(name: str, n_out: int, n_in: int, size: float = 1.0) -> Tensor:
    """size: what it makes of numbers of size 1."""
    return Tensor(name, (n_out, n_in), format_of(n_in), size * n_in**-0.5)


def format_of(n_in: int) -> str:
    """As llama-quantize has it where a row is no multiple of 256."""
    return "q5_0" if n_in % 256 else "q4_k"


def network(ending: str, d: int, ff: int) -> Iterator[Tensor]:
    yield matrix(f"ffn_gate{ending}", ff, d)
    yield matrix(f"ffn_up{ending}", ff, d)
    yield matrix(f"ffn_down{ending}", d, ff, 0.5)


def layer_tensors(shape: HybridShape, layer: int) -> Iterator[Tensor]:
    """Of one layer."""
    block, d = f"blk.{layer}.", shape.n_embd
    second_norm = "ffn_norm" if shape.is_lfm2 or shape.is_mamba else "post_attention_norm"
    named = [Tensor("attn_norm", (d,), "ones"), *mixer_tensors(shape, layer)]
    named += [] if shape.is_nemotron else [Tensor(second_norm, (d,), "ones")]
    yield from (replace(each, name=f"{block}{each.name}.weight") for each in (*named, *network_tensors(shape, layer)))
    if shape.is_mamba:
        yield from mamba_vectors(shape, layer)
    elif not shape.is_lfm2 and not shape.has_attention(layer):
        yield Decay(f"{block}ssm_a", (shape.n_value_heads,), "f32")
        yield Tensor(f"{block}ssm_dt.bias", (shape.n_value_heads,), "f32")
    if shape.is_lfm2 and shape.has_experts(layer):
        yield Tensor(f"{block}exp_probs_b.bias", (shape.experts,), "f32", 0.1)


def mamba_vectors(shape: HybridShape, layer: int) -> Iterator[Tensor]:
    """Of a block of a model with Mamba2, by whole name."""
    block, n = f"blk.{layer}.", shape.n_value_heads
    if shape.kind(layer) == "M":
        yield Decay(f"{block}ssm_a", (n, 1), "f32")
        yield Tensor(f"{block}ssm_d", (n, 1), "f32")
        yield Tensor(f"{block}ssm_dt.bias", (n,), "f32")
        yield Tensor(f"{block}ssm_conv1d.bias", (shape.n_channels,), "f32", 0.2)
    if shape.kind(layer) == "E":
        yield Tensor(f"{block}exp_probs_b.bias", (shape.experts,), "f32", 0.1)


def model_tensors(shape: HybridShape | Gemma4Shape | LatentShape, n_vocab: int) -> list[Tensor]:
    """All of a model, in the order of the file. Embeddings of hybrids are the output matrix, as in the smaller ones."""
    if isinstance(shape, Gemma4Shape):
        return gemma4_shapes.model_tensors(shape, n_vocab)
    if isinstance(shape, LatentShape):
        return latent_tensors(shape, n_vocab)
    norm = "token_embd_norm" if shape.is_lfm2 else "output_norm"
    return [
        Tensor("token_embd.weight", (n_vocab, shape.n_embd), "q8_0" if shape.n_embd % 256 else "q6_k", 1.0),
        *(tensor for layer in range(shape.layers) for tensor in layer_tensors(shape, layer)),
        Tensor(f"{norm}.weight", (shape.n_embd,), "ones"),
    ]


# ---- the file --------------------------------------------------------------------------------------------------------


def keys_of(shape: HybridShape | LatentShape) -> Iterator[tuple[str, int | float | bool | list[int]]]:
    """Metadata, without the architecture in front."""
    if isinstance(shape, LatentShape):
        return (yield from latent_keys(shape).items())
    yield from [
        ("block_count", shape.layers),
        ("context_length", 32768),
        ("embedding_length", shape.n_embd),
        ("attention.head_count", shape.n_heads),
        ("attention.layer_norm_rms_epsilon", 1e-5 if shape.is_lfm2 else 1e-6),
        ("rope.freq_base", 1e6 if shape.is_lfm2 else 1e7),
    ]
    if shape.is_mamba:
        yield from mamba_keys(shape)
    elif shape.n_ff:
        yield "feed_forward_length", shape.n_ff
    if shape.is_lfm2:
        yield "attention.head_count_kv", [shape.n_kv_heads * shape.has_attention(i) for i in range(shape.layers)]
        yield "shortconv.l_cache", shape.n_conv
        yield "vocab_size", 0
    elif not shape.is_mamba:
        quarter = shape.head_dim // 4
        yield from [
            ("attention.head_count_kv", shape.n_kv_heads),
            ("attention.key_length", shape.head_dim),
            ("attention.value_length", shape.head_dim),
            ("full_attention_interval", shape.period),
            ("rope.dimension_count", quarter),
            ("rope.dimension_sections", [11, 11, quarter // 2 - 22, 0]),
            ("ssm.conv_kernel", shape.n_conv),
            ("ssm.state_size", shape.n_state),
            ("ssm.group_count", shape.n_key_heads),
            ("ssm.time_step_rank", shape.n_value_heads),
            ("ssm.inner_size", shape.n_v),
        ]
    if shape.experts:
        yield from [
            ("expert_count", shape.experts),
            ("expert_used_count", shape.top_k),
            ("expert_feed_forward_length", shape.n_ff_expert),
        ]
        if shape.n_ff_shared:
            yield "expert_shared_feed_forward_length", shape.n_ff_shared
        if shape.is_lfm2:
            yield "leading_dense_block_count", shape.n_dense
            yield "expert_gating_func", 2


def mamba_keys(shape: HybridShape) -> Iterator[tuple[str, int | float | list[int]]]:
    """Those of a model with Mamba2."""
    blocks = range(shape.layers)
    yield from [
        ("attention.head_count_kv", [shape.n_kv_heads * shape.has_attention(i) for i in blocks]),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("ssm.conv_kernel", shape.n_conv),
        ("ssm.state_size", shape.n_state),
        ("ssm.group_count", shape.n_key_heads),
        ("ssm.time_step_rank", shape.n_value_heads),
        ("ssm.inner_size", shape.n_v),
    ]
    if shape.is_nemotron:
        yield "feed_forward_length", [shape.n_ff_expert * (shape.kind(i) == "E") for i in blocks]
        yield "attention.layer_norm_epsilon", 1e-5
        yield "expert_weights_scale", 2.5
        yield "expert_weights_norm", True
    else:
        yield "feed_forward_length", shape.n_ff
        yield "rope.scaling.finetuned", False
        yield from [("embedding_scale", 12.0), ("residual_scale", 0.22), ("logit_scale", 6.0)]
        yield "attention.scale", 1 / shape.head_dim


def write_model(path: Path, shape: HybridShape | Gemma4Shape | LatentShape, vocabulary: Path) -> int:
    """Bytes of the file."""
    source = gguf.GGUFReader(vocabulary)
    n_vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    tensors = model_tensors(shape, n_vocab)
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"random {shape.arch}, {shape.layers} layers")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    for key, value in gemma4_shapes.keys_of(shape) if isinstance(shape, Gemma4Shape) else keys_of(shape):
        name = f"{shape.arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, n_vocab if key == "vocab_size" else value)
    add_vocabulary(writer, source)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
    writer.close()
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--like", choices=ALL_SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="fewer, or more, than the model has")
    parser.add_argument("--vocabulary", type=Path, help="a model whose tokenizer is taken")
    arguments = parser.parse_args()
    shape = ALL_SHAPES[arguments.like]
    shape = shape if arguments.layers is None else replace(shape, layers=arguments.layers)
    n_bytes = write_model(arguments.out, shape, arguments.vocabulary or default_model())
    n_weights = sum(math.prod(tensor.shape) for tensor in model_tensors(shape, 0))
    print(json.dumps({"shape": asdict(shape), "weights_in_layers": n_weights, "bytes": n_bytes}))


if __name__ == "__main__":
    main()
