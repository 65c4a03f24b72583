"""What a model on a device is made of: its tensors in the file, and the sizes of all buffers, before any is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.opencl.matrices import RUN, Part, joined, part_of, vector_of
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import (
    Attention,
    Dense,
    ModelSpec,
    QueryTemperature,
    RopeSpec,
    TensorRef,
    attention_of,
    check_blocks,
    dense_of,
)
from edgeinfer.models.draft_head import GatedFusion, HeadSpec, title_of
from edgeinfer.models.gguf import ModelFile

TOP = 8  # candidates of a row that the device chooses from, and nodes in a level of a tree at most
MAX_NODES = 128  # of a tree that it chooses
HEAD_ROWS = 32  # rows of logits at once

# The fields of blocks that are looked at here and in decoder.py; see check_blocks.
BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "window"),
        *("soft_cap", "query_temperature", "qk_norm", "norm", "post_norm", "sub_norm", "q_norm", "k_norm"),
        *("q_bias", "k_bias", "v_bias", "output_bias"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm"),
}
FRONTS: dict[type, tuple[str, ...]] = {GatedFusion: ("n_embd", "feature", "token_norm", "token", "mix")}


def check_spec(spec: ModelSpec, path: object) -> None:
    """Raises UnsupportedModel for blocks, or fields of blocks, that do not run here."""
    check_blocks(spec.blocks(), BLOCKS, "opencl", path)
    for index, layer in enumerate(spec.layers):
        if attention_of(layer).n_in != spec.n_embd:
            raise UnsupportedModel(
                f"{path}: layers.{index}.mixer attends from rows of {attention_of(layer).n_in} numbers, other than the "
                f"model's {spec.n_embd}, which the opencl backend cannot run: use another backend"
            )


def check_head(spec: HeadSpec, path: object) -> GatedFusion:
    """The front of a head. Raises UnsupportedModel for a head that does not run here."""
    front = spec.front
    if not isinstance(front, GatedFusion) or spec.features is not None:
        raise UnsupportedModel(f"{path}: {title_of(spec)} do not run on OpenCL: run them on the native engine (-md)")
    check_blocks([("front", front)], FRONTS, "opencl", path)
    check_spec(spec.decoder, path)
    return front


# ---- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearParts:
    """Matrices of one input, to be read side by side, and the bias of all outputs, if any has one."""

    runs: Sequence[Sequence[Part]]
    bias: NDArray[np.float32] | None

    @property
    def matrix_bytes(self) -> list[tuple[int, int]]:
        """(of codes, of scales) of each run."""
        sizes = []
        for run in self.runs:
            n_out, n_in = sum(part.n_out for part in run), run[0].n_in
            sizes.append((run[0].format.weight_bytes(n_out, n_in), run[0].format.scale_bytes(n_out, n_in)))
        return sizes


Norms = dict[str, NDArray[np.float32]]  # of a block, by role


@dataclass(frozen=True)
class AttentionParts:
    """The tensors of an Attention."""

    block: Attention
    qkv: LinearParts
    output: LinearParts
    norms: Norms


@dataclass(frozen=True)
class DenseParts:
    """The tensors of a Dense."""

    block: Dense
    gate_up: LinearParts
    down: LinearParts
    norms: Norms


@dataclass(frozen=True)
class FusionParts:
    """The tensors of a GatedFusion."""

    feature: LinearParts
    token_norm: NDArray[np.float32]
    token: LinearParts
    mix: LinearParts


@dataclass(frozen=True)
class ModelParts:
    """What a model or a draft head is made of, in the file; output is None where it is the embedding."""

    token_embd: LinearParts
    output: LinearParts | None
    # output_norm, fusion: None where there is none
    output_norm: NDArray[np.float32] | None
    layers: tuple[tuple[AttentionParts, DenseParts], ...]
    fusion: FusionParts | None = None
    # (n_logits,) int32, tokens that the rows of output are for; None where they are for the first ones
    draft_vocab: NDArray[np.int32] | None = None

    @classmethod
    def read(cls, model: ModelFile, spec: ModelSpec) -> ModelParts:
        """Find all tensors, without converting any. Raises UnsupportedModel."""
        check_spec(spec, model.path)
        assert spec.token_embd is not None and spec.output is not None  # whole models have them
        return cls(
            token_embd=_linear(model, [spec.token_embd]),
            output=None if spec.tied_embeddings else _linear(model, [spec.output]),
            output_norm=None if spec.output_norm is None else vector_of(model, spec.output_norm),
            layers=_layers(model, spec),
        )

    @classmethod
    def read_head(cls, head: ModelFile, spec: HeadSpec, target: ModelFile, target_spec: ModelSpec) -> ModelParts:
        """The same of a head, with its target's embeddings. Raises UnsupportedModel."""
        front, decoder = check_head(spec, head.path), spec.decoder
        assert target_spec.token_embd is not None
        if decoder.token_embd is not None or decoder.output is None or decoder.output_norm is not None:
            raise UnsupportedModel(
                f"{head.path}: on OpenCL a draft head has its target's embeddings, an output matrix and no norm before "
                "it: run others on the native engine (-md)"
            )
        return cls(
            token_embd=_linear(target, [target_spec.token_embd]),
            output=_linear(head, [decoder.output]),
            output_norm=None,
            layers=_layers(head, decoder),
            fusion=FusionParts(
                feature=_linear(head, [front.feature]),
                token_norm=vector_of(head, front.token_norm),
                token=_linear(head, [front.token]),
                mix=_linear(head, [front.mix]),
            ),
            draft_vocab=spec.draft_vocab,
        )

    def buffer_bytes(self) -> Iterator[int]:
        """Bytes of each buffer."""
        yield from (norm.nbytes for norm in self._norms())
        if self.draft_vocab is not None:
            yield self.draft_vocab.nbytes
        for linear in self._linears():
            for of_codes, of_scales in linear.matrix_bytes:
                yield of_codes
                yield of_scales
            if linear.bias is not None:
                yield linear.bias.nbytes

    def _norms(self) -> Iterator[NDArray[np.float32]]:
        if self.output_norm is not None:
            yield self.output_norm
        if self.fusion is not None:
            yield self.fusion.token_norm
        for mixer, ffn in self.layers:
            yield from (*mixer.norms.values(), *ffn.norms.values())

    def _linears(self) -> Iterator[LinearParts]:
        yield self.token_embd
        if self.output is not None:
            yield self.output
        if self.fusion is not None:
            yield from (self.fusion.feature, self.fusion.token, self.fusion.mix)
        for mixer, ffn in self.layers:
            yield from (mixer.qkv, mixer.output, ffn.gate_up, ffn.down)


def _layers(model: ModelFile, spec: ModelSpec) -> tuple[tuple[AttentionParts, DenseParts], ...]:
    return tuple((_attention(model, attention_of(layer)), _dense(model, dense_of(layer))) for layer in spec.layers)


def _attention(model: ModelFile, block: Attention) -> AttentionParts:
    return AttentionParts(
        block,
        qkv=_linear(model, [block.q, block.k, block.v], [block.q_bias, block.k_bias, block.v_bias]),
        output=_linear(model, [block.output], [block.output_bias]),
        norms=_norms_of(model, block),
    )


def _dense(model: ModelFile, block: Dense) -> DenseParts:
    return DenseParts(
        block,
        gate_up=_linear(model, [block.gate, block.up]),
        down=_linear(model, [block.down]),
        norms=_norms_of(model, block),
    )


def _norms_of(model: ModelFile, block: Any) -> Norms:
    refs = {role: getattr(block, role) for role in block.shapes() if role.endswith("norm")}
    return {role: vector_of(model, ref) for role, ref in refs.items() if ref is not None}


def _linear(model: ModelFile, refs: Sequence[TensorRef], biases: Sequence[TensorRef | None] = ()) -> LinearParts:
    parts = [part_of(model, ref) for ref in refs]
    if not any(biases):
        return LinearParts(joined(parts), None)
    vectors = [
        np.zeros(part.n_out, dtype=np.float32) if ref is None else vector_of(model, ref)
        for part, ref in zip(parts, biases, strict=True)
    ]
    return LinearParts(joined(parts), np.concatenate(vectors))


# ---- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionShape:
    """What kernels are built for; layers of one shape have their keys in one buffer, and their values in another."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, block: Attention) -> AttentionShape:
        """That of a block."""
        return cls(block.n_heads, block.n_kv_heads, block.head_dim)

    def kv_bytes(self, n_layers: int, n_ctx: int) -> int:
        """Bytes of the keys of so many layers, and as many again of the values."""
        return 2 * n_layers * self.n_kv_heads * n_ctx * self.head_dim


def shapes_of(spec: ModelSpec) -> dict[AttentionShape, int]:
    """The shapes of attention, each with the number of its layers."""
    shapes: dict[AttentionShape, int] = {}
    for layer in spec.layers:
        shape = AttentionShape.of(attention_of(layer))
        shapes[shape] = shapes.get(shape, 0) + 1
    return shapes


def ropes_of(spec: ModelSpec) -> list[RopeSpec]:
    """The rotations that differ."""
    ropes = (attention_of(layer).rope for layer in spec.layers)
    return list(dict.fromkeys(rope for rope in ropes if rope is not None))


Scaling = tuple[float, QueryTemperature | None]


def scaling_of(block: Attention) -> Scaling:
    """What the factors of queries follow from."""
    return block.scale, block.query_temperature


def scalings_of(spec: ModelSpec) -> dict[Scaling, Attention]:
    """What the factors of queries follow from, where it differs, each with a block that has it."""
    return {scaling_of(attention_of(layer)): attention_of(layer) for layer in spec.layers}


def kv_buffer_bytes(spec: ModelSpec, n_ctx: int) -> list[int]:
    """Bytes of each buffer of keys; there are as many of values."""
    return [shape.kv_bytes(n_layers, n_ctx) for shape, n_layers in shapes_of(spec).items()]


def activation_bytes(spec: ModelSpec, n_batch: int) -> dict[str, int]:
    """Bytes of each buffer that a pass of n_batch tokens works in, by name."""
    return _activation_bytes(spec, n_batch, spec.n_embd)


def head_activation_bytes(spec: ModelSpec, n_batch: int) -> dict[str, int]:
    """The same of a draft head's decoder, with what its front works in."""
    of_front = {"features": 4 * n_batch * spec.n_embd, "pairs": 8 * n_batch * spec.n_embd}
    return _activation_bytes(spec, n_batch, 2 * spec.n_embd) | of_front


def _activation_bytes(spec: ModelSpec, n_batch: int, n_in: int) -> dict[str, int]:
    """n_in: the longest row that is read beside those of the layers."""
    n_q = max((attention_of(layer).n_q for layer in spec.layers), default=0)
    n_ff = max((dense_of(layer).n_ff for layer in spec.layers), default=0)
    widest, n_rows = max(n_in, n_q, n_ff), max(n_batch, HEAD_ROWS)
    sizes = {
        "x": n_batch * spec.n_embd,
        "normed": n_rows * spec.n_embd,
        "added": n_batch * spec.n_embd,
        "qkv": n_batch * max((layer.mixer.n_activations for layer in spec.layers), default=0),
        "heads": n_batch * n_q,
        "gate_up": n_batch * 2 * n_ff,
        "gated": n_batch * n_ff,
        "scales": n_rows * (widest // RUN + 1),
        "sums": n_rows * (widest // RUN + 1),
        "logits": HEAD_ROWS * spec.n_logits,
        "ids": n_batch,
        "rows": max(n_rows, MAX_NODES),
        "positions": max(n_batch, MAX_NODES),
        "candidates": MAX_NODES * TOP,
        "probabilities": MAX_NODES * TOP,
        **{name: MAX_NODES for name in ("node_ids", "parents", "node_probabilities", "path_probabilities")},
        **{f"query_scales{i}": n_batch for i in range(len(scalings_of(spec)))},
        **{f"turns{i}": n_batch * rope.n_dims for i, rope in enumerate(ropes_of(spec))},
    }
    whole = {"codes": n_rows * widest, "sees": max(n_batch, MAX_NODES) ** 2}
    return {name: max(4, 4 * n) for name, n in sizes.items()} | whole
