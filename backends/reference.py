"""The oracle: a forward pass in plain numpy, written like the textbook. Slow; other backends are compared with it.

Every token goes through the same operations on the same arrays whatever the rest of the batch, so that the result is
the same bits for any cutting into batches, and for a branch of a tree as for the chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import (
    Progress,
    QueryScales,
    check_cache,
    check_parents,
    check_path,
    check_rows,
    check_taps,
    check_tokens,
    common_length,
)
from edgeinfer.errors import EdgeInferError, Interrupted, ShapeError, UnsupportedModel
from edgeinfer.models import Activation, ModelSpec, RopeSpec, TensorRef, TensorRows, read_spec
from edgeinfer.models.formats import check_type, dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.types import CacheType, Device, LogitsRows, MemoryPlan, MemoryUse, Output

Floats = NDArray[np.float32]
Activations = Literal["float32", "int8"]
_CACHE_DTYPES: dict[CacheType, type[np.floating]] = {"f16": np.float16, "q8_0": np.float32}


class ReferenceBackend:
    """Runs models with numpy in float32; the device is not looked at.

    activations "int8": the input of a quantised matrix is first rounded as the native engine rounds it (see
    `round_activations`). The two still sum in another order: tokens agree to about 1e-6 of the spread of the logits
    until this moves one number over the edge of a rounding; that token and those after it may part by 1e-2.
    """

    name = "reference"

    def __init__(self, activations: Activations = "float32") -> None:
        self.activations = activations

    def read_spec(self, model: ModelFile) -> ModelSpec:
        """See edgeinfer.models.read_spec. Raises UnsupportedModel."""
        return read_spec(model)

    def plan(
        self,
        model: ModelFile,
        spec: ModelSpec,
        n_ctx: int,
        n_batch: int = 512,
        n_threads: int = 1,
        cache_type: CacheType = "f16",
    ) -> MemoryPlan:
        """Bytes of the weights in float32, the KV cache, and the activations of n_batch tokens.

        The cache is in float16; for q8_0 in float32, rounded to 8 bits.
        Raises UnsupportedModel for a tensor type that `dequantize` does not know, InvalidArgument for heads that q8_0
        does not fit.
        """
        check_cache(cache_type, spec)
        for name in spec.tensor_shapes():
            _check_type(model, name)
        n_batch = min(n_batch, n_ctx)
        n_weights = sum(math.prod(shape) for shape in spec.tensor_shapes().values())
        n_kv = spec.n_layers * n_ctx * 2 * spec.n_kv_heads * spec.head_dim
        heads = spec.n_heads + 2 * spec.n_kv_heads
        n_activations = n_batch * (2 * spec.n_embd + heads * spec.head_dim + 2 * spec.n_ff)
        use = MemoryUse(4 * n_weights, _CACHE_DTYPES[cache_type]().itemsize * n_kv, 4 * n_activations)
        return MemoryPlan(n_ctx, n_batch, use, cache_type)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> ReferenceSession:
        """Dequantise all weights. Raises UnsupportedModel. The file may be closed afterwards."""
        return ReferenceSession(spec, plan, self.read_weights(model, spec.tensor_shapes(), progress))

    def read_weights(
        self, model: ModelFile, shapes: Mapping[str, tuple[int, ...]], progress: Progress | None = None
    ) -> dict[str, Weights]:
        """Some tensors of a file, dequantised. Raises UnsupportedModel."""
        weights = {}
        for done, (name, shape) in enumerate(shapes.items(), start=1):
            _check_type(model, name)
            kind = model.tensors[name].type
            weights[name] = Weights(dequantize(kind, model.data(name), shape), self._block(kind, shape))
            if progress is not None:
                progress(done / len(shapes))
        return weights

    def _block(self, kind: GGMLType, shape: tuple[int, ...]) -> int:
        """Block in which the input of such a matrix is rounded."""
        if self.activations != "int8":
            return 1
        return {GGMLType.I2_S: shape[-1], GGMLType.Q2_0: 32}.get(kind, kind.block_elements)


@dataclass(frozen=True)
class Weights:
    """A matrix (n_out, n_in) or vector (n,), and the block that its input is rounded in, 1 for not at all."""

    values: Floats
    block: int


class ReferenceDecoder:
    """The decoder of a ModelSpec with its KV cache: what sessions of models and of draft heads have in common."""

    def __init__(self, spec: ModelSpec, plan: MemoryPlan, weights: dict[str, Weights]) -> None:
        self.spec = spec
        self.n_ctx = plan.n_ctx
        self.n_batch = plan.n_batch
        self._plan = plan
        self._weights = weights
        shape = (spec.n_layers, plan.n_ctx, spec.n_kv_heads, spec.head_dim)
        self._keys = np.zeros(shape, dtype=_CACHE_DTYPES[plan.cache_type])  # after rope
        self._values = np.zeros_like(self._keys)
        self._text: list[int] = []  # committed
        self._parents = np.empty(0, dtype=np.int32)  # of the last forward; its row i is in slot n_past + i
        self._tokens = np.empty(0, dtype=np.int32)
        self._ropes = [None if part.rope is None else part.rope.of_context(plan.n_ctx) for part in spec.attention]
        self._query_scales = QueryScales.of(spec, plan.n_ctx)
        self._stopped = False

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        self._check_open()
        return len(self._text)

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        self._check_open()
        rows = check_path(path, self._parents)
        slots = slice(self.n_past, self.n_past + len(rows))
        self._keys[:, slots] = self._keys[:, self.n_past + rows]
        self._values[:, slots] = self._values[:, self.n_past + rows]
        self._text += self._tokens[rows].tolist()
        self._parents = np.empty(0, dtype=np.int32)

    def truncate(self, n_past: int) -> None:
        """See Session.truncate."""
        self._check_open()
        if not 0 <= n_past <= self.n_past:
            raise ShapeError(f"n_past must be in 0..{self.n_past}: found {n_past}")
        del self._text[n_past:]
        self._parents = np.empty(0, dtype=np.int32)

    def memory(self) -> MemoryUse:
        """Bytes of the weights and the KV cache that are held, and of the activations that were planned."""
        self._check_open()
        weights = sum(weights.values.nbytes for weights in self._weights.values())
        return MemoryUse(weights, self._keys.nbytes + self._values.nbytes, self._plan.use.activations)

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._stopped = True

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._weights = {}
        self._keys = self._values = np.empty((0, 0, 0, 0), dtype=self._keys.dtype)

    def _check_open(self) -> None:
        if not self._weights:
            raise EdgeInferError("this session is closed")

    def _layers(
        self, x: Floats, parents: NDArray[np.int32], rows: NDArray[np.int32], taps: tuple[int, ...]
    ) -> tuple[Floats, Floats]:
        """Logits (m, n_logits) of some rows of x (n, n_embd), and what is tapped, (n_taps, n, n_embd).

        parents: (n_pending + n,), of the rows that are pending and of these behind them.
        """
        n_pending = len(parents) - len(x)
        paths = visible_slots(parents, self.n_past)[n_pending:]
        tapped = {}
        for layer in range(self.spec.n_layers):
            x = x + scale(self._attention(layer, x, paths), self.spec.residual_scale)
            x = x + scale(self._feed_forward(layer, x), self.spec.residual_scale)
            tapped[layer] = x
        x = tapped[self.spec.n_layers] = self._norm(self.spec.output_norm, x)
        logits = self._linear(self.spec.output, None, x[rows])
        logits = soft_cap(scale(logits, self.spec.logit_scale), self.spec.logit_soft_cap)
        return logits, np.array([tapped[layer] for layer in taps], dtype=np.float32)

    def _attention(self, layer: int, x: Floats, paths: list[NDArray[np.intp]]) -> Floats:
        spec, names = self.spec, self.spec.layers[layer]
        q, k, v = self._queries_keys_values(layer, self._attention_inputs(layer, x))
        positions = np.array([len(path) - 1 for path in paths])
        rope, window = self._ropes[layer], spec.attention[layer].window
        if rope is not None:
            q, k = rotate(q, positions, rope), rotate(k, positions, rope)
        q = q * self._query_scales.at(positions)[:, None, None]
        if self._plan.cache_type == "q8_0":
            q, k, v = (
                round_activations(heads.reshape(-1, spec.head_dim), 32).reshape(heads.shape) for heads in (q, k, v)
            )
        slots = [path[-1] for path in paths]
        self._keys[layer, slots], self._values[layer, slots] = k, v
        y = np.empty_like(q)
        for i, path in enumerate(paths):
            self._poll()
            seen = path if window is None else path[-window:]
            y[i] = attend(q[i], self._keys[layer, seen], self._values[layer, seen], spec.attention_soft_cap)
        heads = self._norm(names.attn_sub_norm, y.reshape(len(x), -1))
        out = self._linear(names.attn_output, names.attn_output_bias, heads)
        return self._norm(names.attn_post_norm, out)

    def _attention_inputs(self, layer: int, x: Floats) -> Floats:
        """What queries, keys and values are made of, (n, n_in)."""
        return self._norm(self.spec.layers[layer].attn_norm, x)

    def _queries_keys_values(self, layer: int, h: Floats) -> tuple[Floats, Floats, Floats]:
        """(n, heads, head_dim) each, with norms on queries and keys where the layer has them."""
        spec, names = self.spec, self.spec.layers[layer]
        q = self._linear(names.attn_q, names.attn_q_bias, h)
        k = self._linear(names.attn_k, names.attn_k_bias, h)
        v = self._linear(names.attn_v, names.attn_v_bias, h)
        if spec.qk_norm == "whole":
            q, k = self._norm(names.attn_q_norm, q), self._norm(names.attn_k_norm, k)
        q, k, v = (rows.reshape(len(h), -1, spec.head_dim) for rows in (q, k, v))
        if spec.qk_norm == "per_head":
            q, k = self._norm(names.attn_q_norm, q), self._norm(names.attn_k_norm, k)
        return q, k, v

    def _feed_forward(self, layer: int, x: Floats) -> Floats:
        """Gated network: SwiGLU or GeGLU (Shazeer, arXiv:2002.05202)."""
        names = self.spec.layers[layer]
        h = self._norm(names.ffn_norm, x)
        gate, up = self._linear(names.ffn_gate, None, h), self._linear(names.ffn_up, None, h)
        gated = self._norm(names.ffn_sub_norm, ACTIVATIONS[self.spec.activation](gate) * up)
        out = self._linear(names.ffn_down, None, gated)
        return self._norm(names.ffn_post_norm, out)

    def _norm(self, weight: TensorRef | None, x: Floats) -> Floats:
        """RMS norm over the last axis; x itself where the model has none here."""
        return x if weight is None else rms_norm(x, self._part(weight).values, self.spec.norm_epsilon)

    def _linear(self, matrix: TensorRef, bias: TensorRef | None, x: Floats) -> Floats:
        """Matrix times each row of x, plus bias: (n, n_in) to (n, n_out)."""
        weights = self._part(matrix)
        if weights.block > 1:
            x = round_activations(x, weights.block)
        y = np.empty((len(x), len(weights.values)), dtype=np.float32)
        for i, row in enumerate(x):  # one at a time: BLAS sums in another order for another number of rows
            self._poll()
            y[i] = weights.values @ row
        return y if bias is None else y + self._part(bias).values

    def _part(self, ref: TensorRef) -> Weights:
        """A tensor, or some rows of one."""
        if isinstance(ref, TensorRows):
            whole = self._weights[ref.name]
            return Weights(whole.values[ref.first : ref.last], whole.block)
        return self._weights[ref]

    def _poll(self) -> None:
        """Raises Interrupted if `interrupt` was called since the pass began."""
        if self._stopped:
            raise Interrupted("the forward pass was interrupted; the session is as it was before")


class ReferenceSession(ReferenceDecoder):
    """See edgeinfer.backends.base.Session."""

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """See Session.forward. The batch may be larger than n_batch; it then takes more memory than planned."""
        self._check_open()
        ids = check_tokens(tokens, self.spec.n_vocab, self.n_past, self.n_ctx)
        links = check_parents(parents, len(ids))
        rows = check_rows(logits, len(ids))
        taps = check_taps(hidden, self.spec.n_layers)
        self._stopped = False
        self._parents = np.empty(0, dtype=np.int32)
        x = scale(self._weights[self.spec.token_embd].values[ids], self.spec.embedding_scale)  # (n, n_embd)
        out, tapped = self._layers(x, links, rows, taps)
        self._parents, self._tokens = links, ids
        return Output(out, tapped if taps else None)

    def recall(self, tokens: ArrayLike) -> int:
        """See Session.recall. Finds what is committed now."""
        self.truncate(common_length(self._text, np.asarray(tokens).tolist()))
        return self.n_past


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """x / sqrt(mean(x^2) + epsilon) * weight, by row (Zhang and Sennrich, arXiv:1910.07467). x: (n, n_embd)."""
    root: Floats = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return x / root * weight


def rotate(x: Floats, positions: NDArray[np.intp], rope: RopeSpec) -> Floats:
    """Heads with their position turned in. x: (n, heads, head_dim), positions: (n,); see RopeSpec."""
    angles = positions[:, None] * np.array(rope.inverse_frequencies)  # (n, n_dims / 2), float64
    cosine = (np.cos(angles) * rope.magnitude).astype(np.float32)[:, None]
    sine = (np.sin(angles) * rope.magnitude).astype(np.float32)[:, None]
    half = rope.n_dims // 2
    first, second = {
        "interleaved": (slice(0, rope.n_dims, 2), slice(1, rope.n_dims, 2)),
        "halves": (slice(0, half), slice(half, rope.n_dims)),
    }[rope.kind]
    turned = x.copy()
    turned[..., first] = x[..., first] * cosine - x[..., second] * sine
    turned[..., second] = x[..., first] * sine + x[..., second] * cosine
    return turned


def attend(
    q: Floats, keys: NDArray[np.floating], values: NDArray[np.floating], score_cap: float | None = None
) -> Floats:
    """Attention of one token: softmax(soft_cap(q k)) v, (n_heads, head_dim).

    q: (n_heads, head_dim), scaled.  keys, values: (t, n_kv_heads, head_dim), those that the token sees. With fewer
    heads of keys than of queries, each serves a group of consecutive queries (Ainslie et al., arXiv:2305.13245).
    """
    n_heads, head_dim = q.shape
    n_kv_heads = keys.shape[1]
    groups = q.reshape(n_kv_heads, n_heads // n_kv_heads, head_dim)
    k, v = keys.astype(np.float32).transpose(1, 2, 0), values.astype(np.float32).transpose(1, 0, 2)
    scores = soft_cap(groups @ k, score_cap)  # (n_kv_heads, group, t)
    weights: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).reshape(n_heads, head_dim)


def scale(x: Floats, factor: float) -> Floats:
    """x * factor, the factor rounded to float32; x itself where that is 1."""
    return x if factor == 1.0 else x * np.float32(factor)


def soft_cap(x: Floats, cap: float | None) -> Floats:
    """cap * tanh(x * (1 / cap)), in float32, 1 / cap rounded once (Bello et al., arXiv:1611.09940); x where it is None.

    For an engine with an exp of its own: tanh(y) = (1 - t) / (1 + t), t = exp(-2 |y|), with the sign of y; its error
    is 1e-7, here 1e-7 * cap.
    """
    if cap is None:
        return x
    y: Floats = np.tanh(x * np.float32(1 / cap)) * np.float32(cap)
    return y


def relu2(x: Floats) -> Floats:
    """max(x, 0)^2 (So et al., arXiv:2109.08668)."""
    y: Floats = np.square(np.maximum(x, np.float32(0)))
    return y


def silu(x: Floats) -> Floats:
    """x * sigmoid(x) = x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # far below zero x / inf is right
        y: Floats = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Floats) -> Floats:
    """x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, arXiv:1606.08415, section 2).

    Computed as x / (1 + exp(-2 u)), which is silu with another exponent: -2 u = -x * (a + b * (x * x)) in float32,
    a = 2 sqrt(2 / pi) and b = 0.044715 a rounded once.
    """
    a = np.float32(2 * math.sqrt(2 / math.pi))
    b = np.float32(0.044715 * 2 * math.sqrt(2 / math.pi))
    with np.errstate(over="ignore"):
        y: Floats = x / (1 + np.exp(-x * (a + b * (x * x))))
    return y


ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {"silu": silu, "gelu_tanh": gelu_tanh, "relu2": relu2}


def round_activations(x: Floats, block: int) -> Floats:
    """x rounded to 8 bits in blocks along each row: a * scale, a = round(x * 127 / max|x|), scale = max|x| / 127.

    Half rounds to even; all in float32. Blocks below 1e-30, whose inverse would overflow, become zeros.
    x: (n, n_in), n_in a multiple of block.
    """
    blocks = x.reshape(len(x), x.shape[1] // block, block)
    largest: Floats = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse: Floats = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 1e-30)
    codes: Floats = np.rint(blocks * inverse)
    return (codes * (largest / np.float32(127))).reshape(x.shape)


def visible_slots(parents: NDArray[np.int32], n_past: int) -> list[NDArray[np.intp]]:
    """For each row the slots of what it sees, in order: all that is committed, its ancestors, itself."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents.tolist()):
        before = paths[parent] if parent >= 0 else list(range(n_past))
        paths.append([*before, n_past + row])
    return [np.array(path, dtype=np.intp) for path in paths]


def _check_type(model: ModelFile, name: str) -> None:
    """Raises UnsupportedModel if the tensor cannot be dequantised."""
    try:
        check_type(model.tensors[name].type)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{model.path}: tensor {name}: {error}") from None
