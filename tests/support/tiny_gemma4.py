"""Tiny random models of Gemma 4 as GGUF files, in the manner of tiny_models. llama.cpp loads them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from late import Late
from tiny_experts import add_experts
from tiny_models import (
    BLOCK_256_TYPES,
    CHATML,
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

# dense: values that are the products of keys in layers that see everything. small: the E-series, with embeddings of
# each layer, and last layers that read the keys of others. experts: with a dense network beside them.
Gemma4Variant = Literal["dense", "small", "experts"]
GEMMA4_VARIANTS: tuple[Gemma4Variant, ...] = get_args(Gemma4Variant)
_ROUTER_DEVIATION = 2.0  # of its products: some experts lead clearly


@dataclass(frozen=True)
class Gemma4Sizes:
    """windowed: by layer.  head_dim, n_kv_heads: of layers with a window, and without.  n_own: layers with own keys."""

    windowed: tuple[bool, ...]
    n_own: int
    n_embd: int
    n_heads: int
    head_dim: tuple[int, int]
    n_kv_heads: tuple[int, int]
    n_ff: tuple[int, ...]
    n_vocab: int
    n_inputs: int
    has_experts: bool
    keys_are_values: bool
    n_experts: int = 8
    n_used: int = 3
    n_ff_expert: int = 32


@written_once
def write_tiny_gemma4(
    path: Path,
    variant: Gemma4Variant = "small",
    tensor_type: str = "F32",
    *,
    n_embd: int | None = None,
    windowed: Sequence[bool] = (True, True, False) * 2,
    window: int = 9,
    n_heads: int = 4,
    head_dim: tuple[int, int] = (32, 64),
    n_vocab: int = 291,
    n_ctx_train: int = 512,
    n_shared: int | None = None,
    n_inputs: int | None = None,
    types: Mapping[str, str] | None = None,
    fused: bool = True,
    vocabulary: object = None,
    metadata: Mapping[str, Value | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model and give back its path. What is not said here is as in tiny_models.write_tiny_model.

    windowed: of each layer.  head_dim: of layers with a window, and without.  n_shared: layers that read keys of
    others, 3 in "small".  n_inputs: numbers
    that each layer has of its own in "small".  fused: gate and up of experts are one tensor.
    """
    is_wide = not {tensor_type, *(types or {}).values()}.isdisjoint(BLOCK_256_TYPES)
    n_shared = n_shared if n_shared is not None else 3 * (variant == "small")
    sizes = _sizes(variant, is_wide, tuple(windowed), n_shared, n_embd, n_heads, head_dim, n_vocab, n_inputs)
    writer = named_writer(path, "gemma4", tensor_type)
    keys = {"context_length": n_ctx_train, "attention.sliding_window": window, **_keys(sizes)}
    add_keys(writer, {f"gemma4.{key}": value for key, value in keys.items()} | dict(metadata or {}))
    (vocabulary or add_bpe)(writer, n_vocab, {}, CHATML)  # type: ignore[operator]
    for name, shape in _shapes(sizes, fused):
        _add(writer, name, shape, type_of(name.removesuffix(".weight"), tensor_type, types or {}), seed)
    n_pairs = sizes.head_dim[1] // 2
    factors = np.where(np.arange(n_pairs) < n_pairs // 4, 1, 1e30)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    return written(writer, path)


def _sizes(
    variant: Gemma4Variant,
    is_wide: bool,
    windowed: tuple[bool, ...],
    n_shared: int,
    n_embd: int | None,
    n_heads: int,
    head_dim: tuple[int, int],
    n_vocab: int,
    n_inputs: int | None,
) -> Gemma4Sizes:
    n_layers, is_small = len(windowed), variant == "small"
    n_ff = 256 if is_wide else 96
    sizes = Gemma4Sizes(
        *(tuple(windowed), n_layers - n_shared, n_embd or (256 if is_wide else 96), n_heads),
        head_dim=(64, 128) if is_wide else head_dim,
        n_kv_heads=(2, 2 if is_small else 1),
        n_ff=tuple(n_ff * (1 + (layer >= n_layers - n_shared)) for layer in range(n_layers)),
        n_vocab=n_vocab,
        n_inputs=(n_inputs or (256 if is_wide else 32)) if is_small else 0,
        has_experts=variant == "experts",
        keys_are_values=not is_small,
    )
    return replace(sizes, n_ff_expert=256) if is_wide else sizes


def _keys(sizes: Gemma4Sizes) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "block_count": len(sizes.windowed),
        "embedding_length": sizes.n_embd,
        "feed_forward_length": sizes.n_ff[0] if len(set(sizes.n_ff)) == 1 else list(sizes.n_ff),
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": [sizes.n_kv_heads[not windowed] for windowed in sizes.windowed],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window_pattern": list(sizes.windowed),
        "attention.shared_kv_layers": len(sizes.windowed) - sizes.n_own,
        "rope.freq_base": 1e5,
        "rope.freq_base_swa": 300.0,
        "final_logit_softcapping": 10.0,
        "embedding_length_per_layer_input": sizes.n_inputs,
    }
    for ending, head_dim in zip(("_swa", ""), sizes.head_dim, strict=True):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            keys[key + ending] = head_dim
    if sizes.has_experts:
        keys |= {
            "expert_count": sizes.n_experts,
            "expert_used_count": sizes.n_used,
            "expert_feed_forward_length": sizes.n_ff_expert,
        }
    return keys


def _shapes(sizes: Gemma4Sizes, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor but rope_freqs.weight, by whole name."""
    yield "token_embd.weight", (sizes.n_vocab, sizes.n_embd)
    yield "output_norm.weight", (sizes.n_embd,)
    if sizes.n_inputs:
        n_all = len(sizes.windowed) * sizes.n_inputs
        yield "per_layer_token_embd.weight", (sizes.n_vocab, n_all)
        yield "per_layer_model_proj.weight", (n_all, sizes.n_embd)
        yield "per_layer_proj_norm.weight", (sizes.n_inputs,)
    for layer in range(len(sizes.windowed)):
        of_layer = _attention(sizes, layer) | _network(sizes, layer, fused)
        of_layer["layer_output_scale.weight"] = (1,)
        if sizes.n_inputs:
            of_layer["inp_gate.weight"] = (sizes.n_inputs, sizes.n_embd)
            of_layer["proj.weight"] = (sizes.n_embd, sizes.n_inputs)
            of_layer["post_norm.weight"] = (sizes.n_embd,)
        yield from ((f"blk.{layer}.{role}", shape) for role, shape in of_layer.items())


def _attention(sizes: Gemma4Sizes, layer: int) -> dict[str, tuple[int, ...]]:
    is_full = not sizes.windowed[layer]
    head_dim, n_embd = sizes.head_dim[is_full], sizes.n_embd
    n_kv = sizes.n_kv_heads[is_full] * head_dim
    found: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        "post_attention_norm.weight": (n_embd,),
        "attn_q.weight": (sizes.n_heads * head_dim, n_embd),
        "attn_q_norm.weight": (head_dim,),
        "attn_output.weight": (n_embd, sizes.n_heads * head_dim),
    }
    if layer < sizes.n_own:
        found |= {"attn_k.weight": (n_kv, n_embd), "attn_k_norm.weight": (head_dim,)}
        if not (is_full and sizes.keys_are_values):
            found["attn_v.weight"] = (n_kv, n_embd)
    return found


def _network(sizes: Gemma4Sizes, layer: int, fused: bool) -> dict[str, tuple[int, ...]]:
    n_embd, n_ff, n, n_own = sizes.n_embd, sizes.n_ff[layer], sizes.n_experts, sizes.n_ff_expert
    found: dict[str, tuple[int, ...]] = {
        "ffn_norm.weight": (n_embd,),
        "ffn_gate.weight": (n_ff, n_embd),
        "ffn_up.weight": (n_ff, n_embd),
        "ffn_down.weight": (n_embd, n_ff),
        "post_ffw_norm.weight": (n_embd,),
    }
    if not sizes.has_experts:
        return found
    apart: dict[str, tuple[int, ...]] = {f"ffn_{role}_exps.weight": (n, n_own, n_embd) for role in ("gate", "up")}
    return found | {
        **{f"{name}.weight": (n_embd,) for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")},
        "ffn_gate_inp.weight": (n, n_embd),
        "ffn_gate_inp.scale": (n_embd,),
        **({"ffn_gate_up_exps.weight": (n, 2 * n_own, n_embd)} if fused else apart),
        "ffn_down_exps.weight": (n, n_embd, n_own),
        "ffn_down_exps.scale": (n,),
    }


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], tensor_type: str, seed: int) -> None:
    """Add a tensor with numbers that fit its role: no default hides them."""
    role, x = name.removesuffix(".weight"), normal(seed, name, shape)
    if shape == (1,):
        writer.add_tensor(name, np.float32(1) + np.float32(0.15) * np.tanh(x))
    elif len(shape) == 1:
        writer.add_tensor(name, np.float32(1) + np.float32(0.2) * x)
    elif role.endswith("ffn_gate_inp"):
        writer.add_tensor(name, x * np.float32(_ROUTER_DEVIATION))  # its input is divided by the root of n_embd
    elif len(shape) == 3:
        add_experts(writer, name, tensor_type, x / np.float32(shape[2] ** 0.5))
    elif role == "per_layer_token_embd":
        add_matrix(writer, name, tensor_type, x * np.float32(shape[1] ** -0.5))
    elif role.endswith(("attn_q", "attn_k")):
        add_matrix(writer, name, tensor_type, x * np.float32(1 / shape[1] ** 0.5))
    else:
        add_matrix(writer, name, tensor_type, x * np.float32(deviation_of(role, shape[1], tied=True)))
