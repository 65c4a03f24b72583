"""Tiny random models with Mamba2 as GGUF files, in the manner of tiny_hybrids. llama.cpp loads them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

Shapes = dict[str, tuple[int, ...]]
# An architecture, and after a plus what distinguishes a second model of it.
MambaModel = Literal[
    "granitehybrid", "granitehybrid+experts", "nemotron_h", "nemotron_h_moe", "nemotron_h_moe+latent", "falcon-h1"
]
MAMBA_MODELS: tuple[MambaModel, ...] = get_args(MambaModel)
MAMBA_ARCHITECTURES = sorted({name.partition("+")[0] for name in MAMBA_MODELS})
_KINDS = {  # of the blocks
    "granitehybrid": ("recurrent", "attention", "recurrent"),
    "nemotron_h": ("recurrent", "network", "attention", "recurrent", "network"),
    "nemotron_h_moe": ("recurrent", "network", "recurrent", "attention", "network"),
    "falcon-h1": ("both", "both"),
}
_F32 = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")  # in all files, as the vectors are
_ATTEND = ("attention", "both", "drafting")  # blocks
_GRANITE = {"embedding_scale": 1.5, "residual_scale": 0.7, "attention.scale": 0.3, "logit_scale": 0.8}


@dataclass(frozen=True)
class MambaSizes(Sizes):
    """n_ff: of dense networks.  kinds: by block."""

    kinds: tuple[str, ...]
    n_groups: int
    n_mamba_heads: int
    n_per_head: int
    n_per_key: int
    n_conv: int
    n_latent: int
    has_experts: bool
    n_experts: int = 8
    n_used: int = 3
    n_ff_expert: int = 32
    n_ff_shared: int = 64

    @property
    def n_inner(self) -> int:
        return self.n_mamba_heads * self.n_per_head

    @property
    def n_channels(self) -> int:
        return self.n_inner + 2 * self.n_groups * self.n_per_key


@written_once
def write_tiny_mamba(
    path: Path,
    model: MambaModel = "granitehybrid",
    tensor_type: str = "F32",
    *,
    n_embd: int | None = None,
    kinds: Sequence[str] | None = None,
    n_groups: int = 2,
    n_mamba_heads: int = 8,
    n_per_head: int | None = None,
    n_per_key: int | None = None,
    n_vocab: int = 291,
    n_ctx_train: int = 512,
    n_latent: int | None = None,
    n_nextn: int = 0,
    values: Mapping[str, Floats] | None = None,
    tied: bool = False,
    has_ssm_norm: bool = True,
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Value | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model and give back its path. What is not said here is as in tiny_hybrids.write_tiny_hybrid.

    kinds: of the blocks.  n_per_head, n_per_key: numbers of v of a head, and of B of a group.  n_latent: that
    experts of nemotron_h_moe+latent read.  n_nextn: blocks of nemotron_h_moe behind the others, which draft.
    values: of some tensors, by whole name.  has_ssm_norm: of falcon-h1.
    """
    architecture, _, more = model.partition("+")
    is_wide = not {tensor_type, *(types or {}).values()}.isdisjoint(BLOCK_256_TYPES)
    n_embd = n_embd or (256 if is_wide else 128)
    wide = {"n_ff_expert": 256, "n_ff_shared": 256} if is_wide else {}
    kinds = (*(kinds or _KINDS[architecture]), *["drafting"] * n_nextn)
    sizes = MambaSizes(
        *(n_embd, len(kinds), 4, 2, n_embd // 4, 512 if is_wide else 96, n_vocab, kinds, n_groups, n_mamba_heads),
        *(n_per_head or 2 * n_embd // n_mamba_heads, n_per_key or 16, 4),
        n_latent=(n_latent or (256 if is_wide else 64)) if more == "latent" else 0,
        has_experts=more == "experts" or architecture == "nemotron_h_moe",
        **wide,
    )
    writer = named_writer(path, architecture, tensor_type)
    keys = {"context_length": n_ctx_train, **_keys(architecture, sizes)}
    add_keys(writer, {f"{architecture}.{key}": value for key, value in keys.items()} | dict(metadata or {}))
    add_bpe(writer, n_vocab, {}, CHATML)
    for name, shape in _shapes(architecture, sizes, tied, has_ssm_norm):
        type = type_of(name.removesuffix(".weight"), tensor_type, types or {})
        _add(writer, name, shape, type, tied, seed, (values or {}).get(name))
    return written(writer, path)


def _keys(architecture: str, sizes: MambaSizes) -> dict[str, Value]:
    keys: dict[str, Value] = size_keys(sizes) | {
        "ssm.conv_kernel": sizes.n_conv,
        "ssm.state_size": sizes.n_per_key,
        "ssm.group_count": sizes.n_groups,
        "ssm.time_step_rank": sizes.n_mamba_heads,
        "ssm.inner_size": sizes.n_inner,
        "vocab_size": sizes.n_vocab,
    }
    if architecture != "falcon-h1":
        keys["attention.head_count_kv"] = [sizes.n_kv_heads * (kind in _ATTEND) for kind in sizes.kinds]
    if architecture == "granitehybrid":
        keys |= {**_GRANITE, "rope.scaling.finetuned": False}
    if architecture.startswith("nemotron"):
        n_ff = sizes.n_ff_expert if sizes.has_experts else sizes.n_ff
        keys["feed_forward_length"] = [n_ff * (kind in ("network", "drafting")) for kind in sizes.kinds]
        keys["attention.layer_norm_epsilon"] = 1e-5
    if sizes.has_experts:
        keys |= {
            "expert_count": sizes.n_experts,
            "expert_used_count": sizes.n_used,
            "expert_shared_feed_forward_length": sizes.n_ff_shared,
        }
        if architecture == "granitehybrid":
            keys["feed_forward_length"] = sizes.n_ff_expert
        else:
            keys |= {"expert_feed_forward_length": sizes.n_ff_expert, "expert_weights_norm": True}
            keys |= {"expert_weights_scale": 2.5, "expert_shared_count": 1, "expert_group_count": 1}
    if sizes.n_latent:
        keys["moe_latent_size"] = sizes.n_latent
    if n_nextn := sizes.kinds.count("drafting"):
        keys["nextn_predict_layers"] = n_nextn
    return keys


# ---- tensors ---------------------------------------------------------------------------------------------------


def _shapes(
    architecture: str, sizes: MambaSizes, tied: bool, has_ssm_norm: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, by whole name."""
    yield "token_embd.weight", (sizes.n_vocab, sizes.n_embd)
    if not tied:
        yield "output.weight", (sizes.n_vocab, sizes.n_embd)
    yield "output_norm.weight", (sizes.n_embd,)
    for block, kind in enumerate(sizes.kinds):
        of_block: Shapes = {"attn_norm.weight": (sizes.n_embd,)}
        if kind in _ATTEND:
            of_block |= _attention(sizes)
        if kind in ("recurrent", "both"):
            of_block |= _mamba2(sizes, has_ssm_norm)
        if architecture.startswith("nemotron"):
            of_block |= _plain(sizes) if kind in ("network", "drafting") else {}
            of_block |= _drafting(sizes) if kind == "drafting" else {}
        else:
            of_block["ffn_norm" if architecture == "falcon-h1" else "ffn_norm.weight"] = (sizes.n_embd,)
            of_block |= _gated(sizes)
        yield from ((f"blk.{block}.{role}", shape) for role, shape in of_block.items())


def _drafting(sizes: MambaSizes) -> Shapes:
    """What a block that drafts has beside its attention and its experts."""
    norms = ("post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    shapes: Shapes = {f"{name}.weight": (sizes.n_embd,) for name in norms}
    return shapes | {"nextn.eh_proj.weight": (sizes.n_embd, 2 * sizes.n_embd)}


def _attention(sizes: MambaSizes) -> Shapes:
    return {
        "attn_q.weight": (sizes.n_q, sizes.n_embd),
        "attn_k.weight": (sizes.n_kv, sizes.n_embd),
        "attn_v.weight": (sizes.n_kv, sizes.n_embd),
        "attn_output.weight": (sizes.n_embd, sizes.n_q),
    }


def _mamba2(sizes: MambaSizes, has_norm: bool) -> Shapes:
    n = sizes.n_mamba_heads
    shapes: Shapes = {
        "ssm_in.weight": (sizes.n_inner + sizes.n_channels + n, sizes.n_embd),
        "ssm_conv1d.weight": (sizes.n_channels, sizes.n_conv),
        "ssm_conv1d.bias": (sizes.n_channels,),
        "ssm_dt.bias": (n,),
        "ssm_a": (n, 1),
        "ssm_d": (n, 1),
        "ssm_out.weight": (sizes.n_embd, sizes.n_inner),
    }
    n_groups, n_each = sizes.n_groups, sizes.n_inner // sizes.n_groups
    return shapes | ({"ssm_norm.weight": (n_groups, n_each) if n_groups > 1 else (n_each,)} if has_norm else {})


def _gated(sizes: MambaSizes) -> Shapes:
    if not sizes.has_experts:
        return _network("", sizes.n_ff, sizes.n_embd)
    n, n_ff, n_embd = sizes.n_experts, sizes.n_ff_expert, sizes.n_embd
    return {
        "ffn_gate_inp.weight": (n, n_embd),
        "ffn_gate_exps.weight": (n, n_ff, n_embd),
        "ffn_up_exps.weight": (n, n_ff, n_embd),
        "ffn_down_exps.weight": (n, n_embd, n_ff),
        **_network("_shexp", sizes.n_ff_shared, n_embd),
    }


def _plain(sizes: MambaSizes) -> Shapes:
    """Of networks without gates."""
    if not sizes.has_experts:
        return {"ffn_up.weight": (sizes.n_ff, sizes.n_embd), "ffn_down.weight": (sizes.n_embd, sizes.n_ff)}
    n, n_ff, n_embd, n_latent = sizes.n_experts, sizes.n_ff_expert, sizes.n_embd, sizes.n_latent
    n_in = n_latent or n_embd
    shapes: Shapes = {
        "ffn_gate_inp.weight": (n, n_embd),
        "exp_probs_b.bias": (n,),
        "ffn_up_exps.weight": (n, n_ff, n_in),
        "ffn_down_exps.weight": (n, n_in, n_ff),
        "ffn_up_shexp.weight": (sizes.n_ff_shared, n_embd),
        "ffn_down_shexp.weight": (n_embd, sizes.n_ff_shared),
    }
    if n_latent:
        shapes |= {"ffn_latent_down.weight": (n_latent, n_embd), "ffn_latent_up.weight": (n_embd, n_latent)}
    return shapes


def _network(ending: str, n_ff: int, n_embd: int) -> Shapes:
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
    values: Floats | None,
) -> None:
    """Add a tensor with numbers that fit its role: no default hides them, and the state remembers some tokens.

    values: of a matrix that has others.
    """
    role, x = name.removesuffix(".weight"), normal(seed, name, shape)
    if values is not None:
        (add_experts if len(shape) == 3 else add_matrix)(writer, name, tensor_type, values)
    elif role.endswith(_F32) or len(shape) == 1:
        writer.add_tensor(name, _float(role.split(".", 2)[-1], x))
    elif len(shape) == 3:
        add_experts(writer, name, tensor_type, x / np.float32(shape[2] ** 0.5))
    else:
        add_matrix(writer, name, tensor_type, x * np.float32(deviation_of(role, shape[1], tied)))


def _float(role: str, x: Floats) -> Floats:
    if role == "ssm_a":
        return -np.exp(x - np.float32(1.5))  # e to the -0.15, a token, in the middle
    if role.endswith("norm"):
        return np.float32(1) + np.float32(0.2) * x
    if role in ("ssm_dt.bias", "ssm_d"):
        return x
    if role == "ffn_gate_inp":
        return x * np.float32(2 / x.shape[1] ** 0.5)  # some experts lead clearly
    return x * np.float32(0.5 if role == "ssm_conv1d" else 0.2)
