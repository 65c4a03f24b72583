"""What a model on a device is made of: its tensors in the file, and the sizes of all buffers, before any is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.opencl.matrices import RUN, Part, joined, part_of, vector_of
from edgeinfer.errors import UnsupportedModel
from edgeinfer.models import LayerTensors, ModelSpec, RopeSpec, TensorRef
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile

TOP = 8  # candidates of a row that the device chooses from, and nodes in a level of a tree at most
MAX_NODES = 128  # of a tree that it chooses
HEAD_ROWS = 32  # rows of logits at once


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


@dataclass(frozen=True)
class LayerParts:
    """What a layer is made of, in the file. norms: by their names in LayerTensors."""

    qkv: LinearParts
    attn_output: LinearParts
    gate_up: LinearParts
    down: LinearParts
    norms: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class GateParts:
    """What a draft head begins with; see GateTensors."""

    feature: LinearParts
    token_norm: NDArray[np.float32]
    token: LinearParts
    mix: LinearParts


@dataclass(frozen=True)
class ModelParts:
    """What a model or a draft head is made of, in the file; output is None where it is the embedding.

    output_norm, gate: None where there is none.  draft_vocab: (n_draft,) int32, tokens that the rows of output are
    for; None where they are for the first ones.
    """

    token_embd: LinearParts
    output: LinearParts | None
    output_norm: NDArray[np.float32] | None
    layers: tuple[LayerParts, ...]
    gate: GateParts | None = None
    draft_vocab: NDArray[np.int32] | None = None

    @classmethod
    def read(cls, model: ModelFile, spec: ModelSpec) -> ModelParts:
        """Find all tensors, without converting any. Raises UnsupportedModel."""
        return cls(
            token_embd=_linear(model, [spec.token_embd]),
            output=None if spec.tied_embeddings else _linear(model, [spec.output]),
            output_norm=None if spec.output_norm is None else vector_of(model, spec.output_norm),
            layers=tuple(_layer(model, names) for names in spec.layers),
        )

    @classmethod
    def read_head(cls, head: ModelFile, spec: ModelSpec, target: ModelFile, target_spec: ModelSpec) -> ModelParts:
        """The same of a head, with its target's embeddings. spec: DraftHeadSpec.decoder. Raises UnsupportedModel."""
        names = spec.gate
        if names is None or spec.combine is not None:
            kind = "EAGLE-3 heads" if names is None else "draft heads that are fed by several layers"
            raise UnsupportedModel(f"{head.path}: {kind} do not run on OpenCL: run them on the native engine (-md)")
        return cls(
            token_embd=_linear(target, [target_spec.token_embd]),
            output=_linear(head, [spec.output]),
            output_norm=None,
            layers=tuple(_layer(head, names) for names in spec.layers),
            gate=GateParts(
                feature=_linear(head, [names.feature]),
                token_norm=vector_of(head, names.token_norm),
                token=_linear(head, [names.token]),
                mix=_linear(head, [names.mix]),
            ),
            draft_vocab=read_head(head).draft_vocab,
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
        if self.gate is not None:
            yield self.gate.token_norm
        for layer in self.layers:
            yield from layer.norms.values()

    def _linears(self) -> Iterator[LinearParts]:
        yield self.token_embd
        if self.output is not None:
            yield self.output
        if self.gate is not None:
            yield from (self.gate.feature, self.gate.token, self.gate.mix)
        for layer in self.layers:
            yield from (layer.qkv, layer.attn_output, layer.gate_up, layer.down)


def _layer(model: ModelFile, names: LayerTensors) -> LayerParts:
    norms = {role: ref for role, ref in vars(names).items() if role.endswith("_norm") and ref is not None}
    return LayerParts(
        qkv=_linear(
            model,
            [names.attn_q, names.attn_k, names.attn_v],
            [names.attn_q_bias, names.attn_k_bias, names.attn_v_bias],
        ),
        attn_output=_linear(model, [names.attn_output], [names.attn_output_bias]),
        gate_up=_linear(model, [names.ffn_gate, names.ffn_up]),
        down=_linear(model, [names.ffn_down]),
        norms={role: vector_of(model, ref) for role, ref in norms.items()},
    )


def _linear(model: ModelFile, refs: Sequence[TensorRef], biases: Sequence[TensorRef | None] = ()) -> LinearParts:
    parts = [part_of(model, ref) for ref in refs]
    if not any(biases):
        return LinearParts(joined(parts), None)
    vectors = [
        np.zeros(part.n_out, dtype=np.float32) if ref is None else vector_of(model, ref)
        for part, ref in zip(parts, biases, strict=True)
    ]
    return LinearParts(joined(parts), np.concatenate(vectors))


def kv_bytes(spec: ModelSpec, n_ctx: int) -> int:
    """Bytes of the keys, and as many again of the values; a buffer has at least 4."""
    return max(4, 2 * spec.n_layers * spec.n_kv_heads * n_ctx * spec.head_dim)


def activation_bytes(spec: ModelSpec, n_ctx: int, n_batch: int) -> dict[str, int]:
    """Bytes of each buffer that a pass of n_batch tokens works in, by name."""
    n_q = spec.n_heads * spec.head_dim
    gated = {} if spec.gate is None else {"features": n_batch * spec.n_embd, "pairs": 2 * n_batch * spec.n_embd}
    widest = max(spec.n_embd if spec.gate is None else 2 * spec.n_embd, n_q, spec.n_ff)
    sizes = {
        "x": n_batch * spec.n_embd,
        "normed": max(n_batch, HEAD_ROWS) * spec.n_embd,
        "added": n_batch * spec.n_embd,
        "qkv": n_batch * (n_q + 2 * spec.n_kv_heads * spec.head_dim),
        "heads": n_batch * n_q,
        "gate_up": n_batch * 2 * spec.n_ff,
        "gated": n_batch * spec.n_ff,
        "scales": max(n_batch, HEAD_ROWS) * (widest // RUN + 1),
        "sums": max(n_batch, HEAD_ROWS) * (widest // RUN + 1),
        "logits": HEAD_ROWS * spec.n_logits,
        "ids": n_batch,
        "rows": max(n_batch, HEAD_ROWS, MAX_NODES),
        "positions": max(n_batch, MAX_NODES),
        "query_scales": n_batch,
        "candidates": MAX_NODES * TOP,
        "chances": MAX_NODES * TOP,
        **{name: MAX_NODES for name in ("node_ids", "parents", "node_chances", "reach")},
    }
    sizes |= gated | {f"turns{i}": n_batch * rope.n_dims for i, rope in enumerate(ropes_of(spec, n_ctx)[0])}
    whole = {"codes": max(n_batch, HEAD_ROWS) * widest, "sees": max(n_batch, MAX_NODES) ** 2}
    return {name: 4 * n for name, n in sizes.items()} | whole


def ropes_of(spec: ModelSpec, n_ctx: int) -> tuple[list[RopeSpec], list[int | None]]:
    """The rotations that differ, and for each layer the index of its own."""
    ropes: list[RopeSpec] = []
    of_layers: list[int | None] = []
    for attention in spec.attention:
        rope = attention.rope and attention.rope.of_context(n_ctx)
        if rope is not None and rope not in ropes:
            ropes.append(rope)
        of_layers.append(None if rope is None else ropes.index(rope))
    return ropes, of_layers
