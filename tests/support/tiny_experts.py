"""Tiny random models with experts as GGUF files, in the manner of tiny_models. llama.cpp loads them too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from late import Late
from tiny_models import (
    BLOCK_256_TYPES,
    Floats,
    Sizes,
    Value,
    add_bpe,
    add_keys,
    add_matrix,
    deviation_of,
    named_writer,
    normal,
    quantize,
    size_keys,
    type_of,
    written,
)
from written_once import written_once

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")

ExpertArchitecture = Literal[
    "qwen3moe", "olmoe", "llama", "qwen2moe", "granitemoe", "gpt-oss", "ernie4_5-moe", "glm4moe"
]
EXPERT_ARCHITECTURES: tuple[ExpertArchitecture, ...] = get_args(ExpertArchitecture)
_WHOLE_WIDTHS = ("llama", "olmoe", "granitemoe")  # whose experts are as wide as feed_forward_length says
_ROUTER_DEVIATION = 2.0  # of its products: some experts lead clearly, none takes all


@dataclass(frozen=True)
class _Recipe:
    """What an architecture has beyond attention, norms and routed experts."""

    n_layers: int = 2
    n_leading: int = 0  # layers with a dense network first
    n_shared: int = 0  # experts whose size the shared network has
    shared_router: bool = False
    selection_bias: bool = False
    biases: bool = False
    qk_norm: Literal["per_head", "whole"] | None = None  # whether queries and keys have norms, and over what
    qkv_biases: bool = False
    ffn_norm: str = "ffn_norm"  # the tensor of the network's norm
    keys: Mapping[str, Value] = field(default_factory=dict)  # further ones


_RECIPES: dict[str, _Recipe] = {
    "qwen3moe": _Recipe(qk_norm="per_head"),
    "olmoe": _Recipe(qk_norm="whole"),
    "llama": _Recipe(),
    "qwen2moe": _Recipe(n_shared=2, shared_router=True, qkv_biases=True),
    "granitemoe": _Recipe(
        n_shared=1,
        keys={"embedding_scale": 1.5, "residual_scale": 0.7, "attention.scale": 0.3, "logit_scale": 0.8},
    ),
    "gpt-oss": _Recipe(
        biases=True,
        qkv_biases=True,
        ffn_norm="post_attention_norm",
        keys={
            "attention.sliding_window": 20,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "ernie4_5-moe": _Recipe(
        n_layers=3, n_leading=1, n_shared=2, selection_bias=True, keys={"interleave_moe_layer_step": 1}
    ),
    "glm4moe": _Recipe(
        n_layers=3,
        n_leading=1,
        n_shared=1,
        selection_bias=True,
        qkv_biases=True,
        ffn_norm="post_attention_norm",
        keys={"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.8},
    ),
}


@dataclass(frozen=True)
class _ExpertSizes(Sizes):
    """n_ff: of dense layers."""

    n_experts: int = 8
    n_used: int = 3
    n_ff_expert: int = 64  # of one expert


@written_once
def write_tiny_experts(
    path: Path,
    architecture: ExpertArchitecture = "qwen3moe",
    tensor_type: str = "Q4_K",
    *,
    n_embd: int | None = None,
    n_layers: int | None = None,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    n_ff: int | None = None,
    n_experts: int = 8,
    n_used: int = 3,
    n_vocab: int = 291,
    n_ctx_train: int = 512,
    types: Mapping[str, str] | None = None,
    fused: bool = False,
    scales: bool = False,
    qk_norms: bool = False,
    twins: tuple[int, int] | None = None,
    metadata: Mapping[str, Value | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model and give back its path. What is not said here is as in tiny_models.write_tiny_model.

    n_kv_heads: 2, but n_heads in olmoe, where llama.cpp needs as many keys as queries.  n_ff: of one expert, 256 where
    there are blocks of 256, else 64; twice that in a dense layer.  types: of matrices, by role ("ffn_down_exps") or
    whole name.  fused: gate and up are one tensor, of the same numbers.  scales: with a factor for each expert on its
    products.  qk_norms: with norms of queries and keys, which are optional in glm4moe.  twins: two experts with the
    same row in every router, so that they tie for every token.
    """
    is_wide = not {tensor_type, *(types or {}).values()}.isdisjoint(BLOCK_256_TYPES)
    n_embd, n_ff, recipe = n_embd or (256 if is_wide else 96), n_ff or (256 if is_wide else 64), _RECIPES[architecture]
    recipe = replace(recipe, qk_norm="per_head") if qk_norms else recipe
    n_kv_heads = n_kv_heads or (n_heads if architecture == "olmoe" else 2)
    n_dense = n_ff if architecture in _WHOLE_WIDTHS else 2 * n_ff
    heads = n_heads, n_kv_heads, head_dim or n_embd // n_heads
    sizes = _ExpertSizes(n_embd, n_layers or recipe.n_layers, *heads, n_dense, n_vocab, n_experts, n_used, n_ff)
    writer = named_writer(path, architecture, tensor_type)
    keys = {"context_length": n_ctx_train, "rope.freq_base": 10000.0, **_keys(sizes, recipe), **recipe.keys}
    add_keys(writer, {f"{architecture}.{key}": value for key, value in keys.items()} | dict(metadata or {}))
    add_bpe(writer, n_vocab)
    _add_matrices(writer, recipe, sizes, tensor_type, types or {}, fused, twins, seed)
    _add_vectors(writer, recipe, sizes, fused, scales, seed)
    return written(writer, path)


def _keys(sizes: _ExpertSizes, recipe: _Recipe) -> dict[str, Value]:
    keys = size_keys(sizes) | {
        "expert_count": sizes.n_experts,
        "expert_used_count": sizes.n_used,
        "expert_feed_forward_length": sizes.n_ff_expert,
    }
    if recipe.n_shared:
        keys["expert_shared_count"] = recipe.n_shared
        keys["expert_shared_feed_forward_length"] = recipe.n_shared * sizes.n_ff_expert
    if recipe.n_leading:
        keys["leading_dense_block_count"] = recipe.n_leading
    return keys


def _add_matrices(
    writer: gguf.GGUFWriter,
    recipe: _Recipe,
    sizes: _ExpertSizes,
    tensor_type: str,
    types: Mapping[str, str],
    fused: bool,
    twins: tuple[int, int] | None,
    seed: int,
) -> None:
    """Add embeddings, attention, routers, and networks; see write_tiny_experts."""
    for name, shape in _matrices(recipe, sizes, fused):
        role, kind = name.rpartition(".")[2], type_of(name, tensor_type, types)
        if role == "ffn_gate_inp":
            router = normal(seed, name, shape) * np.float32(_ROUTER_DEVIATION / math.sqrt(sizes.n_embd))
            if twins is not None:
                router[twins[1]] = router[twins[0]]
            writer.add_tensor(f"{name}.weight", router)
        elif len(shape) == 3:
            add_experts(writer, f"{name}.weight", kind, _of_all(seed, name, shape) / np.float32(math.sqrt(shape[2])))
        else:
            deviation = deviation_of(name, shape[1], tied=False)
            add_matrix(writer, f"{name}.weight", kind, normal(seed, name, shape) * np.float32(deviation))


def _matrices(recipe: _Recipe, sizes: _ExpertSizes, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name without `.weight`, and shape."""
    n_embd, n_ff, n = sizes.n_embd, sizes.n_ff_expert, sizes.n_experts
    yield "token_embd", (sizes.n_vocab, n_embd)
    yield "output", (sizes.n_vocab, n_embd)
    for layer in range(sizes.n_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_q": (sizes.n_q, n_embd),
            "attn_k": (sizes.n_kv, n_embd),
            "attn_v": (sizes.n_kv, n_embd),
            "attn_output": (n_embd, sizes.n_q),
        }
        if layer < recipe.n_leading:
            of_layer |= _network("", sizes.n_ff, n_embd)
        else:
            of_layer |= {"ffn_gate_inp": (n, n_embd), "ffn_down_exps": (n, n_embd, n_ff)}
            if fused:
                of_layer |= {"ffn_gate_up_exps": (n, 2 * n_ff, n_embd)}
            else:
                of_layer |= {"ffn_gate_exps": (n, n_ff, n_embd), "ffn_up_exps": (n, n_ff, n_embd)}
            if recipe.n_shared:
                of_layer |= _network("_shexp", recipe.n_shared * n_ff, n_embd)
        yield from ((f"blk.{layer}.{role}", shape) for role, shape in of_layer.items())


def _network(ending: str, n_ff: int, n_embd: int) -> dict[str, tuple[int, ...]]:
    return {
        f"ffn_gate{ending}": (n_ff, n_embd),
        f"ffn_up{ending}": (n_ff, n_embd),
        f"ffn_down{ending}": (n_embd, n_ff),
    }


def _add_vectors(
    writer: gguf.GGUFWriter, recipe: _Recipe, sizes: _ExpertSizes, fused: bool, scales: bool, seed: int
) -> None:
    """Add norms, biases, scales and sinks, all in F32."""
    output_norm = normal(seed, "output_norm.weight", (sizes.n_embd,))
    writer.add_tensor("output_norm.weight", np.float32(1) + np.float32(0.2) * output_norm)
    for layer in range(sizes.n_layers):
        shapes = _of_attention(recipe, sizes)
        if layer >= recipe.n_leading:
            shapes |= _of_experts(recipe, sizes, fused, scales)
        for role, shape in shapes.items():
            name = f"blk.{layer}.{role}"
            if layer == 1 and role in ("ffn_gate_inp_shexp.weight", "exp_probs_b.bias"):
                shape = (1, *shape)  # as checkpoints have them; llama.cpp's quantiser makes them vectors
            centre = 1.0 if role.endswith(("norm.weight", ".scale")) else 0.0
            writer.add_tensor(name, np.float32(centre) + np.float32(0.2) * _of_all(seed, name, shape))


def _of_attention(recipe: _Recipe, sizes: _ExpertSizes) -> dict[str, tuple[int, ...]]:
    """Shapes of the vectors of a layer, without those of experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (sizes.n_embd,),
        f"{recipe.ffn_norm}.weight": (sizes.n_embd,),
    }
    if recipe.qk_norm is not None:
        is_whole = recipe.qk_norm == "whole"
        shapes["attn_q_norm.weight"] = (sizes.n_q if is_whole else sizes.head_dim,)
        shapes["attn_k_norm.weight"] = (sizes.n_kv if is_whole else sizes.head_dim,)
    if recipe.qkv_biases:
        shapes |= {"attn_q.bias": (sizes.n_q,), "attn_k.bias": (sizes.n_kv,), "attn_v.bias": (sizes.n_kv,)}
    if recipe.biases:
        shapes |= {"attn_output.bias": (sizes.n_embd,), "attn_sinks.weight": (sizes.n_heads,)}
    return shapes


def _of_experts(recipe: _Recipe, sizes: _ExpertSizes, fused: bool, scales: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the vectors of the experts of a layer."""
    n, n_ff = sizes.n_experts, sizes.n_ff_expert
    rows = {"ffn_gate_up_exps": 2 * n_ff} if fused else {"ffn_gate_exps": n_ff, "ffn_up_exps": n_ff}
    rows |= {"ffn_down_exps": sizes.n_embd}
    shapes: dict[str, tuple[int, ...]] = {}
    if recipe.biases:
        shapes |= {"ffn_gate_inp.bias": (n,)} | {f"{name}.bias": (n, n_out) for name, n_out in rows.items()}
    if scales:
        shapes |= {f"{name}.scale": (n,) for name in rows}
    if recipe.selection_bias:
        shapes |= {"exp_probs_b.bias": (n,)}
    if recipe.shared_router:
        shapes |= {"ffn_gate_inp_shexp.weight": (sizes.n_embd,)}
    return shapes


def _of_all(seed: int, name: str, shape: tuple[int, ...]) -> Floats:
    """Normal deviates; those of a tensor of gate and up are what the two would have apart."""
    if "gate_up" not in name or name.endswith(".scale"):
        return normal(seed, name, shape)
    n_experts, n_rows, *n_in = shape
    apart = (normal(seed, name.replace("gate_up", role), (n_experts, n_rows // 2, *n_in)) for role in ("gate", "up"))
    return np.concatenate(list(apart), axis=1)


def add_experts(writer: gguf.GGUFWriter, name: str, tensor_type: str, weights: Floats) -> None:
    """Add the matrices of all experts, (n_experts, n_out, n_in)."""
    if tensor_type in ("F32", "F16"):
        writer.add_tensor(name, weights.astype(np.dtype({"F32": np.float32, "F16": np.float16}[tensor_type])))
        return
    data = quantize(tensor_type, weights.reshape(-1, weights.shape[2])).reshape(*weights.shape[:2], -1)
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[tensor_type])
