"""Tiny random models with recurrent layers as GGUF files, in the manner of tiny_models. llama.cpp loads them too."""

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
    Floats,
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

HybridArchitecture = Literal["qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe"]
HYBRID_ARCHITECTURES: tuple[HybridArchitecture, ...] = get_args(HybridArchitecture)
_WITH_EXPERTS = ("qwen35moe", "qwen3next", "lfm2moe")
_ROUTER_DEVIATION = 2.0  # of its products: some experts lead clearly
_F32 = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")  # in all files, as the vectors are


@dataclass(frozen=True)
class HybridSizes(Sizes):
    """n_ff: of dense layers.  kinds: "attention" or "recurrent", by layer."""

    kinds: tuple[str, ...]
    n_key_heads: int
    n_value_heads: int
    n_state: int  # head size of the recurrence
    n_conv: int
    n_rotated: int
    n_experts: int = 8
    n_used: int = 3
    n_ff_expert: int = 32
    n_ff_shared: int = 64
    n_nextn: int = 0

    @property
    def n_channels(self) -> int:
        return (2 * self.n_key_heads + self.n_value_heads) * self.n_state

    @property
    def n_v(self) -> int:
        return self.n_value_heads * self.n_state


@written_once
def write_tiny_hybrid(
    path: Path,
    architecture: HybridArchitecture = "qwen35",
    tensor_type: str = "F32",
    *,
    n_embd: int | None = None,
    kinds: Sequence[str] | None = None,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_key_heads: int | None = None,
    n_value_heads: int | None = None,
    n_state: int | None = None,
    n_leading: int = 1,
    n_vocab: int = 291,
    n_ctx_train: int = 512,
    tied: bool = False,
    n_nextn: int = 0,
    values: Mapping[str, Floats] | None = None,
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Value | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model and give back its path. What is not said here is as in tiny_models.write_tiny_model.

    kinds: of the layers, three recurrent ones and then one of attention; in lfm2 the third has attention.  n_key_heads,
    n_value_heads: three value heads for each key head, so that their order shows.  n_state: numbers of a head of the
    recurrence.  n_leading: dense layers of lfm2moe.  tied: always so in lfm2.  n_nextn: blocks that draft, behind the
    layers, of qwen35, qwen35moe and qwen3next.  values: of some tensors, by whole name.
    """
    is_wide, is_lfm2 = _is_wide(tensor_type, types or {}), architecture.startswith("lfm2")
    n_embd, n_key_heads = n_embd or (256 if is_wide else 96), n_key_heads or (4 if is_wide else 2)
    head_dim = head_dim or (n_embd // n_heads if is_lfm2 else 64 if is_wide else 32)
    kinds = kinds or ["attention" if layer % 4 == 3 - is_lfm2 else "recurrent" for layer in range(4)]
    heads = n_heads, n_kv_heads, head_dim
    sizes = HybridSizes(
        *(n_embd, len(kinds), *heads, 512 if is_wide else 128, n_vocab, tuple(kinds), n_key_heads),
        *(n_value_heads or 3 * n_key_heads, n_state or (64 if is_wide else 32)),
        *((3, head_dim) if is_lfm2 else (4, head_dim // 4)),
    )
    wide = {"n_ff_expert": 256, "n_ff_shared": 256} if is_wide else {}
    sizes = replace(sizes, kinds=(*kinds, *["attention"] * n_nextn), n_nextn=n_nextn, **wide)
    writer = named_writer(path, architecture, tensor_type)
    keys = {"context_length": n_ctx_train, **_keys(architecture, sizes, n_leading)}
    add_keys(writer, {f"{architecture}.{key}": value for key, value in keys.items()} | dict(metadata or {}))
    add_bpe(writer, n_vocab, {}, CHATML)
    for name, shape in _shapes(architecture, sizes, n_leading, tied := tied or is_lfm2):
        type = type_of(name.removesuffix(".weight"), tensor_type, types or {})
        _add(writer, name, shape, type, tied, seed, values or {})
    return written(writer, path)


def _is_wide(tensor_type: str, types: Mapping[str, str]) -> bool:
    """Whether some matrices need rows of 256."""
    return not {tensor_type, *types.values()}.isdisjoint(BLOCK_256_TYPES)


def _keys(architecture: str, sizes: HybridSizes, n_leading: int) -> dict[str, Value]:
    keys = size_keys(sizes) | {"rope.dimension_count": sizes.n_rotated}
    if sizes.n_nextn:
        keys |= {"block_count": len(sizes.kinds), "nextn_predict_layers": sizes.n_nextn}
    if architecture.startswith("lfm2"):
        keys["attention.head_count_kv"] = [sizes.n_kv_heads * (kind == "attention") for kind in sizes.kinds]
        keys |= {"shortconv.l_cache": sizes.n_conv, "rope.freq_base": 1e6, "vocab_size": sizes.n_vocab}
        del keys["attention.key_length"], keys["attention.value_length"], keys["rope.dimension_count"]
    else:
        keys |= {
            "rope.freq_base": 1e7,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.recurrent_layers": [kind == "recurrent" for kind in sizes.kinds],
            "ssm.conv_kernel": sizes.n_conv,
            "ssm.state_size": sizes.n_state,
            "ssm.group_count": sizes.n_key_heads,
            "ssm.time_step_rank": sizes.n_value_heads,
            "ssm.inner_size": sizes.n_v,
        }
        if architecture != "qwen3next":
            keys["rope.dimension_sections"] = [sizes.n_rotated // 2 - 2, 1, 1, 0]
    if architecture in _WITH_EXPERTS:
        keys |= {
            "expert_count": sizes.n_experts,
            "expert_used_count": sizes.n_used,
            "expert_feed_forward_length": sizes.n_ff_expert,
        }
        if architecture == "lfm2moe":
            keys |= {"leading_dense_block_count": n_leading, "expert_gating_func": 2}
        else:
            keys["expert_shared_feed_forward_length"] = sizes.n_ff_shared
    return keys


def _shapes(architecture: str, sizes: HybridSizes, n_leading: int, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, by whole name."""
    is_lfm2 = architecture.startswith("lfm2")
    yield "token_embd.weight", (sizes.n_vocab, sizes.n_embd)
    if not tied:
        yield "output.weight", (sizes.n_vocab, sizes.n_embd)
    yield ("token_embd_norm.weight" if is_lfm2 else "output_norm.weight"), (sizes.n_embd,)
    for layer, kind in enumerate(sizes.kinds):
        of_layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (sizes.n_embd,)}
        of_layer["ffn_norm.weight" if is_lfm2 else "post_attention_norm.weight"] = (sizes.n_embd,)
        if kind == "attention":
            of_layer |= _attention(sizes, is_gated=not is_lfm2)
        else:
            of_layer |= _short_conv(sizes) if is_lfm2 else _delta_net(architecture, sizes)
        has_experts = architecture in _WITH_EXPERTS and (architecture != "lfm2moe" or layer >= n_leading)
        of_layer |= _experts(architecture, sizes) if has_experts else _network("", sizes.n_ff, sizes.n_embd)
        if layer >= len(sizes.kinds) - sizes.n_nextn:
            of_layer |= {f"nextn.{norm}.weight": (sizes.n_embd,) for norm in ("enorm", "hnorm", "shared_head_norm")}
            of_layer["nextn.eh_proj.weight"] = (sizes.n_embd, 2 * sizes.n_embd)
        yield from ((f"blk.{layer}.{role}", shape) for role, shape in of_layer.items())


def _attention(sizes: HybridSizes, is_gated: bool) -> dict[str, tuple[int, ...]]:
    return {
        "attn_q.weight": (sizes.n_q * (1 + is_gated), sizes.n_embd),
        "attn_k.weight": (sizes.n_kv, sizes.n_embd),
        "attn_v.weight": (sizes.n_kv, sizes.n_embd),
        "attn_output.weight": (sizes.n_embd, sizes.n_q),
        "attn_q_norm.weight": (sizes.head_dim,),
        "attn_k_norm.weight": (sizes.head_dim,),
    }


def _short_conv(sizes: HybridSizes) -> dict[str, tuple[int, ...]]:
    return {
        "shortconv.in_proj.weight": (3 * sizes.n_embd, sizes.n_embd),
        "shortconv.conv.weight": (sizes.n_embd, sizes.n_conv),
        "shortconv.out_proj.weight": (sizes.n_embd, sizes.n_embd),
    }


def _delta_net(architecture: str, sizes: HybridSizes) -> dict[str, tuple[int, ...]]:
    n = sizes.n_value_heads
    steps = {"ssm_beta.weight": (n, sizes.n_embd), "ssm_alpha.weight": (n, sizes.n_embd)}
    return {
        "attn_qkv.weight": (sizes.n_channels, sizes.n_embd),
        "attn_gate.weight": (sizes.n_v, sizes.n_embd),
        **({"ssm_ba.weight": (2 * n, sizes.n_embd)} if architecture == "qwen3next" else steps),
        "ssm_conv1d.weight": (sizes.n_channels, sizes.n_conv),
        "ssm_a": (n,),
        "ssm_dt.bias": (n,),
        "ssm_norm.weight": (sizes.n_state,),
        "ssm_out.weight": (sizes.n_embd, sizes.n_v),
    }


def _experts(architecture: str, sizes: HybridSizes) -> dict[str, tuple[int, ...]]:
    n, n_ff, n_embd = sizes.n_experts, sizes.n_ff_expert, sizes.n_embd
    routed: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp.weight": (n, n_embd),
        "ffn_gate_exps.weight": (n, n_ff, n_embd),
        "ffn_up_exps.weight": (n, n_ff, n_embd),
        "ffn_down_exps.weight": (n, n_embd, n_ff),
    }
    if architecture == "lfm2moe":
        return routed | {"exp_probs_b.bias": (n,)}
    return routed | {"ffn_gate_inp_shexp.weight": (n_embd,)} | _network("_shexp", sizes.n_ff_shared, n_embd)


def _network(ending: str, n_ff: int, n_embd: int) -> dict[str, tuple[int, ...]]:
    return {
        f"ffn_gate{ending}.weight": (n_ff, n_embd),
        f"ffn_up{ending}.weight": (n_ff, n_embd),
        f"ffn_down{ending}.weight": (n_embd, n_ff),
    }


def _add(
    writer: gguf.GGUFWriter,
    name: str,
    shape: tuple[int, ...],
    tensor_type: str,
    tied: bool,
    seed: int,
    values: Mapping[str, Floats],
) -> None:
    """Add a tensor with numbers that fit its role: no default hides them, and the state remembers some tokens.

    values: of matrices that have others, by name.
    """
    role, x = name.removesuffix(".weight"), normal(seed, name, shape)
    if name in values:
        add = add_matrix if len(shape) == 2 else add_experts
        add(writer, name, tensor_type, values[name])
    elif len(shape) == 1:
        writer.add_tensor(name, _vector(role.partition(".")[2].partition(".")[2] or role, x))
    elif role.endswith(_F32):
        deviation = 0.5 if "conv" in role else _ROUTER_DEVIATION / shape[1] ** 0.5
        writer.add_tensor(name, x * np.float32(deviation))
    elif len(shape) == 3:
        add_experts(writer, name, tensor_type, x / np.float32(shape[2] ** 0.5))
    else:
        add_matrix(writer, name, tensor_type, x * np.float32(deviation_of(role, shape[1], tied)))


def _vector(role: str, x: Floats) -> Floats:
    if role == "ssm_a":
        return -np.exp(x - np.float32(1.5))  # e to the -0.15, a token, in the middle
    if role.endswith("norm"):
        return np.float32(1) + np.float32(0.2) * x
    return x if role == "ssm_dt.bias" else np.float32(0.2) * x
