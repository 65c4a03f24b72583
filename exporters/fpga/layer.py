"""One layer of a folder for a board, stage by stage, with the arithmetic of the HLS kernels.

All floats are float32, each operation rounded by itself, in the orders of edgeinfer.hls.arithmetic and
edgeinfer.hls.attention; integers are exact. So every machine gives the same bits. Keys and values are float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.hls.arithmetic import quantise, rms_norm
from edgeinfer.hls.attention import exp_of_negative, prefill_attention
from edgeinfer.hls.files.golden import products
from edgeinfer.hls.packing import Trits

Floats = NDArray[np.float32]
Stage = tuple[str, NDArray[Any]]
_Array = TypeVar("_Array", bound=NDArray[Any])


class LayerWeights(Protocol):
    """What a layer is computed from."""

    facts: Mapping[str, Any]  # `model` of the manifest

    def matrix(self, phase: str) -> tuple[Trits, Floats]:
        """Trits (n_out, n_in) and the scale of each row."""
        ...

    def vector(self, name: str) -> Floats:
        """A norm, by its name without the layer."""
        ...

    def rotations(self, n: int) -> tuple[Floats, Floats]:
        """Cosines and sines of the first n positions, (n, n_dims / 2) each."""
        ...


def stages_of(layer: LayerWeights, x: Floats) -> Iterator[Stage]:
    """Each stage with its name, from what goes in, x (n_tokens, n_embd) at positions 0 and on, to what comes out."""
    run = _Run(layer, [])
    yield "input", x
    x = run.attention(x)
    yield from run.taken()
    x = run.network(x)
    yield from run.taken()
    yield "output", x


@dataclass
class _Run:
    """A layer that is being computed."""

    layer: LayerWeights
    stages: list[Stage]  # those since `taken` was called

    def taken(self) -> list[Stage]:
        """The stages until now, which are forgotten."""
        found, self.stages = self.stages, []
        return found

    def attention(self, x: Floats) -> Floats:
        facts = self.layer.facts
        n, head_dim = len(x), facts["head_dim"]
        n_q, n_kv = facts["n_heads"] * head_dim, facts["n_kv_heads"] * head_dim
        found = self._product("qkv", self._norm("attn_norm", x))
        q, k, v = (rows.reshape(n, -1, head_dim) for rows in np.split(found, [n_q, n_q + n_kv], axis=1))
        if facts["qk_norm"] != "none":
            is_whole = facts["qk_norm"] == "whole"
            q, k = (self._head_norm(name, heads, is_whole) for name, heads in (("q_norm", q), ("k_norm", k)))
        q, k = self._note("q", self._rotated(q)), self._note("k", self._rotated(k))
        keys, values = (heads.transpose(1, 0, 2).astype(np.float16) for heads in (k, v))
        heads = prefill_attention(q, keys, values, facts["attention_scale"])
        added = self._product("o", self._norm("attn_sub_norm", self._note("attention", heads.reshape(n, -1))))
        return self._note("attention_output", x + self._norm("attn_post_norm", added))

    def network(self, x: Floats) -> Floats:
        gate, up = np.split(self._product("gate_up", self._norm("ffn_norm", x)), 2, axis=1)
        gated = self._note("gated", activation(self.layer.facts["activation"], gate) * up)
        added = self._product("down", self._norm("ffn_sub_norm", gated))
        return x + self._norm("ffn_post_norm", added)

    def _product(self, phase: str, x: Floats) -> Floats:
        trits, scales = self.layer.matrix(phase)
        q, x_scale = quantise(x)
        y = products(trits, self._note(f"{phase}.x", q))
        self._note(f"{phase}.x_scale", x_scale)
        self._note(f"{phase}.y", y)
        return self._note(f"{phase}", (y.astype(np.float32) * scales) * x_scale[:, None])

    def _norm(self, name: str, x: Floats) -> Floats:
        """x itself where the model has no such norm."""
        facts = self.layer.facts
        if name not in facts["norms"]:
            return x
        return self._note(name, rms_norm(x, self.layer.vector(name), facts["norm_epsilon"]))

    def _head_norm(self, name: str, heads: Floats, is_whole: bool) -> Floats:
        rows = heads.reshape(len(heads), -1) if is_whole else heads.reshape(-1, heads.shape[-1])
        normed: Floats = rms_norm(rows, self.layer.vector(name), self.layer.facts["norm_epsilon"])
        return self._note(name, normed.reshape(heads.shape))

    def _rotated(self, heads: Floats) -> Floats:
        rope = self.layer.facts["rope"]
        cosines, sines = (table[:, None] for table in self.layer.rotations(len(heads)))
        n_dims = rope["n_dims"]
        is_interleaved = rope["kind"] == "interleaved"
        first = slice(0, n_dims, 2) if is_interleaved else slice(0, n_dims // 2)
        second = slice(1, n_dims, 2) if is_interleaved else slice(n_dims // 2, n_dims)
        turned = heads.copy()
        turned[..., first] = heads[..., first] * cosines - heads[..., second] * sines
        turned[..., second] = heads[..., first] * sines + heads[..., second] * cosines
        return turned

    def _note(self, name: str, values: _Array) -> _Array:
        self.stages.append((name, values))
        return values


def activation(name: str, x: Floats) -> Floats:
    """The function in front of gate * up; see edgeinfer.models.spec.Activation."""
    if name == "relu2":
        positive: Floats = np.maximum(x, np.float32(0))
        return positive * positive
    if name == "silu":
        return x * sigmoid(x)
    a, b = np.float32(1.5957691216057308), np.float32(0.07135481282553254)  # gelu_tanh is silu with this exponent
    return x * sigmoid(x * (a + b * (x * x)))


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x), of an exponential of negative numbers alone."""
    e = exp_of_negative(-np.abs(x))
    result: Floats = np.where(x < 0, e, np.float32(1)) / (np.float32(1) + e)
    return result
