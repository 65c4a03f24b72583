"""What an architecture file says about a model.

A `ModelSpec` is data: sizes, the names of the tensors and the recipe of a layer. The backends follow it; nothing here
computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

RopeKind = Literal["interleaved", "halves"]  # pairs (2i, 2i+1), ggml's "norm"; pairs (i, i + n_dims/2), "neox"
# x sigmoid(x); x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2; max(x, 0)^2
Activation = Literal["silu", "gelu_tanh", "relu2"]
QKNorm = Literal["per_head", "whole"]  # over the head_dim numbers of each head; over all heads of a token together


@dataclass(frozen=True)
class TensorRows:
    """Rows first..last - 1 of a tensor: of a matrix (n_out, n_in), or elements of a vector (n_out,).

    Where a file has several matrices as one. GGUF stores the rows one after the other, so these are a run of bytes.
    """

    name: str
    first: int
    last: int


TensorRef: TypeAlias = str | TensorRows  # the whole tensor of that name, or a part of one


@dataclass(frozen=True)
class LongRope:
    """Other frequencies for sessions of more than n_ctx positions (LongRoPE, Ding et al., arXiv:2402.13753)."""

    n_ctx: int
    inverse_frequencies: tuple[float, ...]  # (n_dims / 2,)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., arXiv:2104.09864).

    Pair i is turned by position * inverse_frequencies[i] radians and multiplied by magnitude. The first n_dims numbers
    of a head are turned; the others stay.
    """

    kind: RopeKind
    n_dims: int
    inverse_frequencies: tuple[float, ...]  # (n_dims / 2,)
    magnitude: float = 1.0
    long: LongRope | None = None

    def of_context(self, n_ctx: int) -> RopeSpec:
        """The rotation in a session of n_ctx positions, without `long`."""
        if self.long is None or n_ctx <= self.long.n_ctx:
            return replace(self, long=None)
        return replace(self, inverse_frequencies=self.long.inverse_frequencies, long=None)


@dataclass(frozen=True)
class AttentionSpec:
    """What differs between the attention of one layer and of another.

    rope: None where queries and keys are not turned.  window: number of positions that a token sees, its own among
    them: position p sees p - window + 1 .. p; None for all. In a tree these are the nearest nodes of its own branch.
    """

    rope: RopeSpec | None
    window: int | None = None


@dataclass(frozen=True)
class QueryTemperature:
    """Queries multiplied by 1 + scale * ln(1 + floor(position / n_positions)) (Llama 4, Ministral 3).

    models/rope.py has these factors as numbers that are the same on every machine: query_factors.
    """

    scale: float
    n_positions: int


@dataclass(frozen=True)
class LayerTensors:
    """Tensors of one layer; None where the model has none. Matrices are (n_out, n_in)."""

    attn_norm: TensorRef | None
    attn_q: TensorRef
    attn_k: TensorRef
    attn_v: TensorRef
    attn_output: TensorRef
    ffn_norm: TensorRef | None
    ffn_gate: TensorRef
    ffn_up: TensorRef
    ffn_down: TensorRef
    attn_post_norm: TensorRef | None = None  # of what attention gives, before it is added
    ffn_post_norm: TensorRef | None = None  # of what the feed-forward network gives, before it is added
    attn_sub_norm: TensorRef | None = None  # (n_heads * head_dim,), of what goes into attn_output
    ffn_sub_norm: TensorRef | None = None  # (n_ff,), of what goes into ffn_down
    attn_q_norm: TensorRef | None = None  # (head_dim,) or (n_heads * head_dim,), see ModelSpec.qk_norm
    attn_k_norm: TensorRef | None = None
    attn_q_bias: TensorRef | None = None
    attn_k_bias: TensorRef | None = None
    attn_v_bias: TensorRef | None = None
    attn_output_bias: TensorRef | None = None


@dataclass(frozen=True)
class GateTensors:
    """What a draft head begins with, in place of a token's embedding e alone (Dovetail, arXiv:2412.18934).

    With the feature f that comes with the token: a = feature f, b = silu(token norm(e, token_norm)),
    s = sigmoid(mix [a; b]), x = s a + (1 - s) b. feature and token are (n_embd, n_embd), mix (n_embd, 2 n_embd).
    """

    feature: str
    token_norm: str
    token: str
    mix: str


@dataclass(frozen=True)
class PairTensors:
    """What the one layer of an EAGLE-3 head attends from, in place of norm(x, attn_norm) (Li et al., arXiv:2503.01840).

    With the embedding e of a token and the feature f that comes with it, queries, keys and values are products with
    [norm(e, token_norm); norm(f, feature_norm)], and what the layer adds to is x = f, or norm(f, feature_norm) where
    normed_residual is set.
    """

    token_norm: str
    feature_norm: str
    normed_residual: bool = False


@dataclass(frozen=True)
class CombineTensors:
    """What makes a head's features of the target's hidden rows h, n_rows numbers of several layers side by side.

    f = matrix norm(h), once for each row of the target. The norm is over each n_normed numbers of h, its weights are
    (n_rows,); matrix is (n_embd, n_rows).
    """

    matrix: str
    norm: str | None
    n_rows: int
    n_normed: int


@dataclass(frozen=True)
class ModelSizes:
    """What a session tells of its model on any backend. n_ctx_train: positions that the model was trained with."""

    architecture: str
    n_vocab: int
    n_ctx_train: int
    n_layers: int
    n_embd: int


@dataclass(frozen=True)
class ModelSpec(ModelSizes):
    """Sizes, tensor names and layer recipe of a decoder-only transformer.

    With norm(x) = x where the layer has no such tensor, a token becomes a row of logits by

        x = embedding_scale * token_embd[token]
        each layer:
            h = norm(x, attn_norm);  q, k, v = the three products with h, plus their biases
            q, k = rope(norm(q, attn_q_norm)), rope(norm(k, attn_k_norm))
            scores = cap(q * attention_scale * temperature(position) @ k, attention_soft_cap) over the window
            a = norm(softmax(scores) @ v, attn_sub_norm) @ attn_output + attn_output_bias
            x = x + residual_scale * norm(a, attn_post_norm)
            h = norm(x, ffn_norm);  f = norm(activation(gate(h)) * up(h), ffn_sub_norm) @ ffn_down
            x = x + residual_scale * norm(f, ffn_post_norm)
        logits = cap(logit_scale * (norm(x, output_norm) @ output), logit_soft_cap)

    cap(y, c) = c * tanh(y / c), or y where c is None. All norms are RMS norms with norm_epsilon. A draft head has a
    gate or a pair behind the first line, mostly embeddings in the file of its target, and rows of output for a part of
    the tokens only; with combine its features are made of several rows of the target.
    """

    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_epsilon: float
    token_embd: str
    output_norm: str | None
    output: str  # the same tensor as token_embd where the embeddings are tied
    layers: tuple[LayerTensors, ...]
    attention: tuple[AttentionSpec, ...]  # (n_layers,)
    attention_scale: float
    activation: Activation = "silu"
    qk_norm: QKNorm | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    query_temperature: QueryTemperature | None = None
    gate: GateTensors | None = None
    pair: PairTensors | None = None
    combine: CombineTensors | None = None
    own_embeddings: bool = True  # False: a head reads those of the target
    own_output: bool = True  # False: a head's logits are made with the target's output matrix
    n_draft: int | None = None  # rows of output that drafts are made with: all of a head's, the first of a model's

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output head is the embedding matrix."""
        return self.output == self.token_embd

    @property
    def is_head(self) -> bool:
        """Whether tokens come with features."""
        return self.gate is not None or self.pair is not None

    @property
    def feature_tap(self) -> int:
        """Layer behind which a head's own feature stands, in front of the norm of the output matrix."""
        return self.n_layers - 1 if self.output_norm is not None else self.n_layers

    @property
    def n_logits(self) -> int:
        """Rows of the output matrix that are used."""
        return self.n_vocab if self.n_draft is None else self.n_draft

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape that each tensor of the file must have, (n_out, n_in) or (n,)."""
        square = (self.n_embd, self.n_embd)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.own_output:
            shapes[self.output] = (self.n_logits, self.n_embd)
        if self.own_embeddings:
            shapes[self.token_embd] = (self.n_vocab, self.n_embd)
        if self.gate is not None:
            shapes |= {self.gate.feature: square, self.gate.token: square, self.gate.token_norm: (self.n_embd,)}
            shapes[self.gate.mix] = (self.n_embd, 2 * self.n_embd)
        if self.pair is not None:
            shapes |= {self.pair.token_norm: (self.n_embd,), self.pair.feature_norm: (self.n_embd,)}
        if self.combine is not None:
            shapes[self.combine.matrix] = (self.n_embd, self.combine.n_rows)
            if self.combine.norm is not None:
                shapes[self.combine.norm] = (self.combine.n_rows,)
        if self.output_norm is not None:
            shapes[self.output_norm] = (self.n_embd,)
        n_rows: dict[str, int] = {}
        for layer in self.layers:
            for ref, shape in self._shapes_of(layer):
                if isinstance(ref, TensorRows):  # the last of the parts ends where the tensor ends
                    n_rows[ref.name] = max(n_rows.get(ref.name, 0), ref.last)
                    shapes[ref.name] = (n_rows[ref.name], *shape[1:])
                else:
                    shapes[ref] = shape
        return shapes

    def _shapes_of(self, layer: LayerTensors) -> Iterator[tuple[TensorRef, tuple[int, ...]]]:
        """Every tensor of a layer, or part of one, and its shape."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        n_in = 2 * self.n_embd if self.pair is not None else self.n_embd
        q_norm, kv_norm = (q, kv) if self.qk_norm == "whole" else (self.head_dim, self.head_dim)
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q": (q, n_in),
            "attn_k": (kv, n_in),
            "attn_v": (kv, n_in),
            "attn_output": (self.n_embd, q),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
            "attn_norm": (self.n_embd,),
            "ffn_norm": (self.n_embd,),
            "attn_post_norm": (self.n_embd,),
            "ffn_post_norm": (self.n_embd,),
            "attn_sub_norm": (q,),
            "ffn_sub_norm": (self.n_ff,),
            "attn_q_norm": (q_norm,),
            "attn_k_norm": (kv_norm,),
            "attn_q_bias": (q,),
            "attn_k_bias": (kv,),
            "attn_v_bias": (kv,),
            "attn_output_bias": (self.n_embd,),
        }
        for role, shape in shapes.items():
            ref: TensorRef | None = getattr(layer, role)
            if ref is not None:
                yield ref, shape
