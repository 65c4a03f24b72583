"""Tiny random models whose attention has gates of its own as GGUF files, in the manner of tiny_models.

llama.cpp loads them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from late import Late
from tiny_experts import add_experts
from tiny_models import (
    BLOCK_256_TYPES,
    CHATML,
    Sizes,
    Value,
    add_bpe,
    add_keys,
    add_matrix,
    deviation_of,
    named_writer,
    normal,
    size_keys,
    type_of,
    written,
)
from written_once import written_once

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")

GatedArchitecture = Literal["laguna", "muse-glimmer"]
GATED_ARCHITECTURES: tuple[GatedArchitecture, ...] = get_args(GatedArchitecture)
WINDOW = 20
_N_LAYERS, _N_EXPERTS, _N_USED = 4, 8, 3
_ROUTER_DEVIATION = 2.0  # of its products: some experts lead clearly
_SCALING: dict[str, Value] = {  # of layers that see everything
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
}
_KEYS: dict[str, dict[str, Value]] = {
    "laguna": {
        **{"rope.freq_base": 5e5, "rope.freq_base_swa": 1e4, **_SCALING, "leading_dense_block_count": 1},
        **{"expert_count": _N_EXPERTS, "expert_used_count": _N_USED, "expert_gating_func": 2},
        **{"expert_weights_norm": True, "expert_weights_scale": 2.5},
    },
    "muse-glimmer": {
        **{"rope.freq_base": 5e5, "logit_scale": 0.7, "final_logit_softcapping": 5.0},
        "attention.sliding_window_pattern": [True, True, True, False],
    },
}


@written_once
def write_tiny_gated(
    path: Path,
    architecture: GatedArchitecture = "laguna",
    tensor_type: str = "F32",
    *,
    gate: Literal["per_head", "per_number"] = "per_head",
    n_heads_windowed: int = 6,
    n_vocab: int = 291,
    n_ctx_train: int = 512,
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Value | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model and give back its path. What is not said here is as in tiny_models.write_tiny_model.

    gate: of laguna; muse-glimmer has one for each number.  n_heads_windowed: of laguna's layers with a window.
    """
    is_wide = not {tensor_type, *(types or {}).values()}.isdisjoint(BLOCK_256_TYPES)
    n_embd, n_ff = (256, 512) if is_wide else (96, 192)
    sizes = Sizes(n_embd, _N_LAYERS, 4, 2, 64 if is_wide else 32, n_ff, n_vocab)
    heads = [4, *[n_heads_windowed if architecture == "laguna" else 4] * (_N_LAYERS - 1)]
    writer = named_writer(path, architecture, tensor_type)
    keys = size_keys(sizes) | {"context_length": n_ctx_train, "attention.sliding_window": WINDOW, **_KEYS[architecture]}
    if architecture == "laguna":
        n_ff_expert = 256 if is_wide else 64
        keys |= {"attention.head_count": heads, "rope.dimension_count": sizes.head_dim // 2}
        keys |= {"rope.dimension_count_swa": sizes.head_dim, "expert_feed_forward_length": n_ff_expert}
        keys |= {"expert_shared_feed_forward_length": 2 * n_ff_expert}
        layers = [_laguna(sizes, n_heads, n_ff_expert, layer, gate) for layer, n_heads in enumerate(heads)]
    else:
        layers = [_muse(sizes)] * _N_LAYERS
    add_keys(writer, {f"{architecture}.{key}": value for key, value in keys.items()} | dict(metadata or {}))
    add_bpe(writer, n_vocab, {}, CHATML)
    for name, shape in _shapes(sizes, layers):
        _add(writer, name, shape, type_of(name.removesuffix(".weight"), tensor_type, types or {}), seed)
    return written(writer, path)


Shapes = dict[str, tuple[int, ...]]


def _shapes(sizes: Sizes, layers: list[Shapes]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, by whole name."""
    yield "token_embd.weight", (sizes.n_vocab, sizes.n_embd)
    yield "output.weight", (sizes.n_vocab, sizes.n_embd)
    yield "output_norm.weight", (sizes.n_embd,)
    for layer, shapes in enumerate(layers):
        yield from ((f"blk.{layer}.{role}", shape) for role, shape in shapes.items())


def _attention(sizes: Sizes, n_heads: int, n_gate: int) -> Shapes:
    n_embd, n_q, n_kv = sizes.n_embd, n_heads * sizes.head_dim, sizes.n_kv
    return {
        "attn_norm.weight": (n_embd,),
        "ffn_norm.weight": (n_embd,),
        "attn_q.weight": (n_q, n_embd),
        "attn_k.weight": (n_kv, n_embd),
        "attn_v.weight": (n_kv, n_embd),
        "attn_output.weight": (n_embd, n_q),
        "attn_gate.weight": (n_gate, n_embd),
        "attn_q_norm.weight": (sizes.head_dim,),
        "attn_k_norm.weight": (sizes.head_dim,),
    }


def _network(ending: str, n_ff: int, n_embd: int) -> Shapes:
    return {
        f"ffn_gate{ending}.weight": (n_ff, n_embd),
        f"ffn_up{ending}.weight": (n_ff, n_embd),
        f"ffn_down{ending}.weight": (n_embd, n_ff),
    }


def _laguna(sizes: Sizes, n_heads: int, n_ff_expert: int, layer: int, gate: str) -> Shapes:
    shapes = _attention(sizes, n_heads, n_heads if gate == "per_head" else n_heads * sizes.head_dim)
    if layer == 0:
        return shapes | _network("", sizes.n_ff, sizes.n_embd)
    experts = {
        name.replace(".", "_exps.", 1): (_N_EXPERTS, *shape)
        for name, shape in _network("", n_ff_expert, sizes.n_embd).items()
    }
    shared = _network("_shexp", 2 * n_ff_expert, sizes.n_embd)
    router: Shapes = {"ffn_gate_inp.weight": (_N_EXPERTS, sizes.n_embd), "exp_probs_b.bias": (_N_EXPERTS,)}
    return shapes | experts | shared | router


def _muse(sizes: Sizes) -> Shapes:
    norms = dict.fromkeys(("post_attention_norm.weight", "post_ffw_norm.weight"), (sizes.n_embd,))
    return _attention(sizes, sizes.n_heads, sizes.n_q) | norms | _network("", sizes.n_ff, sizes.n_embd)


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
