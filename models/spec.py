"""What a model file says about a model, as data: sizes, and layers made of blocks that name their tensors.

Nothing here computes. A backend matches on the kinds of block that it runs; `check_blocks` refuses the others, and
every field of a block that the backend does not name, so that nothing is skipped silently.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Literal, Protocol, TypeAlias

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType

RopeKind = Literal["interleaved", "halves"]  # pairs (2i, 2i+1), ggml's "norm"; pairs (i, i + n_dims/2), "neox"
# What a gated network makes of gate and up. The first three are activation(gate) * up with x sigmoid(x)
# x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2; max(x, 0)^2. clamped_swiglu (gpt-oss) is
# g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = clamp(up, -7, 7).
Activation = Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu"]
# What a router makes of its products z: the chances p of all experts. softmax_of_top_k: z itself, and the weights are a
# softmax over those of the chosen experts.
RouterFunction = Literal["softmax", "sigmoid", "softmax_of_top_k", "sqrt_softplus"]
QKNorm = Literal["per_head", "whole"]  # over the head_dim numbers of each head; over all heads of a token together
# Where a gate on what heads of attention give comes from. in_q: the matrix of queries has 2 n_q rows, for each head
# head_dim of the query and then head_dim of the gate. per_head, per_number: a matrix of its own, with one row for each
# head or for each of their numbers.
OutputGate = Literal["in_q", "per_head", "per_number"]
GateFunction = Literal["sigmoid", "softplus"]  # what a gate's numbers go through
# Which key head a value head h of a recurrence reads: h modulo the number of key heads, or h divided by the number of
# value heads that share one.
KeyHeadOrder = Literal["modulo", "divided"]


@dataclass(frozen=True)
class TensorRows:
    """Rows first..last - 1 of a tensor: of a matrix (n_out, n_in), or elements of a vector (n_out,).

    Where a file has several matrices as one. GGUF stores the rows one after the other, so these are a run of bytes.
    """

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class ExpertRows:
    """Rows first..last - 1 of each expert of a tensor (n_experts, n_rows, n_in), or elements of (n_experts, n_rows).

    Where a file has the gate and up matrices of each expert as one (`ffn_gate_up_exps`).
    """

    name: str
    first: int
    last: int


TensorRef: TypeAlias = str | TensorRows  # the whole tensor of that name, or a part of one
ExpertsRef: TypeAlias = str | ExpertRows  # the same of a tensor of all experts


@dataclass(frozen=True)
class Weight:
    """A tensor of a block, by the block's name in its model and its role in the block."""

    block: str
    role: str
    tensor: TensorRef | ExpertRows
    # (n_out, n_in) of a matrix, which is what the product needs, (n,) of a vector, or (n_experts, n_out, n_in) of the
    # matrices of experts. What experts have as vectors is (n_experts, n), a matrix of which single rows are used.
    shape: tuple[int, ...]


# ---- the parts of attention ------------------------------------------------------------------------------------------


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
class QueryTemperature:
    """Queries multiplied by 1 + scale * ln(1 + floor(position / n_positions)) (Llama 4, Ministral 3).

    models/rope.py has these factors as numbers that are the same on every machine: query_factors.
    """

    scale: float
    n_positions: int


# ---- blocks ----------------------------------------------------------------------------------------------------------

# What a mixer keeps of a sequence in its layer: keys and values of all positions; those of a sliding window; or a state
# of one size, which each token changes.
StateKind: TypeAlias = Literal["full_kv", "window_kv", "recurrent"]


@dataclass(frozen=True)
class Block(ABC):
    """A part of a layer. It answers for itself: which weights it has, and what a forward pass costs.

    What it computes is in the docstring of its class, and in the backends.
    """

    n_embd: int  # width of the residual stream

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that there may be, by role."""

    @property
    @abstractmethod
    def n_activations(self) -> int:
        """Most numbers of a token that are held at once, beside the residual stream."""

    def share_used(self, role: str) -> float:
        """Share of a weight that one token uses, 0..1."""
        return 1.0

    def multiply_adds(self, n_past: int = 0) -> int:
        """Multiply-adds of one token after n_past others."""
        found = 0.0
        for weight in weights_of("", self):
            if len(weight.shape) > 1:
                found += self.share_used(weight.role) * math.prod(weight.shape)
        return round(found)


@dataclass(frozen=True)
class Mixer(Block):
    """The block of a layer that sees other tokens, through a state that it keeps of the sequence."""

    @property
    @abstractmethod
    def state_kind(self) -> StateKind:
        """What it keeps."""

    @abstractmethod
    def state_bytes(self, n_ctx: int, cache_type: CacheType) -> int:
        """Bytes of the state of a sequence of n_ctx tokens, without what an engine adds to it.

        It may add whole segments of positions, one batch beyond a window, or the states of draft trees.
        """

    @abstractmethod
    def n_seen(self, n_past: int) -> int:
        """Positions of the state that a token reads after n_past others; 0 where that does not grow with n_past."""

    @abstractmethod
    def n_seen_in_prompt(self, n_tokens: int) -> float:
        """The same for all tokens of a prompt together."""

    @property
    def step_bytes(self) -> int:
        """Bytes of the state that each token reads and writes, beside the positions of n_seen."""
        return 0

    def refused_cache(self, cache_type: CacheType) -> str | None:
        """What keeps the state from being of this type: what it needs, what was found, what to do. None: nothing."""
        return None


@dataclass(frozen=True)
class FeedForward(Block):
    """The block of a layer that works on each token by itself."""


@dataclass(frozen=True)
class Attention(Mixer):
    """Softmax attention (Vaswani et al., arXiv:1706.03762) with grouped heads (Ainslie et al., arXiv:2305.13245).

    With norm(x) = x where there is no such tensor, it adds to the residual stream x:

        h = norm(x, norm);  q, k, v = the three products with h, plus their biases
        q, k = rope(norm(q, q_norm)), rope(norm(k, k_norm))
        scores = cap(q * scale * temperature(position) @ k, soft_cap) over the window
        y = softmax(scores) @ v;  y *= gate_function(gate) if there is an output_gate (Qiu et al., arXiv:2505.06708)
        a = norm(y, sub_norm) @ output + output_bias
        x += residual_scale * norm(a, post_norm), which has post_norm_epsilon where that is not None

    With normed_values, v = v / sqrt(mean(v^2) + norm_epsilon), by head. Where v is the tensor of k, values are the
    products of keys, before norm and rotation. With kv_of there are no keys and values of its own. With of_target they
    are those of another model, of the committed tokens before its own: the token has no key itself.
    """

    n_in: int  # numbers that q, k and v are products with: n_embd, but for a head that attends from more
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    q: TensorRef  # (n_heads * head_dim, n_in), or with a gate, see OutputGate
    k: TensorRef  # (n_kv_heads * head_dim, n_in)
    v: TensorRef  # (n_kv_heads * head_dim, n_in), or k once more
    output: TensorRef  # (n_embd, n_heads * head_dim)
    rope: RopeSpec | None = None  # None where queries and keys are not turned
    # number of positions that a token sees, its own among them: position p sees p - window + 1 .. p; None for all; in a
    # tree these are the nearest nodes of its own branch.
    window: int | None = None
    soft_cap: float | None = None
    query_temperature: QueryTemperature | None = None
    qk_norm: QKNorm | None = None  # what a norm of queries and keys is over, None without one
    norm: TensorRef | None = None  # (n_embd,)
    post_norm: TensorRef | None = None  # (n_embd,), of what is added
    sub_norm: TensorRef | None = None  # (n_heads * head_dim,), of what goes into output
    q_norm: TensorRef | None = None  # (head_dim,) or (n_heads * head_dim,), see qk_norm
    k_norm: TensorRef | None = None
    q_bias: TensorRef | None = None
    k_bias: TensorRef | None = None
    v_bias: TensorRef | None = None
    output_bias: TensorRef | None = None
    # (n_heads,), one more score for each head, which takes its share of the softmax and has no value (Xiao et al.,
    # arXiv:2309.17453; gpt-oss, arXiv:2508.10925)
    sinks: TensorRef | None = None
    output_gate: OutputGate | None = None
    gate: TensorRef | None = None  # (n_gate, n_in), of a gate that is not in_q
    gate_function: GateFunction = "sigmoid"
    post_norm_epsilon: float | None = None  # the model's where it is None
    normed_values: bool = False  # see above
    # The layer before this one whose keys and values it reads, which have the same sizes and window; None for its own.
    # k, v and k_norm are then those of that layer.
    kv_of: int | None = None
    # Whether kv_of is a layer of the model that a draft head drafts for. A window counts the token's own position, of
    # which there is no key.
    of_target: bool = False

    @property
    def separate_key_bias(self) -> TensorRef | None:
        """The bias of the keys if no norm follows it, so that it only turns with the position; None otherwise."""
        return None if self.qk_norm and self.k_norm else self.k_bias

    @property
    def n_q(self) -> int:
        """Numbers of all queries of a token."""
        return self.n_heads * self.head_dim

    @property
    def has_own_values(self) -> bool:
        """Whether values have a matrix of their own."""
        return self.has_own_keys and self.v != self.k

    @property
    def has_own_keys(self) -> bool:
        """Whether it keeps keys and values, rather than to read those of another layer or model."""
        return self.kv_of is None and not self.of_target

    @property
    def n_q_rows(self) -> int:
        """Rows of the matrix of queries: with gates twice the queries."""
        return 2 * self.n_q if self.output_gate == "in_q" else self.n_q

    @property
    def n_gate(self) -> int:
        """Rows of the gate's own matrix, 0 without one."""
        return {"per_head": self.n_heads, "per_number": self.n_q}.get(self.output_gate or "", 0)

    @property
    def n_kv(self) -> int:
        """Numbers of all keys of a token, and of all values."""
        return self.n_kv_heads * self.head_dim

    @property
    @override
    def n_activations(self) -> int:
        """See Block: queries with their gates, keys and values."""
        return self.n_q_rows + 2 * self.n_kv + self.n_gate

    @property
    @override
    def state_kind(self) -> StateKind:
        return "full_kv" if self.window is None else "window_kv"

    @override
    def state_bytes(self, n_ctx: int, cache_type: CacheType) -> int:
        """See Mixer: keys and values of the positions that are seen."""
        n = self.head_dim
        if not self.has_own_keys:
            return 0
        of_a_head = {"f16": 4 * n, "q8_0": 2 * (n + n // 32 * 4), "k6v4": 6 * n // 8 + n // 2 + 2 * 2}[cache_type]
        return self.n_seen(n_ctx) * self.n_kv_heads * of_a_head

    @override
    def n_seen(self, n_past: int) -> int:
        return n_past if self.window is None else min(self.window, n_past)

    @override
    def n_seen_in_prompt(self, n_tokens: int) -> float:
        if self.window is None or n_tokens <= self.window:
            return n_tokens * n_tokens / 2
        return self.window * self.window / 2 + (n_tokens - self.window) * self.window

    @override
    def multiply_adds(self, n_past: int = 0) -> int:
        """See Block: the products with weights, the scores, and the values."""
        return super().multiply_adds() + 2 * self.n_q * self.n_seen(n_past)

    @override
    def refused_cache(self, cache_type: CacheType) -> str | None:
        if cache_type != "f16" and self.head_dim % 32:
            return f"needs heads of a multiple of 32 numbers: found {self.head_dim}; use f16"
        is_turned_in_two_ways = self.rope is not None and self.rope.long is not None
        if cache_type == "k6v4" and self.separate_key_bias is not None and is_turned_in_two_ways:
            return (
                "needs one set of rope frequencies where keys have a bias: found another set for long contexts; "
                "use q8_0"
            )
        return None

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that there may be, by role."""
        q_norm, k_norm = (self.n_q, self.n_kv) if self.qk_norm == "whole" else (self.head_dim, self.head_dim)
        missing = set() if self.has_own_values else {"v"}
        missing |= set() if self.has_own_keys else {"k", "k_norm", "k_bias", "v_bias"}
        shapes: dict[str, tuple[int, ...]] = {
            "norm": (self.n_embd,),
            "q": (self.n_q_rows, self.n_in),
            "k": (self.n_kv, self.n_in),
            "v": (self.n_kv, self.n_in),
            "output": (self.n_embd, self.n_q),
            "post_norm": (self.n_embd,),
            "sub_norm": (self.n_q,),
            "q_norm": (q_norm,),
            "k_norm": (k_norm,),
            "q_bias": (self.n_q_rows,),
            "k_bias": (self.n_kv,),
            "v_bias": (self.n_kv,),
            "output_bias": (self.n_embd,),
            "sinks": (self.n_heads,),
            "gate": (self.n_gate, self.n_in),
        }
        return {role: shape for role, shape in shapes.items() if role not in missing}


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Attention over one row a token that all heads share (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434,
    section 2.1), in its absorbed form: a head's key and value matrices are applied to its query and to what it gives.

    With the numbers of each head one after the other, it adds to the residual stream x:

        h = norm(x, norm);  q = q @ h, or q_b @ norm(q_a @ h, q_norm): of a head n_plain numbers, then n_turned
        c, r = the first n_latent numbers of kv @ h, and the other n_turned
        row of the token = [norm(c, kv_norm), rope(r)]
        query of a head = scale * [k_b of the head @ plain, rope(turned)]
        y of a head = v_b of the head @ (softmax(query @ rows) @ the first n_latent numbers of the rows)
        x += residual_scale * (output @ y)
    """

    n_heads: int
    n_plain: int
    n_turned: int
    n_latent: int
    n_value: int  # numbers of a head that go into output
    scale: float
    rope: RopeSpec  # of n_turned numbers
    kv: TensorRef  # (n_latent + n_turned, n_embd)
    kv_norm: TensorRef  # (n_latent,)
    k_b: TensorRef  # (n_heads * n_latent, n_plain)
    v_b: TensorRef  # (n_heads * n_value, n_latent)
    output: TensorRef  # (n_embd, n_heads * n_value)
    norm: TensorRef | None = None  # (n_embd,)
    q: TensorRef | None = None  # (n_q, n_embd), or the three below
    n_q_latent: int = 0
    q_a: TensorRef | None = None  # (n_q_latent, n_embd)
    q_norm: TensorRef | None = None  # (n_q_latent,)
    q_b: TensorRef | None = None  # (n_q, n_q_latent)

    @property
    def n_q(self) -> int:
        """Numbers of all queries of a token, before they are made as long as rows."""
        return self.n_heads * (self.n_plain + self.n_turned)

    @property
    def n_row(self) -> int:
        """Numbers of a token that are kept."""
        return self.n_latent + self.n_turned

    @property
    @override
    def n_activations(self) -> int:
        """See Block: queries in both forms, what heads give in both, and the row."""
        of_heads = self.n_row + self.n_latent + self.n_value
        return self.n_q_latent + self.n_q + self.n_heads * of_heads + self.n_row

    @property
    @override
    def state_kind(self) -> StateKind:
        return "full_kv"

    @override
    def state_bytes(self, n_ctx: int, cache_type: CacheType) -> int:
        """See Mixer: a row for each position; values are a part of it."""
        return n_ctx * (2 * self.n_row if cache_type == "f16" else self.n_row + self.n_row // 32 * 4)

    @override
    def n_seen(self, n_past: int) -> int:
        return n_past

    @override
    def n_seen_in_prompt(self, n_tokens: int) -> float:
        return n_tokens * n_tokens / 2

    @override
    def multiply_adds(self, n_past: int = 0) -> int:
        """See Block: the products with weights, the scores, and the values."""
        return super().multiply_adds() + self.n_heads * (self.n_row + self.n_latent) * n_past

    @override
    def refused_cache(self, cache_type: CacheType) -> str | None:
        if cache_type == "k6v4":
            return "needs keys and values apart: found latent rows, which are both; use q8_0"
        if cache_type == "q8_0" and (self.n_row % 32 or self.n_latent % 32):
            return f"needs rows of a multiple of 32 numbers: found {self.n_latent} + {self.n_turned}; use f16"
        return None

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "norm": (self.n_embd,),
            "q": (self.n_q, self.n_embd),
            "q_a": (self.n_q_latent, self.n_embd),
            "q_norm": (self.n_q_latent,),
            "q_b": (self.n_q, self.n_q_latent),
            "kv": (self.n_row, self.n_embd),
            "kv_norm": (self.n_latent,),
            "k_b": (self.n_heads * self.n_latent, self.n_plain),
            "v_b": (self.n_heads * self.n_value, self.n_latent),
            "output": (self.n_embd, self.n_heads * self.n_value),
        }


@dataclass(frozen=True)
class Recurrence(Mixer):
    """A mixer whose state has one size, however long the text is: each token changes it.

    Its numbers are float32, whatever the type of the KV cache: a rounded state would be another model.
    """

    n_conv: int  # tokens that the convolution over time sees, the newest among them
    conv: TensorRef  # (n_channels, n_conv), its last column on the newest token

    @property
    @abstractmethod
    def n_channels(self) -> int:
        """Numbers of a token that go through the convolution."""

    @property
    @abstractmethod
    def n_state(self) -> int:
        """Numbers of the state beside the rows that the convolution looks back at."""

    @property
    @abstractmethod
    def n_update(self) -> int:
        """Numbers of a token from which its change of the state can be made again, without the convolution's row."""

    @property
    @override
    def state_kind(self) -> StateKind:
        return "recurrent"

    @override
    def state_bytes(self, n_ctx: int, cache_type: CacheType) -> int:
        return 4 * (self.n_state + (self.n_conv - 1) * self.n_channels)

    @property
    @override
    def step_bytes(self) -> int:
        return 2 * self.state_bytes(1, "f16")

    @property
    def node_bytes(self) -> int:
        """Bytes that a token of a draft tree needs until it is committed or dropped."""
        return 4 * (self.n_update + self.n_channels)

    @override
    def n_seen(self, n_past: int) -> int:
        return 0

    @override
    def n_seen_in_prompt(self, n_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True)
class GatedDeltaNet(Recurrence):
    """A gated delta rule (Yang et al., arXiv:2412.06464) after a short convolution. It adds to the residual stream x:

        h = norm(x, norm);  u = qkv @ h;  z = gate @ h;  b, a = beta @ h, alpha @ h
        c = silu(sum over j of conv[:, j] * u of n_conv - 1 - j tokens before), which is q, k and v one after the other
        q, k = q / sqrt(sum(q^2) + norm_epsilon) / sqrt(head_dim), k / sqrt(sum(k^2) + norm_epsilon), by head
        e = exp(decay * softplus(a + step_bias));  beta = sigmoid(b)
        S = e S;  d = beta (v - S^T k);  S = S + k d^T;  y = S^T q, for each value head with its key head
        x += residual_scale * (norm(y, out_norm) * silu(z)) @ output

    S of each value head is (head_dim of k, head_dim of v), zeros before the text. The norm of y is over a head.
    """

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    key_heads: KeyHeadOrder
    qkv: TensorRef  # (n_channels, n_embd): queries, then keys of all key heads, then values
    gate: TensorRef  # (n_v, n_embd)
    decay: TensorRef  # (n_value_heads,), not above 0
    step_bias: TensorRef  # (n_value_heads,)
    out_norm: TensorRef  # (head_dim,)
    output: TensorRef  # (n_embd, n_v)
    norm: TensorRef | None = None  # (n_embd,)
    beta: TensorRef | None = None  # (n_value_heads, n_embd)
    alpha: TensorRef | None = None  # (n_value_heads, n_embd)
    # (2 n_value_heads, n_embd), where both are one matrix: for each key head the rows of b of its value heads, then
    # those of a
    beta_alpha: TensorRef | None = None

    @property
    def n_k(self) -> int:
        """Numbers of all keys of a token, and of all queries."""
        return self.n_key_heads * self.head_dim

    @property
    def n_v(self) -> int:
        """Numbers of all values of a token."""
        return self.n_value_heads * self.head_dim

    def key_head(self, value_head: int) -> int:
        """The key head that a value head reads."""
        if self.key_heads == "modulo":
            return value_head % self.n_key_heads
        return value_head // (self.n_value_heads // self.n_key_heads)

    @property
    @override
    def n_channels(self) -> int:
        return 2 * self.n_k + self.n_v

    @property
    @override
    def n_state(self) -> int:
        return self.n_v * self.head_dim

    @property
    @override
    def n_update(self) -> int:
        """See Recurrence: k, d and e."""
        return self.n_k + self.n_v + self.n_value_heads

    @property
    @override
    def n_activations(self) -> int:
        """See Block: u, z, b and a."""
        return self.n_channels + self.n_v + 2 * self.n_value_heads

    @override
    def multiply_adds(self, n_past: int = 0) -> int:
        """See Block: the products with weights; two products with S, and its update."""
        return super().multiply_adds() + 3 * self.n_state

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "norm": (self.n_embd,),
            "qkv": (self.n_channels, self.n_embd),
            "gate": (self.n_v, self.n_embd),
            "beta": (self.n_value_heads, self.n_embd),
            "alpha": (self.n_value_heads, self.n_embd),
            "beta_alpha": (2 * self.n_value_heads, self.n_embd),
            "conv": (self.n_channels, self.n_conv),
            "decay": (self.n_value_heads,),
            "step_bias": (self.n_value_heads,),
            "out_norm": (self.head_dim,),
            "output": (self.n_embd, self.n_v),
        }


@dataclass(frozen=True)
class ShortConv(Recurrence):
    """A gated convolution over the last tokens (LFM2, Liquid AI, arXiv:2511.23404). It adds to the residual stream x:

    b, c, u = the thirds of input @ norm(x, norm);  s = b * u
    x += residual_scale * (c * sum over j of conv[:, j] * s of n_conv - 1 - j tokens before) @ output
    """

    input: TensorRef  # (3 n_embd, n_embd)
    output: TensorRef  # (n_embd, n_embd)
    norm: TensorRef | None = None  # (n_embd,)

    @property
    @override
    def n_channels(self) -> int:
        return self.n_embd

    @property
    @override
    def n_state(self) -> int:
        return 0

    @property
    @override
    def n_update(self) -> int:
        return 0

    @property
    @override
    def n_activations(self) -> int:
        """See Block: b, c and u."""
        return 3 * self.n_embd

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "norm": (self.n_embd,),
            "input": (3 * self.n_embd, self.n_embd),
            "conv": (self.n_embd, self.n_conv),
            "output": (self.n_embd, self.n_embd),
        }


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """A state-space model with one decay a head (Dao and Gu, arXiv:2405.21060) after a short convolution. It adds:

        h = norm(x, norm);  z, u, t = input @ h, of n_v, n_channels and n_heads numbers
        c = silu(conv_bias + sum over j of conv[:, j] * u of n_conv - 1 - j tokens before), which is v, B and C one
            after the other
        step = softplus(t + step_bias);  e = exp(decay * step)
        S = e S + B (step v)^T;  y = S^T C + skip * v, for each head with B and C of its group
        x += residual_scale * norm(y * silu(z), out_norm) @ output

    S of each head is (n_per_key, head_dim), zeros before the text. Neighbouring heads share a group. The norm is over
    the numbers of a group.
    """

    n_heads: int
    head_dim: int  # numbers of v
    n_groups: int
    n_per_key: int  # numbers of B, and of C, of a group
    input: TensorRef  # (n_v + n_channels + n_heads, n_embd)
    decay: TensorRef  # (n_heads, 1), not above 0
    skip: TensorRef  # (n_heads, 1)
    step_bias: TensorRef  # (n_heads,)
    output: TensorRef  # (n_embd, n_v)
    norm: TensorRef | None = None  # (n_embd,)
    conv_bias: TensorRef | None = None  # (n_channels,)
    out_norm: TensorRef | None = None  # (n_groups, n_v / n_groups), or of one group (n_v,)

    @property
    def n_k(self) -> int:
        """Numbers of B of all groups of a token, and of C."""
        return self.n_groups * self.n_per_key

    @property
    def n_v(self) -> int:
        """Numbers of v of all heads of a token."""
        return self.n_heads * self.head_dim

    @property
    def n_input_rows(self) -> int:
        """Rows of the first product: z, what is convolved, and the steps."""
        return self.n_v + self.n_channels + self.n_heads

    @property
    @override
    def n_channels(self) -> int:
        return self.n_v + 2 * self.n_k

    @property
    @override
    def n_state(self) -> int:
        return self.n_v * self.n_per_key

    @property
    @override
    def n_update(self) -> int:
        """See Recurrence: B, step v and e."""
        return self.n_k + self.n_v + self.n_heads

    @property
    @override
    def n_activations(self) -> int:
        """See Block: the first product, and what was convolved."""
        return self.n_input_rows + self.n_channels

    @override
    def multiply_adds(self, n_past: int = 0) -> int:
        """See Block: the products with weights; a product with S, and its update."""
        return super().multiply_adds() + 2 * self.n_state

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        n_each = self.n_v // self.n_groups
        return {
            "norm": (self.n_embd,),
            "input": (self.n_input_rows, self.n_embd),
            "conv": (self.n_channels, self.n_conv),
            "conv_bias": (self.n_channels,),
            "decay": (self.n_heads, 1),
            "skip": (self.n_heads, 1),
            "step_bias": (self.n_heads,),
            "out_norm": (self.n_v,) if self.n_groups == 1 else (self.n_groups, n_each),
            "output": (self.n_embd, self.n_v),
        }


@dataclass(frozen=True)
class Dense(FeedForward):
    """A gated feed-forward network, SwiGLU, GeGLU or the like (Shazeer, arXiv:2002.05202). It adds:

    h = norm(x, norm);  f = norm(activation(gate @ h) * (up @ h), sub_norm) @ down
    x += residual_scale * norm(f, post_norm), which has post_norm_epsilon where that is not None
    """

    n_ff: int
    gate: TensorRef  # (n_ff, n_embd)
    up: TensorRef  # (n_ff, n_embd)
    down: TensorRef  # (n_embd, n_ff)
    activation: Activation = "silu"
    norm: TensorRef | None = None  # (n_embd,)
    post_norm: TensorRef | None = None  # (n_embd,), of what is added
    sub_norm: TensorRef | None = None  # (n_ff,), of what goes into down
    post_norm_epsilon: float | None = None  # the model's where it is None

    @property
    def n_activations(self) -> int:
        """See Block: gate and up."""
        return 2 * self.n_ff

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that there may be, by role."""
        return {
            "norm": (self.n_embd,),
            "gate": (self.n_ff, self.n_embd),
            "up": (self.n_ff, self.n_embd),
            "down": (self.n_embd, self.n_ff),
            "post_norm": (self.n_embd,),
            "sub_norm": (self.n_ff,),
        }


@dataclass(frozen=True)
class PlainDense(FeedForward):
    """A feed-forward network without a gate. It adds:

    x += residual_scale * activation(up @ norm(x, norm)) @ down
    """

    n_ff: int
    up: TensorRef  # (n_ff, n_embd)
    down: TensorRef  # (n_embd, n_ff)
    activation: Activation = "relu2"
    norm: TensorRef | None = None  # (n_embd,)

    @property
    @override
    def n_activations(self) -> int:
        """See Block: what comes from up."""
        return self.n_ff

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"norm": (self.n_embd,), "up": (self.n_ff, self.n_embd), "down": (self.n_embd, self.n_ff)}


@dataclass(frozen=True)
class NoFeedForward(FeedForward):
    """No network: a layer that is a mixer alone, which another mixer follows."""

    @property
    @override
    def n_activations(self) -> int:
        return 0

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}


@dataclass(frozen=True)
class Experts(FeedForward):
    """A mixture of experts: gated networks of which a router chooses n_used for each token (Shazeer et al.,
    arXiv:1701.06538; Jiang et al., arXiv:2401.04088), and a shared one beside them (Dai et al., arXiv:2401.06066).

    It adds to the residual stream x:

        h = norm(x, norm);  z = router @ h + router_bias;  p = router_function(z)
        chosen = the n_used experts with the largest p + selection_bias, in descending order; of equal ones the lower
            index first. With n_groups > 1 only those of the n_used_groups groups whose two largest add up to most, or
            whose largest is largest if groups_by_best.
        w = p[chosen], or their softmax for softmax_of_top_k;  w /= max(sum(w), 2^-14) if is_normalised
        f_e = down_scale_e * (down_e @ activation(gate_scale_e * (gate_e @ h) + gate_bias_e,
            up_scale_e * (up_e @ h) + up_bias_e)) + down_bias_e
        y = the sum of weight_scale * w_e * f_e over `chosen`, added in that order
        y += sigmoid(shared_router @ h) * the shared network of h, without the factor where there is no shared_router
        x += residual_scale * norm(y, post_norm)

    Where they are there, the router reads router_scale * norm(x, router_norm) in place of h, the shared network
    norm(x, shared_norm), and what the routed experts give, and what the shared network gives, have norms before they
    are added: routed_post_norm and shared_post_norm.
    """

    # n_ff, n_ff_shared: numbers between gate and down, of one expert and of the shared network
    n_ff: int
    n_experts: int
    n_used: int
    router: TensorRef  # (n_experts, n_embd)
    gate: ExpertsRef  # (n_experts, n_ff, n_embd)
    up: ExpertsRef  # (n_experts, n_ff, n_embd)
    down: ExpertsRef  # (n_experts, n_embd, n_ff)
    router_function: RouterFunction = "softmax"
    is_normalised: bool = False
    weight_scale: float = 1.0
    n_groups: int = 1
    n_used_groups: int = 1
    groups_by_best: bool = False
    activation: Activation = "silu"
    norm: TensorRef | None = None  # (n_embd,)
    post_norm: TensorRef | None = None  # (n_embd,), of what is added
    router_bias: TensorRef | None = None  # (n_experts,)
    selection_bias: TensorRef | None = None  # (n_experts,)
    gate_bias: ExpertsRef | None = None  # (n_experts, n_ff)
    up_bias: ExpertsRef | None = None  # (n_experts, n_ff)
    down_bias: ExpertsRef | None = None  # (n_experts, n_embd)
    gate_scale: TensorRef | None = None  # (n_experts,)
    up_scale: TensorRef | None = None  # (n_experts,)
    down_scale: TensorRef | None = None  # (n_experts,)
    n_ff_shared: int = 0
    shared_router: TensorRef | None = None  # (n_embd,)
    shared_gate: TensorRef | None = None  # (n_ff_shared, n_embd)
    shared_up: TensorRef | None = None  # (n_ff_shared, n_embd)
    shared_down: TensorRef | None = None  # (n_embd, n_ff_shared)
    # router_norm, shared_norm, routed_post_norm, shared_post_norm: (n_embd,), see above
    router_norm: TensorRef | None = None
    router_scale: float = 1.0
    shared_norm: TensorRef | None = None
    routed_post_norm: TensorRef | None = None
    shared_post_norm: TensorRef | None = None

    @property
    def n_in(self) -> int:
        """Numbers that a routed expert reads, and gives."""
        return self.n_embd

    @property
    def n_activations(self) -> int:
        """See Block: gate and up of one expert, as they run one after the other."""
        return 2 * self.n_ff

    def share_used(self, role: str) -> float:
        """See Block: of what experts have, that of those that were chosen."""
        return self.n_used / self.n_experts if role.removesuffix("_bias") in ("gate", "up", "down") else 1.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that there may be, by role."""
        n, n_ff, n_shared = self.n_experts, self.n_ff, self.n_ff_shared
        return {
            "norm": (self.n_embd,),
            "router": (n, self.n_embd),
            "router_bias": (n,),
            "selection_bias": (n,),
            "gate": (n, n_ff, self.n_embd),
            "up": (n, n_ff, self.n_embd),
            "down": (n, self.n_embd, n_ff),
            "gate_bias": (n, n_ff),
            "up_bias": (n, n_ff),
            "down_bias": (n, self.n_embd),
            "gate_scale": (n,),
            "up_scale": (n,),
            "down_scale": (n,),
            "shared_router": (self.n_embd,),
            "shared_gate": (n_shared, self.n_embd),
            "shared_up": (n_shared, self.n_embd),
            "shared_down": (self.n_embd, n_shared),
            "post_norm": (self.n_embd,),
            "router_norm": (self.n_embd,),
            "shared_norm": (self.n_embd,),
            "routed_post_norm": (self.n_embd,),
            "shared_post_norm": (self.n_embd,),
        }


@dataclass(frozen=True)
class PlainExperts(Experts):
    """Experts without gates: f_e = down_e @ activation(up_e @ h), and the shared network likewise; `gate` is `up`.

    With n_latent they work on other rows than the shared network and the router: f_e is of latent_down @ h, and
    latent_up @ y is added in place of y.
    """

    n_latent: int = 0  # numbers that experts read and give, 0 for n_embd
    latent_down: TensorRef | None = None  # (n_latent, n_embd)
    latent_up: TensorRef | None = None  # (n_embd, n_latent)

    @property
    @override
    def n_in(self) -> int:
        return self.n_latent or self.n_embd

    @property
    @override
    def n_activations(self) -> int:
        """See Block: up of one expert, and the latent rows."""
        return self.n_ff + 2 * self.n_latent

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, n_in = self.n_experts, self.n_in
        gates = ("gate", "gate_bias", "gate_scale", "shared_gate")
        found = {role: shape for role, shape in super().shapes().items() if role not in gates}
        found |= {"up": (n, self.n_ff, n_in), "down": (n, n_in, self.n_ff), "down_bias": (n, n_in)}
        return found | {"latent_down": (self.n_latent, self.n_embd), "latent_up": (self.n_embd, self.n_latent)}


@dataclass(frozen=True)
class LayerEnd(FeedForward):
    """What a layer does after its network (Gemma 3n and 4), to the residual stream x. e: what `LayerInputs` has for it.

    x += residual_scale * norm((activation(gate @ x) * e) @ projection, post_norm), where there is a gate
    x *= scale, the one number of that tensor
    """

    n_inputs: int = 0  # numbers of e
    gate: TensorRef | None = None  # (n_inputs, n_embd)
    projection: TensorRef | None = None  # (n_embd, n_inputs)
    post_norm: TensorRef | None = None  # (n_embd,)
    scale: TensorRef | None = None  # (1,)
    activation: Activation = "gelu_tanh"

    @property
    @override
    def n_activations(self) -> int:
        return self.n_inputs

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "gate": (self.n_inputs, self.n_embd),
            "projection": (self.n_embd, self.n_inputs),
            "post_norm": (self.n_embd,),
            "scale": (1,),
        }


@dataclass(frozen=True)
class LayerInputs(Block):
    """Embeddings of each layer beside those of the model (Gemma 3n and 4). Of a token with the scaled embedding x:

        e = (norm(projection_scale * (projection @ x), norm) + table_scale * table[token]) / sqrt(2)

    n_inputs numbers for each layer, one layer after the other. The norm is over those of a layer. A pass reads the rows
    of its tokens: the table itself is mostly larger than all that is multiplied.
    """

    n_layers: int
    n_inputs: int
    n_vocab: int
    table: str  # (n_vocab, n_layers * n_inputs)
    projection: TensorRef  # (n_layers * n_inputs, n_embd)
    norm: TensorRef  # (n_inputs,)
    projection_scale: float
    table_scale: float

    @property
    def n_all(self) -> int:
        """Numbers of a token for all layers."""
        return self.n_layers * self.n_inputs

    @property
    @override
    def n_activations(self) -> int:
        return self.n_all

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Block: without the table, whose rows are read one by one."""
        return {"projection": (self.n_all, self.n_embd), "norm": (self.n_inputs,)}


@dataclass(frozen=True)
class Layer:
    """What happens to the residual stream in a layer: first the mixer, which sees other tokens, then the network."""

    mixer: Mixer
    ffn: FeedForward
    end: LayerEnd | None = None
    # whether the mixer reads the residual stream as the mixer of the layer before did, which has no network: so both
    # add to it side by side
    is_beside: bool = False


class _Shaped(Protocol):
    def shapes(self) -> dict[str, tuple[int, ...]]: ...


def weights_of(block: str, part: _Shaped) -> Iterator[Weight]:
    """The tensors that a block has, in the order of its `shapes`; block: its name in the model."""
    for role, shape in part.shapes().items():
        tensor = getattr(part, role)
        if tensor is not None:
            yield Weight(block, role, tensor, shape)


_NOT_MULTIPLIED = ("bias", "conv", "decay", "skip", "out_norm")  # ends of roles of vectors that files have as matrices


def is_matrix(weight: Weight) -> bool:
    """Whether inputs are multiplied with a weight, which may be one for each expert."""
    return len(weight.shape) > 1 and not weight.role.endswith(_NOT_MULTIPLIED)


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSizes:
    """What a session says of its model on any backend."""

    architecture: str
    n_vocab: int
    n_ctx_train: int  # positions that the model was trained with
    n_layers: int
    n_embd: int


@dataclass(frozen=True)
class ModelSpec(ModelSizes):
    """Sizes and layers of a decoder-only transformer.

    A token becomes a row of logits by

        x = embedding_scale * token_embd[token], then norm(x) without weights if embedding_norm; with layer_inputs,
            numbers for each layer too
        each layer: its mixer, then its ffn, add to x; its end, if it has one; a block of the file may be two layers, or
            two blocks one
        logits = cap(logit_scale * (norm(x, output_norm) @ output), logit_soft_cap)

    cap(y, c) = c * tanh(y / c), or y where c is None. All norms are RMS norms with norm_epsilon; with centred_output
    the last one is of x less its mean, a layer norm without bias (Ba et al., arXiv:1607.06450).
    """

    norm_epsilon: float
    # token_embd, output: the same tensor where the embeddings are tied; None in the decoder of a draft head that takes
    # those of its target
    token_embd: str | None
    output_norm: str | None
    output: TensorRef | None
    n_logits: int  # rows of the output matrix, tokens that there are logits for
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    embedding_norm: bool = False
    centred_output: bool = False
    layer_inputs: LayerInputs | None = None

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output matrix is the embedding matrix."""
        return self.output == self.token_embd

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Every block and its name, in the order in which they run."""
        if self.layer_inputs is not None:
            yield "layer_inputs", self.layer_inputs
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}.mixer", layer.mixer
            yield f"layers.{index}.ffn", layer.ffn
            if layer.end is not None:
                yield f"layers.{index}.end", layer.end

    def first_layer_of(self, block: str) -> int:
        """The layer that a block is in, or the first one behind it: n_layers for the output matrix, the block ""."""
        if not block:
            return self.n_layers
        return 0 if block == "layer_inputs" else int(block.split(".")[1])

    def weights(self) -> Iterator[Weight]:
        """Every tensor beside the embeddings and the table of layer_inputs, in the order in which a pass reads them.

        Those of blocks have the block's name; the others are the block "", with the roles output_norm and output.
        """
        for name, block in self.blocks():
            yield from weights_of(name, block)
        if self.output_norm is not None:
            yield Weight("", "output_norm", self.output_norm, (self.n_embd,))
        if self.output is not None:
            yield Weight("", "output", self.output, (self.n_logits, self.n_embd))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape that each tensor of the file must have, (n_out, n_in) or (n,)."""
        shapes = shapes_in_file(self.weights())
        if self.token_embd is not None:
            shapes[self.token_embd] = (self.n_vocab, self.n_embd)  # all rows, where the output matrix reads some
        if self.layer_inputs is not None:
            shapes[self.layer_inputs.table] = (self.n_vocab, self.layer_inputs.n_all)
        return shapes


def shapes_in_file(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that is named; of several parts of one the last ends where the tensor ends."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in weights:
        if isinstance(weight.tensor, TensorRows):
            n_rows = max(shapes.get(weight.tensor.name, (0,))[0], weight.tensor.last)
            shapes[weight.tensor.name] = (n_rows, *weight.shape[1:])
        elif isinstance(weight.tensor, ExpertRows):
            n_rows = max(shapes.get(weight.tensor.name, (0, 0))[1], weight.tensor.last)
            shapes[weight.tensor.name] = (weight.shape[0], n_rows, *weight.shape[2:])
        else:
            shapes[weight.tensor] = weight.shape
    return shapes


def attention_of(layer: Layer) -> Attention:
    """The mixer of a layer, for code that runs Attention only. Raises UnsupportedModel for others, as dense_of."""
    if not isinstance(layer.mixer, Attention):
        raise UnsupportedModel(f"the mixer must be Attention: found a block {type(layer.mixer).__name__}")
    return layer.mixer


def dense_of(layer: Layer) -> Dense:
    """The feed-forward network of a layer, for a backend that runs Dense only. Raises UnsupportedModel for others.

    check_blocks refuses them before that, with the name of the layer.
    """
    if not isinstance(layer.ffn, Dense):
        raise UnsupportedModel(f"the feed-forward network must be Dense: found a block {type(layer.ffn).__name__}")
    return layer.ffn


def check_blocks(
    blocks: Iterable[tuple[str, object]], known: Mapping[type, Sequence[str]], backend: str, path: object
) -> None:
    """Raises UnsupportedModel for the first block of a kind that `known` lacks, or that uses a field it lacks.

    known: the kinds of block that a backend runs, and of each the fields that it looks at.  A field that holds its
    default asks for nothing.  path: of the model file, for the message.
    """
    for name, block in blocks:
        handled = known.get(type(block))
        if handled is None:
            kinds = ", ".join(kind.__name__ for kind in known)
            raise UnsupportedModel(
                f"{path}: {name} is a block {type(block).__name__}, which the {backend} backend cannot run; it runs "
                f"{kinds}"
            )
        for field in fields(block):  # type: ignore[arg-type]
            is_asked = field.default is MISSING or getattr(block, field.name) != field.default
            if is_asked and field.name not in handled:
                raise UnsupportedModel(
                    f"{path}: {name} has {field.name}, which the {backend} backend does not know: use another backend"
                )
