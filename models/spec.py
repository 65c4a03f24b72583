"""What an architecture file says about a model, and the checks that all of them share.

A `ModelSpec` is data: sizes, the names of the tensors and the recipe of a layer. The backends follow it; nothing here
computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Literal, NoReturn

from edgeinfer.errors import UnsupportedModel
from edgeinfer.gguf import ModelFile

RopeKind = Literal["interleaved", "halves"]  # pairs (2i, 2i+1), ggml's "norm"; pairs (i, i + n_dims/2), "neox"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., arXiv:2104.09864).

    Pair i is turned by position * inverse_frequencies[i] radians and multiplied by magnitude.
    """

    kind: RopeKind
    n_dims: int
    inverse_frequencies: tuple[float, ...]  # (n_dims / 2,)
    magnitude: float = 1.0


@dataclass(frozen=True)
class LayerTensors:
    """Names of the tensors of one layer; None where the model has none. Matrices are (n_out, n_in)."""

    attn_norm: str
    attn_q: str
    attn_k: str
    attn_v: str
    attn_output: str
    ffn_norm: str
    ffn_gate: str
    ffn_up: str
    ffn_down: str
    attn_q_bias: str | None = None
    attn_k_bias: str | None = None
    attn_v_bias: str | None = None
    attn_output_bias: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """Sizes, tensor names and layer recipe of a decoder-only transformer.

    A layer is x += attention(rms_norm(x)); x += (silu(gate(h)) * up(h)) @ down with h = rms_norm(x).
    """

    architecture: str
    n_vocab: int
    n_ctx_train: int
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: RopeSpec
    token_embd: str
    output_norm: str
    output: str  # the same tensor as token_embd where the embeddings are tied
    layers: tuple[LayerTensors, ...]

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output head is the embedding matrix."""
        return self.output == self.token_embd

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape that each tensor of the model must have, (n_out, n_in) or (n,)."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            self.token_embd: (self.n_vocab, self.n_embd),
            self.output: (self.n_vocab, self.n_embd),
            self.output_norm: (self.n_embd,),
        }
        for layer in self.layers:
            of_layer: dict[str | None, tuple[int, ...]] = {
                layer.attn_norm: (self.n_embd,),
                layer.attn_q: (q, self.n_embd),
                layer.attn_k: (kv, self.n_embd),
                layer.attn_v: (kv, self.n_embd),
                layer.attn_output: (self.n_embd, q),
                layer.attn_q_bias: (q,),
                layer.attn_k_bias: (kv,),
                layer.attn_v_bias: (kv,),
                layer.attn_output_bias: (self.n_embd,),
                layer.ffn_norm: (self.n_embd,),
                layer.ffn_gate: (self.n_ff, self.n_embd),
                layer.ffn_up: (self.n_ff, self.n_embd),
                layer.ffn_down: (self.n_embd, self.n_ff),
            }
            shapes.update({name: shape for name, shape in of_layer.items() if name is not None})
        return shapes


@dataclass(frozen=True)
class Architecture:
    """How one GGUF `general.architecture` departs from the common recipe.

    rope_kind: see RopeSpec.  required / optional: tensors of a layer beyond those that every architecture has, by
    field name of LayerTensors.  unsupported_keys: metadata that asks for something the recipe lacks, with the reason.
    """

    name: str
    rope_kind: RopeKind
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    unsupported_keys: dict[str, str] = field(default_factory=dict)

    def read(self, file: ModelFile) -> ModelSpec:
        """Spec of a file of this architecture. Raises UnsupportedModel, InvalidGGUF."""
        return _Reader(self, file).spec()


_COMMON = {
    "attn_norm": "attn_norm.weight",
    "attn_q": "attn_q.weight",
    "attn_k": "attn_k.weight",
    "attn_v": "attn_v.weight",
    "attn_output": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "ffn_gate": "ffn_gate.weight",
    "ffn_up": "ffn_up.weight",
    "ffn_down": "ffn_down.weight",
}
# Keys that ask for another recipe, unless they hold this value.
_FIXED: dict[str, bool | float] = {
    "attention.causal": True,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_BIASES = {
    "attn_q_bias": "attn_q.bias",
    "attn_k_bias": "attn_k.bias",
    "attn_v_bias": "attn_v.bias",
    "attn_output_bias": "attn_output.bias",
}


class _Reader:
    """Reads keys and tensors of one file, with the architecture's prefix."""

    def __init__(self, architecture: Architecture, file: ModelFile) -> None:
        self.architecture = architecture
        self.file = file

    def spec(self) -> ModelSpec:
        for key, reason in self.architecture.unsupported_keys.items():
            if self.file.metadata.get(self._key(key)):
                raise UnsupportedModel(f"{self.file.path}: {self._key(key)} is set: {reason}")
        for key, only in _FIXED.items():
            value = self.file.metadata.get(self._key(key), only)
            if value != only:
                self._refuse(key, f"must be {only}, others are not supported: found {value!r:.80}")
        n_layers = self._int("block_count", 1, 4096)
        n_embd = self._int("embedding_length", 1, 1 << 20)
        n_heads = self._int("attention.head_count", 1, 1 << 14)
        n_kv_heads = self._int("attention.head_count_kv", 1, n_heads, default=n_heads)
        head_dim = self._int("attention.key_length", 2, 1 << 14, default=n_embd // n_heads)
        if self._int("attention.value_length", 2, 1 << 14, default=head_dim) != head_dim:
            self._refuse("attention.value_length", f"must equal the key length {head_dim}")
        if n_heads % n_kv_heads:
            self._refuse("attention.head_count_kv", f"must divide the {n_heads} heads: found {n_kv_heads}")
        if "token_embd.weight" not in self.file.tensors:
            raise UnsupportedModel(f"{self.file.path}: tensor token_embd.weight is missing: not a whole language model")
        embedding_shape = self.file.tensors["token_embd.weight"].shape
        tied = "output.weight" not in self.file.tensors
        spec = ModelSpec(
            architecture=self.architecture.name,
            n_vocab=embedding_shape[0],
            n_ctx_train=self._int("context_length", 1, 1 << 28),
            n_layers=n_layers,
            n_embd=n_embd,
            n_ff=self._int("feed_forward_length", 1, 1 << 20),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_epsilon=self._float("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope=self._rope(head_dim),
            token_embd="token_embd.weight",
            output_norm="output_norm.weight",
            output="token_embd.weight" if tied else "output.weight",
            layers=tuple(self._layer(index) for index in range(n_layers)),
        )
        self._check_tensors(spec)
        return spec

    def _layer(self, index: int) -> LayerTensors:
        names: dict[str, str | None] = {name: f"blk.{index}.{suffix}" for name, suffix in _COMMON.items()}
        for name, suffix in _BIASES.items():
            tensor = f"blk.{index}.{suffix}"
            wanted = name in self.architecture.required
            allowed = wanted or name in self.architecture.optional
            if wanted or (allowed and tensor in self.file.tensors):
                names[name] = tensor
        return LayerTensors(**names)  # type: ignore[arg-type]

    def _check_tensors(self, spec: ModelSpec) -> None:
        expected = spec.tensor_shapes()
        for name, shape in expected.items():
            info = self.file.tensors.get(name)
            if info is None:
                raise UnsupportedModel(
                    f"{self.file.path}: tensor {name} {shape} is missing, {spec.architecture} needs it"
                )
            if info.shape != shape:
                raise UnsupportedModel(f"{self.file.path}: tensor {name} must have shape {shape}: found {info.shape}")
        known = expected.keys() | {"rope_freqs.weight"}
        unknown = sorted(self.file.tensors.keys() - known)
        if unknown:
            # A tensor that is not read would silently change the text.
            raise UnsupportedModel(
                f"{self.file.path}: {len(unknown)} tensors are not part of a {spec.architecture} model that edgeinfer "
                f"knows, first {unknown[0]}"
            )

    def _rope(self, head_dim: int) -> RopeSpec:
        n_dims = self._int("rope.dimension_count", 2, head_dim, default=head_dim)
        if n_dims % 2:
            self._refuse("rope.dimension_count", f"must be even: found {n_dims}")
        base = self._float("rope.freq_base", 1.0, 1e15, default=10000.0)
        frequencies, magnitude = self._scaled(_inverse_frequencies(base, n_dims), base)
        magnitude *= self._float("rope.scaling.attn_factor", 0.0, 1e6, default=1.0)
        factors = self._rope_factors(n_dims // 2)
        return RopeSpec(
            kind=self.architecture.rope_kind,
            n_dims=n_dims,
            inverse_frequencies=tuple(f / by for f, by in zip(frequencies, factors, strict=True)),
            magnitude=magnitude,
        )

    def _scaled(self, frequencies: list[float], base: float) -> tuple[list[float], float]:
        """Inverse frequencies and magnitude after `rope.scaling`. Defaults and the old key as in llama.cpp."""
        factor = self._float("rope.scaling.factor", 0.0, 1e6, self._float("rope.scale_linear", 0.0, 1e6, 1.0))
        kind = self.file.metadata.get(self._key("rope.scaling.type"), "linear")
        if kind == "none":
            return frequencies, 1.0
        if kind == "linear":
            return [frequency / factor for frequency in frequencies], 1.0
        if kind == "yarn":
            n_train = self._int("context_length", 1, 1 << 28)
            n_original = self._int("rope.scaling.original_context_length", 1, 1 << 28, default=n_train)
            return _yarn(frequencies, base, factor, n_original)
        self._refuse("rope.scaling.type", f"must be none, linear or yarn: found {kind!r:.80}")

    def _rope_factors(self, n_pairs: int) -> Sequence[float]:
        if "rope_freqs.weight" not in self.file.tensors:
            return [1.0] * n_pairs
        info = self.file.tensors["rope_freqs.weight"]
        if info.type.name != "F32" or info.shape != (n_pairs,):
            raise UnsupportedModel(
                f"{self.file.path}: tensor rope_freqs.weight must be F32 ({n_pairs},): "
                f"found {info.type.name} {info.shape}"
            )
        factors: list[float] = self.file.data("rope_freqs.weight").view("<f4").tolist()
        if not all(math.isfinite(value) and value > 0 for value in factors):
            raise UnsupportedModel(f"{self.file.path}: tensor rope_freqs.weight must be positive and finite")
        return factors

    def _key(self, name: str) -> str:
        return f"{self.architecture.name}.{name}"

    def _refuse(self, key: str, reason: str) -> NoReturn:
        raise UnsupportedModel(f"{self.file.path}: {self._key(key)} {reason}")

    def _int(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self.file.metadata.get(self._key(key), default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._refuse(key, f"must be an integer in {least}..{most}: found {value!r:.80}")
        return value

    def _float(self, key: str, above: float, most: float, default: float | None = None) -> float:
        value = self.file.metadata.get(self._key(key), default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
            self._refuse(key, f"must be a number above {above:g}, at most {most:g}: found {value!r:.80}")
        return float(value)


def _inverse_frequencies(base: float, n_dims: int) -> list[float]:
    """base ** (-2i / n_dims). In decimal arithmetic: libm's pow may differ by CPU, and every bit counts."""
    with localcontext(prec=30):
        return [float(Decimal(base) ** (Decimal(-2 * i) / Decimal(n_dims))) for i in range(n_dims // 2)]


def _yarn(frequencies: list[float], base: float, factor: float, n_ctx: int) -> tuple[list[float], float]:
    """Frequencies and magnitude after YaRN (Peng et al., arXiv:2309.00071, section 3), beta_fast 32, beta_slow 1.

    n_ctx: the context that the model was first trained with. The magnitude stands on queries and keys both, and so is
    the square root of the paper's factor on their product (section 3.4).
    """
    n_dims = 2 * len(frequencies)
    with localcontext(prec=30):
        log_base, two_pi = Decimal(base).ln(), Decimal("6.283185307179586476925286766559")

        def correction(n_rotations: int) -> float:
            return float(n_dims * (Decimal(n_ctx) / (n_rotations * two_pi)).ln() / (2 * log_base))

        magnitude = float(1 + max(Decimal(factor).ln(), Decimal(0)) / 10)
    low, high = max(math.floor(correction(32)), 0), min(math.ceil(correction(1)), n_dims - 1)
    scaled = []
    for i, frequency in enumerate(frequencies):
        extrapolated = 1.0 - min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        scaled.append(frequency / factor * (1.0 - extrapolated) + frequency * extrapolated)
    return scaled, magnitude
