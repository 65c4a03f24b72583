"""The target in torch, from the weights of its file, computing what the native engine computes.

As there, the input of a quantised matrix is rounded to 8 bits per block, and keys and values are float16. Remaining
differences come from the order of float sums, which sometimes changes how a number is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.types import TokenIds
from edgeinfer.models import (
    Attention,
    Dense,
    ModelSpec,
    RopeSpec,
    TensorRef,
    TensorRows,
    attention_of,
    check_blocks,
    dense_of,
)
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.training.features import Taps

# The fields of blocks that are read below; see check_blocks.
BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope"),
        *("qk_norm", "norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "output_bias"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "norm"),
}
_NOT_COMPUTED: dict[type, dict[str, str]] = {
    Attention: {
        "soft_cap": "soft caps",
        "query_temperature": "queries that grow with the position",
        "window": "windows of attention",
        "post_norm": "norms after attention",
        "sub_norm": "norms inside attention",
    },
    Dense: {
        "activation": "an activation other than SiLU",
        "post_norm": "norms after the network",
        "sub_norm": "norms inside the network",
    },
}


@dataclass(frozen=True)
class Matrix:
    """A weight, and how its input is rounded."""

    values: torch.Tensor  # (n_out, n_in) float32
    block: int  # numbers of the input that are rounded with one scale, 1 for no rounding


class KVCache:
    """Keys and values of several texts, (n, n_kv_heads, n_ctx, head_dim) half floats each, by layer."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.keys = list(keys)
        self.values = list(values)

    @classmethod
    def empty(cls, spec: ModelSpec, n: int, n_ctx: int, device: torch.device) -> KVCache:
        """One for n texts of at most n_ctx tokens."""
        blocks = [attention_of(layer) for layer in spec.layers]
        shapes = [(n, block.n_kv_heads, n_ctx, block.head_dim) for block in blocks]
        return cls(*([torch.zeros(shape, dtype=torch.float16, device=device) for shape in shapes] for _ in range(2)))

    def put(
        self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, n_seen: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values (n, m, n_kv_heads, head_dim) at positions (n, m); gives those of the first n_seen."""
        texts = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[layer][texts, :, positions] = keys
        self.values[layer][texts, :, positions] = values
        return self.keys[layer][:, :, :n_seen], self.values[layer][:, :, :n_seen]

    def part(self, texts: slice) -> KVCache:
        """That of some texts, in the same memory."""
        return KVCache([keys[texts] for keys in self.keys], [values[texts] for values in self.values])

    def keep(self, texts: torch.Tensor) -> None:
        """Drop all texts but these."""
        for layers in (self.keys, self.values):
            layers[:] = [layer[texts] for layer in layers]

    @staticmethod
    def bytes_of(spec: ModelSpec, n_ctx: int) -> int:
        """Bytes that one text takes."""
        return sum(4 * attention_of(layer).n_kv * n_ctx for layer in spec.layers)


class TorchTarget:
    """A target of the llama family: norms before attention and network, rotary positions, a gated network with SiLU.

    Raises UnsupportedModel for a recipe with anything else.
    """

    def __init__(self, file: ModelFile, spec: ModelSpec, device: torch.device) -> None:
        _check_recipe(file, spec)
        self.spec = spec
        self.device = device
        self._parts: dict[TensorRef, Matrix] = {}
        self._whole: dict[str, Matrix] = {}
        for name, shape in spec.tensor_shapes().items():
            kind = file.tensors[name].type
            values = torch.from_numpy(dequantize(kind, file.data(name), shape)).to(device)
            self._whole[name] = Matrix(values, shape[-1] if kind == GGMLType.I2_S else kind.block_elements)
        assert spec.token_embd is not None and isinstance(spec.output, str)  # whole models have both
        self._output: str = spec.output
        self.embedding = self._whole[spec.token_embd].values * spec.embedding_scale
        ropes = {attention_of(layer).rope for layer in spec.layers}
        self._ropes = {rope: Rotation(rope).to(device) for rope in ropes if rope is not None}

    @property
    def output(self) -> torch.Tensor:
        """The output matrix, (n_vocab, n_embd)."""
        return self._whole[self._output].values

    @torch.inference_mode()
    def features(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: KVCache | None = None,
        taps: Taps = True,
    ) -> torch.Tensor:
        """Rows after the last norm, (n, m, n_embd), which the output matrix reads; or those after the layers in taps,
        concatenated.

        tokens, positions: (n, m) int64.  mask: what a row sees, True where it does: (n, 1, m, m), or with a cache
        (n, 1, m, k) over its first k positions, where the rows' own keys are put before that.
        """
        spec = self.spec
        x, tapped = self.embedding[tokens], dict[int, torch.Tensor]()
        turns = {rope: rotation(positions) for rope, rotation in self._ropes.items()}
        for index, layer in enumerate(spec.layers):
            rope = attention_of(layer).rope
            at = positions, None if rope is None else turns[rope]
            added = self._attention(index, attention_of(layer), x, *at, mask, cache)
            x = torch.add(x, added, alpha=spec.residual_scale)
            x = tapped[index] = torch.add(x, self._dense(dense_of(layer), x), alpha=spec.residual_scale)
        return self._norm(spec.output_norm, x) if isinstance(taps, bool) else torch.cat([tapped[i] for i in taps], -1)

    def after_last_norm(self, rows: torch.Tensor) -> torch.Tensor:
        """Features (..., n_embd) of rows of several layers (..., n_taps * n_embd), the model's last one last."""
        return self._norm(self.spec.output_norm, rows[..., -self.spec.n_embd :])

    @property
    def last_norm(self) -> torch.Tensor:
        """The weights of the last norm, (n_embd,)."""
        assert self.spec.output_norm is not None
        return self._part(self.spec.output_norm).values

    @torch.inference_mode()
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (..., n_vocab) of features (..., n_embd)."""
        return self._products(features, self._output)[0]

    def side_by_side(self, texts: Sequence[Sequence[int] | TokenIds]) -> tuple[torch.Tensor, ...]:
        """(tokens, positions, mask) of texts from their beginning, for `features`; the short ones are padded."""
        longest = max(map(len, texts))
        tokens = torch.zeros((len(texts), longest), dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.from_numpy(np.asarray(text, dtype=np.int64))
        place = torch.arange(longest, device=self.device)
        return tokens.to(self.device), place.expand(len(texts), -1), (place[:, None] >= place)[None, None]

    def text_features(self, texts: Sequence[TokenIds], taps: Taps = True) -> list[torch.Tensor]:
        """Features of whole texts, (n, n_embd) each, or rows of layers, computed side by side."""
        rows = self.features(*self.side_by_side(texts), taps=taps)
        return [rows[row, : len(text)] for row, text in enumerate(texts)]

    def _attention(
        self,
        index: int,
        block: Attention,
        x: torch.Tensor,
        positions: torch.Tensor,
        turns: Turns | None,
        mask: torch.Tensor,
        cache: KVCache | None,
    ) -> torch.Tensor:
        """What attention adds. index: of the layer, in the cache."""
        h = self._norm(block.norm, x)
        q, k, v = self._products(h, block.q, block.k, block.v)
        q, k, v = self._add(q, block.q_bias), self._add(k, block.k_bias), self._add(v, block.v_bias)
        q, k, v = (rows.unflatten(-1, (-1, block.head_dim)) for rows in (q, k, v))
        if block.qk_norm == "per_head":
            q, k = self._norm(block.q_norm, q), self._norm(block.k_norm, k)
        if turns is not None:
            q, k = turned(q, turns), turned(k, turns)
        k, v = k.half(), v.half()
        if cache is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            k, v = cache.put(index, positions, k, v, mask.shape[-1])
        y = _attend(q * block.scale, k.float(), v.float(), mask)
        return self._add(self._products(y, block.output)[0], block.output_bias)

    def _dense(self, block: Dense, x: torch.Tensor) -> torch.Tensor:
        """What a feed-forward network adds."""
        gate, up = self._products(self._norm(block.norm, x), block.gate, block.up)
        return self._products(functional.silu(gate) * up, block.down)[0]

    def _products(self, x: torch.Tensor, *matrices: TensorRef) -> list[torch.Tensor]:
        """Each matrix times the rows of x, which are rounded once per size of block."""
        rounded: dict[int, torch.Tensor] = {1: x}
        products = []
        for ref in matrices:
            matrix = self._part(ref)
            if matrix.block not in rounded:
                rounded[matrix.block] = round_activations(x, matrix.block)
            products.append(functional.linear(rounded[matrix.block], matrix.values))
        return products

    def _norm(self, ref: TensorRef | None, x: torch.Tensor) -> torch.Tensor:
        if ref is None:
            return x
        return functional.rms_norm(x, x.shape[-1:], self._part(ref).values, self.spec.norm_epsilon)

    def _add(self, x: torch.Tensor, bias: TensorRef | None) -> torch.Tensor:
        return x if bias is None else x + self._part(bias).values

    def _part(self, ref: TensorRef) -> Matrix:
        if not isinstance(ref, TensorRows):
            return self._whole[ref]
        if ref not in self._parts:
            whole = self._whole[ref.name]
            self._parts[ref] = Matrix(whole.values[ref.first : ref.last], whole.block)
        return self._parts[ref]


class Rotation(nn.Module):
    """Rotates heads by their positions; see RopeSpec."""

    def __init__(self, rope: RopeSpec) -> None:
        super().__init__()
        self.rope = rope.of_context(0)
        frequencies = torch.tensor(self.rope.inverse_frequencies, dtype=torch.float64)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: torch.Tensor) -> Turns:
        """For `turned`. positions: (n, m)."""
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        cosine, sine = (part * self.rope.magnitude for part in (angles.cos(), angles.sin()))
        return cosine.float(), sine.float(), self.rope


Turns = tuple[torch.Tensor, torch.Tensor, RopeSpec]  # cosines and sines, (n, m, 1, n_dims / 2), and their rope


def turned(heads: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Heads rotated by their positions, (n, m, n_heads, head_dim) float32."""
    cosine, sine, rope = turns
    is_interleaved = rope.kind == "interleaved"
    pairs = heads[..., : rope.n_dims].unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    axis = -1 if is_interleaved else -2
    first, second = pairs.unbind(axis)
    pairs = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=axis).flatten(-2)
    return pairs if rope.n_dims == heads.shape[-1] else torch.cat([pairs, heads[..., rope.n_dims :]], dim=-1)


def round_activations(x: torch.Tensor, block: int) -> torch.Tensor:
    """As edgeinfer.backends.reference.round_activations; any shape."""
    blocks = x.unflatten(-1, (-1, block))
    largest = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=-1, keepdim=True)
    # Blocks of zeros stay zeros: their codes are at most 127, their scale below 1e-32.
    codes = (blocks * (127.0 / largest.clamp(min=1e-30))).round_()
    return codes.mul_(largest / 127.0).flatten(-2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """softmax(q k) v by head, (n, m, n_heads * head_dim); heads of keys serve groups of consecutive queries.

    q: (n, m, n_heads, head_dim), scaled.  k, v: (n, n_kv_heads, j, head_dim).  mask: (n or 1, 1, m, j).
    """
    n, m, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    groups = q.view(n, m, n_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).reshape(n, n_kv_heads, -1, head_dim)
    scores = (groups @ k.transpose(-1, -2)).view(n, n_heads, m, -1)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    y = weights.view(n, n_kv_heads, -1, weights.shape[-1]) @ v
    return y.view(n, n_heads, m, head_dim).transpose(1, 2).reshape(n, m, -1)


def _check_recipe(file: ModelFile, spec: ModelSpec) -> None:
    """Raises UnsupportedModel for a layer with a part that the class does not compute."""
    known = {kind: (*names, *_NOT_COMPUTED[kind]) for kind, names in BLOCKS.items()}
    check_blocks(spec.blocks(), known, "training", file.path)
    for what in _beyond(spec):
        raise UnsupportedModel(
            f"{file.path}: a head cannot be trained for {spec.architecture}, which has {what}; it can for llama, "
            "qwen2, qwen3 and what is built like them"
        )


def _beyond(spec: ModelSpec) -> Iterator[str]:
    """What a spec has that is not computed here, in words."""
    if spec.logit_soft_cap is not None:
        yield "soft caps"
    if spec.logit_scale != 1.0:
        yield "a scale on the logits"
    for name, block in spec.blocks():
        if isinstance(block, Attention) and block.qk_norm == "whole":
            yield f"norms over whole queries in {name}"
        if isinstance(block, Attention) and block.n_in != spec.n_embd:
            yield f"attention from rows of {block.n_in} numbers in {name}"
        defaults = {field.name: field.default for field in fields(block)}
        for role, words in _NOT_COMPUTED[type(block)].items():
            if getattr(block, role) != defaults[role]:
                yield f"{words} in {name}"
