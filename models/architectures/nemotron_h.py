"""Nemotron-H and Nemotron Nano 2 (NVIDIA, arXiv:2504.03624): blocks of one branch, Mamba2, attention or a network.

A network belongs to the layer of the mixer before it. Attention knows no positions: order comes from the recurrences.
The norms are RMS norms, whose epsilon may be under the key of layer norms.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.architectures.granitehybrid import mamba2_of
from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.spec import Attention, FeedForward, Layer, Mixer, NoFeedForward, PlainDense

Kind = Literal["recurrence", "attention", "network"]


def layers(reader: Reader) -> tuple[Layer, ...]:
    """The blocks of the file, each network in the layer of the mixer before it."""
    found: list[Layer] = []
    for block, kind in enumerate(kinds(reader)):
        if kind != "network":
            n_embd = reader.integer("embedding_length", 1, 1 << 20)
            found.append(Layer(_mixer(reader, block, kind), NoFeedForward(n_embd)))
        elif not found or not isinstance(found[-1].ffn, NoFeedForward):
            raise UnsupportedModel(
                f"{reader.file.path}: block {block} is a network, and edgeinfer needs attention or Mamba2 before it"
            )
        else:
            found[-1] = replace(found[-1], ffn=_network(reader, block))
    return tuple(found)


def kinds(reader: Reader) -> list[Kind]:
    """What each block of the model is: as heads of keys and the width of networks say it."""
    n_kv_heads = reader.of_layers("attention.head_count_kv", 0, 1 << 14)
    widths = reader.of_layers("feed_forward_length", 0, 1 << 20)
    pairs = list(zip(n_kv_heads, widths, strict=True))[: reader.n_blocks()]
    return ["network" if width else "attention" if n_heads else "recurrence" for n_heads, width in pairs]


def _mixer(reader: Reader, block: int, kind: Kind) -> Mixer:
    return mamba2_of(reader, block) if kind == "recurrence" else _attention(reader, block)


def _attention(reader: Reader, block: int) -> Attention:
    n_embd = reader.integer("embedding_length", 1, 1 << 20)
    n_heads = max(reader.of_layers("attention.head_count", 0, 1 << 14))
    n_kv_heads = reader.of_layers("attention.head_count_kv", 0, 1 << 14)[block]
    if n_heads % n_kv_heads:
        reader.refuse("attention.head_count_kv", f"must divide the {n_heads} heads: found {n_kv_heads}")
    head_dim = reader.integer("attention.key_length", 2, 1 << 14, default=n_embd // n_heads)
    if reader.integer("attention.value_length", 2, 1 << 14, default=head_dim) != head_dim:
        reader.refuse("attention.value_length", f"must equal the key length {head_dim}")
    prefix = f"blk.{block}.attn_"
    biases = {role: f"{prefix}{role}.bias" for role in ("q", "k", "v", "output")}
    there: dict[str, Any] = {f"{role}_bias": name for role, name in biases.items() if name in reader.file.tensors}
    return Attention(
        n_embd=n_embd,
        n_in=n_embd,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        scale=reader.scale("attention.scale", 1 / math.sqrt(head_dim)),
        q=f"{prefix}q.weight",
        k=f"{prefix}k.weight",
        v=f"{prefix}v.weight",
        output=f"{prefix}output.weight",
        norm=f"{prefix}norm.weight",
        **there,
    )


def nextn_layer(reader: Reader, block: int) -> Layer:
    """The layer of a block behind the model's own, which drafts: attention, and experts with a norm of their own."""
    experts, n_kv_heads = reader.experts(), reader.of_layers("attention.head_count_kv", 0, 1 << 14)[block]
    if n_kv_heads == 0 or experts is None:
        reader.refuse("attention.head_count_kv", f"must not be 0 in block {block}, which drafts: found {n_kv_heads}")
    key, of_rms = (
        "attention.layer_norm_epsilon",
        reader.number("attention.layer_norm_rms_epsilon", 0.0, 1.0, default=0.0),
    )
    if of_rms and reader.number(key, 0.0, 1.0, default=of_rms) != of_rms:
        reader.refuse(key, f"must be {of_rms:g}, as that of other norms, where a block drafts: found another one")
    return Layer(_attention(reader, block), experts.of_layer(block, f"blk.{block}.post_attention_norm.weight"))


def _network(reader: Reader, block: int) -> FeedForward:
    norm, experts = f"blk.{block}.attn_norm.weight", reader.experts()
    if experts is not None:
        return experts.of_layer(block, norm)
    return PlainDense(
        n_embd=reader.integer("embedding_length", 1, 1 << 20),
        n_ff=reader.of_layers("feed_forward_length", 0, 1 << 20)[block],
        up=f"blk.{block}.ffn_up.weight",
        down=f"blk.{block}.ffn_down.weight",
        norm=norm,
    )


ARCHITECTURE = Architecture(
    name="nemotron_h",
    rope_kind="halves",  # of which there is none
    optional=frozenset(),
    norm_epsilon="attention.layer_norm_epsilon",
    layers=layers,
)
