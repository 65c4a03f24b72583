"""Tiny random models with latent attention as GGUF files, in the manner of tiny_models. llama.cpp loads them too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from late import Late
from tiny_experts import add_experts
from tiny_models import (
    BLOCK_256_TYPES,
    CHATML,
    Floats,
    Value,
    add_bpe,
    add_keys,
    add_matrix,
    deviation_of,
    named_writer,
    normal,
    type_of,
    written,
)
from written_once import written_once

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")

# The kinds of its models: V2-Lite, with queries of one matrix, YaRN and softmax routers; V3, with groups of experts;
# GLM-4.7-Flash, with a block that drafts.
LatentKind = Literal["lite", "v3", "glm"]
LATENT_KINDS: tuple[LatentKind, ...] = get_args(LatentKind)
LATENT_ARCHITECTURES = ("deepseek2",)
_ROUTER_DEVIATION = 2.0  # of its products: some experts lead clearly
_SIGMOID: dict[str, Value] = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.8}
_KEYS: dict[str, dict[str, Value]] = {
    "lite": {
        **{"expert_gating_func": 1, "expert_weights_norm": False, "rope.scaling.type": "yarn"},
        **{"rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32},
        "rope.scaling.yarn_log_multiplier": 0.0707,
    },
    "v3": {**_SIGMOID, "expert_group_count": 4, "expert_group_used_count": 2},
    "glm": {**_SIGMOID, "expert_group_count": 1, "expert_group_used_count": 1},
}


@dataclass(frozen=True)
class LatentSizes:
    """As LatentAttention and Experts name them."""

    n_embd: int
    n_ff: int
    n_plain: int
    n_turned: int
    n_latent: int
    n_value: int
    n_q_latent: int  # 0 for queries of one matrix
    n_ff_expert: int
    n_heads: int = 4
    n_experts: int = 8
    n_used: int = 3


@written_once
def write_tiny_latents(
    path: Path,
    kind: LatentKind = "v3",
    tensor_type: str = "F32",
    *,
    n_layers: int = 3,
    n_heads: int = 4,
    n_vocab: int = 291,
    n_ctx_train: int = 512,
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Value | None] | None = None,
    seed: int = 0,
    is_old: bool = False,
) -> Path:
    """Write a model and give back its path. What is not said here is as in tiny_models.write_tiny_model.

    is_old: as before April 2025, with the matrices of keys and values of all heads as one.

    n_layers: without the block that drafts, the first of them dense.
    """
    types = {"attn_k_b": "F16", **(types or {})} if tensor_type in BLOCK_256_TYPES else types or {}
    if tensor_type in BLOCK_256_TYPES:
        sizes = LatentSizes(256, 512, 48, 16, 256, 64, 256, 256, n_heads)
    elif tensor_type in ("F32", "F16", "BF16"):
        sizes = LatentSizes(96, 128, 24, 16, 48, 32, 28, 32, n_heads)
    else:
        sizes = LatentSizes(96, 128, 32, 32, 64, 32, 32, 32, n_heads)
    n_nextn = int(kind == "glm")
    writer = named_writer(path, "deepseek2", tensor_type)
    keys = {"context_length": n_ctx_train, **_keys(sizes, n_layers + n_nextn, kind != "lite"), **_KEYS[kind]}
    keys |= {"nextn_predict_layers": 1} if n_nextn else {}
    keys |= _old_keys(keys) if is_old else {}
    known = {key: value for key, value in keys.items() if not (is_old and key.endswith("_mla"))}
    add_keys(writer, {f"deepseek2.{key}": value for key, value in known.items()} | dict(metadata or {}))
    add_bpe(writer, n_vocab, {}, CHATML)
    for name, shape in _shapes(sizes, kind, n_layers, n_vocab):
        if is_old and name.endswith("attn_k_b.weight"):
            add_matrix(writer, name.replace("k_b", "kv_b"), tensor_type, _joint(name, sizes, seed))
        if is_old and name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
            continue
        _add(writer, name, shape, type_of(name.removesuffix(".weight"), tensor_type, types), seed)
    return written(writer, path)


def _keys(sizes: LatentSizes, n_blocks: int, has_q_latent: bool) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "block_count": n_blocks,
        "embedding_length": sizes.n_embd,
        "feed_forward_length": sizes.n_ff,
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": sizes.n_latent + sizes.n_turned,
        "attention.value_length": sizes.n_latent,
        "attention.key_length_mla": sizes.n_plain + sizes.n_turned,
        "attention.value_length_mla": sizes.n_value,
        "attention.kv_lora_rank": sizes.n_latent,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": sizes.n_turned,
        "rope.freq_base": 10000.0,
        "expert_count": sizes.n_experts,
        "expert_used_count": sizes.n_used,
        "expert_feed_forward_length": sizes.n_ff_expert,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
    }
    return keys | ({"attention.q_lora_rank": sizes.n_q_latent} if has_q_latent else {})


def _old_keys(keys: Mapping[str, Value]) -> dict[str, Value]:
    lengths = {key: keys[f"{key}_mla"] for key in ("attention.key_length", "attention.value_length")}
    return {**lengths, "attention.head_count_kv": keys["attention.head_count"]}


def _joint(name: str, sizes: LatentSizes, seed: int) -> Floats:
    """The matrices of keys and values of all heads as one; name: of those of keys."""
    n, n_latent = sizes.n_heads, sizes.n_latent
    keys = _of_heads(name, (n, n_latent, sizes.n_plain), seed).transpose(0, 2, 1)
    values = _of_heads(name.replace("k_b", "v_b"), (n, sizes.n_value, n_latent), seed)
    return np.concatenate([keys, values], axis=1).reshape(-1, n_latent)


def _of_heads(name: str, shape: tuple[int, ...], seed: int) -> Floats:
    return normal(seed, name, shape) / np.float32(math.sqrt(shape[2]))


Shapes = dict[str, tuple[int, ...]]


def _shapes(sizes: LatentSizes, kind: str, n_layers: int, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, by whole name."""
    n_embd = sizes.n_embd
    yield "token_embd.weight", (n_vocab, n_embd)
    yield "output.weight", (n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    for layer in range(n_layers + (kind == "glm")):
        of_layer = _attention(sizes, kind != "lite")
        of_layer |= _network("", sizes.n_ff, n_embd) if layer == 0 else _experts(sizes, kind != "lite")
        if layer >= n_layers:
            of_layer |= {f"nextn.{norm}.weight": (n_embd,) for norm in ("enorm", "hnorm", "shared_head_norm")}
            of_layer["nextn.eh_proj.weight"] = (n_embd, 2 * n_embd)
        yield from ((f"blk.{layer}.{role}", shape) for role, shape in of_layer.items())


def _attention(sizes: LatentSizes, has_q_latent: bool) -> Shapes:
    n, n_embd, n_latent, n_q = sizes.n_heads, sizes.n_embd, sizes.n_latent, sizes.n_q_latent
    n_queries = n * (sizes.n_plain + sizes.n_turned)
    queries: Shapes = {"attn_q.weight": (n_queries, n_embd)}
    if has_q_latent:
        queries = {"attn_q_a.weight": (n_q, n_embd), "attn_q_a_norm.weight": (n_q,)}
        queries |= {"attn_q_b.weight": (n_queries, n_q)}
    return queries | {
        "attn_norm.weight": (n_embd,),
        "ffn_norm.weight": (n_embd,),
        "attn_kv_a_mqa.weight": (n_latent + sizes.n_turned, n_embd),
        "attn_kv_a_norm.weight": (n_latent,),
        "attn_k_b.weight": (n, n_latent, sizes.n_plain),
        "attn_v_b.weight": (n, sizes.n_value, n_latent),
        "attn_output.weight": (n_embd, n * sizes.n_value),
    }


def _network(ending: str, n_ff: int, n_embd: int) -> Shapes:
    return {
        f"ffn_gate{ending}.weight": (n_ff, n_embd),
        f"ffn_up{ending}.weight": (n_ff, n_embd),
        f"ffn_down{ending}.weight": (n_embd, n_ff),
    }


def _experts(sizes: LatentSizes, has_bias: bool) -> Shapes:
    n, n_embd = sizes.n_experts, sizes.n_embd
    routed = _network("_exps", sizes.n_ff_expert, n_embd)
    bias: Shapes = {"exp_probs_b.bias": (n,)} if has_bias else {}
    router: Shapes = {"ffn_gate_inp.weight": (n, n_embd)}
    return (
        router
        | bias
        | {name: (n, *shape) for name, shape in routed.items()}
        | _network("_shexp", 2 * sizes.n_ff_expert, n_embd)
    )


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], tensor_type: str, seed: int) -> None:
    role, x = name.removesuffix(".weight"), normal(seed, name, shape)
    if len(shape) == 1:
        centre = 1.0 if role.endswith("norm") else 0.0
        writer.add_tensor(name, np.float32(centre) + np.float32(0.2) * x)
    elif role.endswith("ffn_gate_inp"):
        writer.add_tensor(name, x * np.float32(_ROUTER_DEVIATION / math.sqrt(shape[1])))
    elif len(shape) == 3:
        add_experts(writer, name, tensor_type, x / np.float32(math.sqrt(shape[2])))
    else:
        add_matrix(writer, name, tensor_type, x * np.float32(deviation_of(role, shape[1], tied=False)))
