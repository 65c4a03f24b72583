"""From the keys and tensors of a model file to its `ModelSpec`, with the checks that all architectures share.

A file that asks for something a ModelSpec cannot express is refused, with the key or tensor named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import rope
from edgeinfer.models.arrays import Array
from edgeinfer.models.draft_vocab import DRAFT_VOCAB, draft_vocab_of, has_draft_vocab
from edgeinfer.models.expert_reader import MAY_BE_ROWS, ExpertReader, ExpertRecipe
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.key_reader import KeyReader
from edgeinfer.models.nextn import OWN, REQUIRED, NextnBlock
from edgeinfer.models.spec import (
    Attention,
    Dense,
    Layer,
    LongRope,
    Mixer,
    ModelSpec,
    QKNorm,
    RopeKind,
    RopeSpec,
    TensorRef,
    TensorRows,
    attention_of,
    dense_of,
    shapes_in_file,
)

QKV_BIASES = frozenset({"mixer.q_bias", "mixer.k_bias", "mixer.v_bias"})
BIASES = QKV_BIASES | {"mixer.output_bias"}
POST_NORMS = frozenset({"mixer.post_norm", "ffn.post_norm"})
QK_NORMS = frozenset({"mixer.q_norm", "mixer.k_norm"})
ROPE_FREQS = frozenset({"rope_freqs.weight"})
LONG_AND_SHORT = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})
ROPE_TENSORS = ROPE_FREQS | LONG_AND_SHORT  # what RopeSpec has the frequencies from

# Tensors of a layer in GGUF, after "blk.<index>.", by block and role. First those that most architectures have.
_COMMON = {
    "mixer.norm": "attn_norm.weight",
    "mixer.q": "attn_q.weight",
    "mixer.k": "attn_k.weight",
    "mixer.v": "attn_v.weight",
    "mixer.output": "attn_output.weight",
    "ffn.norm": "ffn_norm.weight",
    "ffn.gate": "ffn_gate.weight",
    "ffn.up": "ffn_up.weight",
    "ffn.down": "ffn_down.weight",
}
_SPECIAL = {
    "mixer.post_norm": "post_attention_norm.weight",
    "mixer.sub_norm": "attn_sub_norm.weight",
    "mixer.q_norm": "attn_q_norm.weight",
    "mixer.k_norm": "attn_k_norm.weight",
    "mixer.q_bias": "attn_q.bias",
    "mixer.k_bias": "attn_k.bias",
    "mixer.v_bias": "attn_v.bias",
    "mixer.output_bias": "attn_output.bias",
    "mixer.sinks": "attn_sinks.weight",
    "mixer.gate": "attn_gate.weight",
    "ffn.post_norm": "post_ffw_norm.weight",
    "ffn.sub_norm": "ffn_sub_norm.weight",
}
_UNSUPPORTED = {
    "expert_count": "experts are not supported in this architecture",
    "nextn_predict_layers": "layers that predict tokens further ahead are not supported yet",
}
# Keys that ask for another recipe, unless they hold one of these values; the first is the default.
_FIXED: dict[str, Sequence[object]] = {
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_SCALINGS = ("none", "linear", "yarn")


def _unchanged(reader: Reader, spec: ModelSpec) -> ModelSpec:
    return spec


# Matrices of heads, one after the other, which files have as tensors of three axes.
_MATRICES_OF_HEADS = ("attn_k_b.weight", "attn_v_b.weight")


def _no_recurrence(reader: Reader, layer: int) -> Mixer | None:
    return None


def _none_unused(reader: Reader) -> Set[str]:
    return frozenset()


def each_mixer(spec: ModelSpec, change: Callable[[int, Attention], Attention]) -> ModelSpec:
    """The spec with another mixer in each layer; change: the new one, of the layer's index and its mixer."""
    layers = enumerate(spec.layers)
    return replace(
        spec, layers=tuple(replace(layer, mixer=change(index, attention_of(layer))) for index, layer in layers)
    )


def each_attention(spec: ModelSpec, change: Callable[[Attention], Attention]) -> ModelSpec:
    """The spec with another mixer in each layer that has Attention; the others keep theirs."""
    layers = (
        replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, Attention) else layer
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def each_ffn(spec: ModelSpec, change: Callable[[int, Dense], Dense]) -> ModelSpec:
    """The spec with another feed-forward network in each layer, all of which are Dense; see each_mixer."""
    layers = enumerate(spec.layers)
    return replace(spec, layers=tuple(replace(layer, ffn=change(index, dense_of(layer))) for index, layer in layers))


def _of_block(block: str, refs: Mapping[str, TensorRef]) -> dict[str, Any]:
    """The tensors of a block, by role."""
    prefix = f"{block}."
    return {role.removeprefix(prefix): ref for role, ref in refs.items() if role.startswith(prefix)}


@dataclass(frozen=True)
class Architecture:
    """How one GGUF `general.architecture` departs from the common layer: `Attention` with RoPE, then `Dense`."""

    name: str
    rope_kind: RopeKind  # see RopeSpec
    # required, optional, without: tensors that a layer has, may have or lacks, where it departs from most
    # architectures; by block and role, such as "mixer.q_bias"
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = QKV_BIASES
    without: frozenset[str] = frozenset()
    fused: bool = True  # queries, keys and values may be one tensor
    fused_ffn: bool = False  # gate and up are one
    renamed: Mapping[str, str] = field(default_factory=dict)  # those that have another name after "blk.<index>."
    experts: ExpertRecipe | None = None  # what is special about its experts, None without any
    skips_nextn: bool = False  # layers that predict tokens further ahead, the last of block_count, are left out
    has_nextn: bool = False  # and they are blocks as NextnBlock has it
    # the layer of such a block (its index), where it is not as the model's own; then its norm is its own, and centred
    nextn_layer: Callable[[Reader, int], Layer] | None = None
    # whether there is an output matrix beside the embeddings
    output: Literal["optional", "required", "tied"] = "optional"
    qk_norm: QKNorm | None = None
    rope_factors: frozenset[str] = frozenset()  # tensors of factors on the frequencies that there may be
    # keys with the values that are understood, the default first
    fixed: Mapping[str, Sequence[object]] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()  # common ones of these that it reads
    # metadata that asks for something that no block has, with the reason
    unsupported_keys: Mapping[str, str] = field(default_factory=dict)
    # the mixer of a layer (its index) that has another one than Attention; None where it has Attention
    recurrence: Callable[[Reader, int], Mixer | None] = _no_recurrence
    norm_epsilon: str | None = None  # the key that has it too, and counts where the usual one is absent
    # the mixer of each layer and of each block behind the layers (its index), where none has Attention
    mixer: Callable[[Reader, int], Mixer] | None = None
    # all layers, where their sizes are not those of one common layer, or blocks of the file are not a mixer and then a
    # network; None for those
    layers: Callable[[Reader], tuple[Layer, ...]] | None = None
    # tensors that some files have, and no layer reads
    unused: Callable[[Reader], Set[str]] = _none_unused
    refine: Callable[[Reader, ModelSpec], ModelSpec] = _unchanged  # the spec with what the other keys say

    def read(self, file: ModelFile) -> ModelSpec:
        """Spec of a file of this architecture. Raises UnsupportedModel, InvalidGGUF."""
        return Reader(self, file).spec()

    def read_nextn(self, file: ModelFile) -> tuple[NextnBlock, ...]:
        """The blocks of it that draft. Raises UnsupportedModel, InvalidGGUF."""
        return Reader(self, file).nextn()


class Reader(KeyReader):
    """Reads keys and tensors of one file; keys are named without the architecture in front."""

    def __init__(self, architecture: Architecture, file: ModelFile) -> None:
        super().__init__(architecture.name, file)
        self.architecture = architecture

    def spec(self) -> ModelSpec:
        """What the file says, all of it checked."""
        self._check_keys()
        spec = self.architecture.refine(self, self._common_spec())
        self._check_tensors(spec.tensor_shapes(), {DRAFT_VOCAB} if has_draft_vocab(self.file) else frozenset())
        return spec

    def nextn(self) -> tuple[NextnBlock, ...]:
        """The blocks behind the layers that draft, all of them checked; () where there are none that can run."""
        spec = self.spec()
        if self._n_skipped() and not self.architecture.has_nextn:
            raise UnsupportedModel(
                f"{self.file.path}: the blocks that draft (nextn) of {spec.architecture} are not read"
            )
        return tuple(self._nextn(spec, self._n_layers() + number) for number in range(self._n_skipped()))

    # ---- what the files of the architectures ask for ---------------------------------------------------------------

    def original_context(self) -> int:
        """The context that the model was first trained with."""
        n_ctx = self._trained_context()
        return self.integer("rope.scaling.original_context_length", 1, (1 << 32) - 1, default=n_ctx)

    def n_blocks(self) -> int:
        """Blocks of the file that are the model's own, without those that draft."""
        return self._n_layers()

    def experts(self) -> ExpertReader | None:
        """What reads the experts; None for a file without."""
        return self._experts(self._n_embd())

    def rope_base(self) -> float:
        """Base of the frequencies, in layers that see everything."""
        return self.number("rope.freq_base", 1.0, 1e15, default=10000.0)

    def rope(self, head_dim: int, base: float, scaled: bool = True, key: str = "rope.dimension_count") -> RopeSpec:
        """The rotation with this base; without what `rope.scaling` says if scaled is False. key: of its n_dims."""
        n_dims = self.integer(key, 2, head_dim, default=head_dim)
        if n_dims % 2:
            self.refuse(key, f"must be even: found {n_dims}")
        frequencies, magnitude = rope.inverse_frequencies(base, n_dims), 1.0
        if scaled:
            frequencies, magnitude = self._scaled(frequencies, base)
            magnitude *= self.number("rope.scaling.attn_factor", 0.0, 1e6, default=1.0)
        return self.with_factors(RopeSpec(self.architecture.rope_kind, n_dims, tuple(frequencies), magnitude))

    def windows(
        self,
        spec: ModelSpec,
        window: int,
        period: int,
        full: RopeSpec | None,
        local: RopeSpec | None,
        full_first: bool = False,
    ) -> ModelSpec:
        """The spec with a window in some layers, whose rotation is `local`; in the others it is `full`.

        Which layers those are the file says, else the period.  full_first: see windowed.
        """
        has_window = self.windowed(period, full_first)
        return each_mixer(
            spec,
            lambda layer, mixer: (
                replace(mixer, rope=local, window=window) if has_window[layer] else replace(mixer, rope=full)
            ),
        )

    def windowed(self, period: int, full_first: bool = False) -> list[bool]:
        """Whether each layer sees a window only: as the file says, or by this period.

        The file's pattern is true or false for each layer, or a period; of each period the last layer sees everything,
        or the first one with full_first.
        """
        n_layers, key = self._n_layers(), "attention.sliding_window_pattern"
        pattern = self.file.metadata.get(self._key(key), period)
        if isinstance(pattern, (Array, list)):
            if len(pattern) != n_layers or not all(isinstance(value, int) and value in (0, 1) for value in pattern):
                self.refuse(key, f"must be {n_layers} times true or false: found {pattern!r:.80}")
            return [bool(value) for value in pattern]
        period = self.integer(key, 0, 1 << 20, default=period)
        sees_all = 0 if full_first else period - 1
        return [period == 0 or layer % period != sees_all for layer in range(n_layers)]

    # ---- keys ------------------------------------------------------------------------------------------------------

    def _check_keys(self) -> None:
        is_read = {"expert_count": self.architecture.experts, "nextn_predict_layers": self.architecture.skips_nextn}
        for key, reason in {**_UNSUPPORTED, **self.architecture.unsupported_keys}.items():
            if self.file.metadata.get(self._key(key)) and not is_read.get(key):
                raise UnsupportedModel(f"{self.file.path}: {self._key(key)} is set: {reason}")
        for key, values in {**_FIXED, **self.architecture.fixed}.items():
            value = self.file.metadata.get(self._key(key), values[0])
            if value not in values and key not in self.architecture.reads:
                only = " or ".join(map(str, values))
                self.refuse(key, f"must be {only}, others are not supported: found {value!r:.80}")

    def _common_spec(self) -> ModelSpec:
        """What all architectures have, before the architecture's own file has its say."""
        n_embd, n_vocab = self._n_embd(), self._n_vocab()
        layers = self.architecture.layers(self) if self.architecture.layers else self._layers(n_embd)
        return ModelSpec(
            architecture=self.architecture.name,
            n_vocab=n_vocab,
            n_ctx_train=self._trained_context(),
            n_layers=len(layers),
            n_embd=n_embd,
            norm_epsilon=self._norm_epsilon(),
            token_embd="token_embd.weight",
            output_norm="output_norm.weight",
            output=self._output(),
            n_logits=self._n_logits(n_vocab),
            layers=layers,
        )

    def _norm_epsilon(self) -> float:
        key, other = "attention.layer_norm_rms_epsilon", self.architecture.norm_epsilon
        if other is not None and self.file.metadata.get(self._key(key)) is None:
            key = other
        return self.number(key, 0.0, 1.0)

    def _n_embd(self) -> int:
        return self.integer("embedding_length", 1, 1 << 20)

    def _trained_context(self) -> int:
        return self.integer("context_length", 1, (1 << 32) - 1)

    def _n_layers(self) -> int:
        return self.integer("block_count", 1, 4096) - self._n_skipped()

    def _n_skipped(self) -> int:
        """Layers after the model's own that predict tokens further ahead, where those are left out."""
        if not self.architecture.skips_nextn:
            return 0
        return self.integer("nextn_predict_layers", 0, self.integer("block_count", 1, 4096) - 1, default=0)

    def _n_vocab(self) -> int:
        if "token_embd.weight" not in self.file.tensors:
            raise UnsupportedModel(f"{self.file.path}: tensor token_embd.weight is missing: not a whole language model")
        return self.file.tensors["token_embd.weight"].shape[0]

    def _n_logits(self, n_vocab: int) -> int:
        draft_vocab = draft_vocab_of(self.file, n_vocab)
        return n_vocab if draft_vocab is None else len(draft_vocab)

    def _head_dim(self, default: int) -> int:
        head_dim = self.integer("attention.key_length", 2, 1 << 14, default=default)
        for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
            if self.integer(key, 2, 1 << 14, default=head_dim) != head_dim:
                self.refuse(key, f"must equal the key length {head_dim}")
        n_dims = self.integer("rope.dimension_count", 2, head_dim, default=head_dim)
        n_dims_swa = self.integer("rope.dimension_count_swa", 2, head_dim, default=n_dims)
        if n_dims_swa != n_dims and "rope.dimension_count_swa" not in self.architecture.reads:
            self.refuse("rope.dimension_count_swa", f"must equal rope.dimension_count {n_dims}")
        return head_dim

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def _output(self) -> str:
        kind = "required" if has_draft_vocab(self.file) else self.architecture.output
        tied = kind == "tied" or (kind == "optional" and "output.weight" not in self.file.tensors)
        return "token_embd.weight" if tied else "output.weight"

    def _layers(self, n_embd: int, indices: Iterable[int] | None = None) -> tuple[Layer, ...]:
        """The common layer, once for each; tensors differ by name. indices: of blocks in place of all layers.

        Blocks behind the layers have Attention.
        """
        experts = self._experts(n_embd)
        make = self._attention_maker(n_embd) if self.architecture.mixer is None else self._other_mixer
        layers = []
        for index in range(self._n_layers()) if indices is None else indices:
            mixer, refs = make(index)
            if experts is not None and experts.has_experts(index):
                layers.append(Layer(mixer, experts.of_layer(index, refs.get("ffn.norm"))))
            else:
                layers.append(Layer(mixer, self._dense(index, n_embd, refs)))
        return tuple(layers)

    def _other_mixer(self, index: int) -> tuple[Mixer, dict[str, TensorRef]]:
        """The mixer of a layer of an architecture without Attention, and the tensors of the layer beside it."""
        assert self.architecture.mixer is not None
        return self.architecture.mixer(self, index), self._refs(index, 0, 0)

    def _attention_maker(self, n_embd: int) -> Callable[[int], tuple[Mixer, dict[str, TensorRef]]]:
        """The same of the others."""
        heads = self._n_heads()
        n_kv_heads = self._n_kv_heads(min(heads))
        head_dim = self._head_dim(n_embd // min(heads))
        rope = self.rope(head_dim, self.rope_base())

        def make(index: int) -> tuple[Mixer, dict[str, TensorRef]]:
            n_heads = heads[index if len(heads) > 1 else 0]
            refs = self._refs(index, n_heads * head_dim, n_kv_heads * head_dim)
            recurrence = self.architecture.recurrence(self, index) if index < self._n_layers() else None
            return recurrence or Attention(
                n_embd=n_embd,
                n_in=n_embd,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                scale=1 / math.sqrt(head_dim),
                rope=rope,
                qk_norm=self.architecture.qk_norm if "mixer.q_norm" in refs else None,
                **_of_block("mixer", refs),
            ), refs

        return make

    def _n_heads(self) -> list[int]:
        """Heads of queries in each layer, and in each block behind them; one number where they cannot differ."""
        key = "attention.head_count"
        if key in self.architecture.reads:
            return self.of_layers(key, 1, 1 << 14)
        return [self.integer(key, 1, 1 << 14)]

    def _n_kv_heads(self, n_heads: int) -> int:
        """Heads of keys in the layers that have Attention; a file may give the others none."""
        key = "attention.head_count_kv"
        if self.architecture.recurrence is _no_recurrence:
            n_kv_heads = self.integer(key, 1, n_heads, default=n_heads)
        else:
            counts = sorted({*self.of_layers(key, 0, n_heads, default=n_heads)} - {0})
            if len(counts) != 1:
                self.refuse(key, f"must be one number in the layers that have attention: found {counts!r:.80}")
            n_kv_heads = counts[0]
        if n_heads % n_kv_heads:
            self.refuse(key, f"must divide the {n_heads} heads: found {n_kv_heads}")
        return n_kv_heads

    def _experts(self, n_embd: int) -> ExpertReader | None:
        """What reads the experts; None for a file without."""
        recipe = self.architecture.experts
        is_dense = recipe is None or (not recipe.is_required and not self.file.metadata.get(self._key("expert_count")))
        return None if recipe is None or is_dense else ExpertReader(recipe, self, n_embd)

    def _dense(self, index: int, n_embd: int, refs: dict[str, TensorRef]) -> Dense:
        """The feed-forward network of a layer without experts. refs: by block and role."""
        n_ff = self.integer("feed_forward_length", 1, 1 << 20)
        if self.architecture.fused_ffn:
            up = f"blk.{index}.ffn_up.weight"
            refs = refs | {"ffn.gate": TensorRows(up, 0, n_ff), "ffn.up": TensorRows(up, n_ff, 2 * n_ff)}
        return Dense(n_embd=n_embd, n_ff=n_ff, **_of_block("ffn", refs))

    def _refs(self, index: int, n_q: int, n_kv: int) -> dict[str, TensorRef]:
        """The tensors of a layer that there are, by block and role."""
        architecture, prefix = self.architecture, f"blk.{index}."
        refs: dict[str, TensorRef] = {
            role: prefix + suffix
            for role, suffix in {**_COMMON, **architecture.renamed}.items()
            if role not in architecture.without
        }
        for role, suffix in _SPECIAL.items():
            there = role in architecture.optional and prefix + suffix in self.file.tensors
            if role in architecture.required or there:
                refs[role] = prefix + suffix
        if refs.keys() & QK_NORMS:  # both or none
            refs |= {role: prefix + _SPECIAL[role] for role in QK_NORMS}
        if architecture.fused:
            refs |= self.fused_attention(prefix, n_q, n_kv)
        return refs

    def _nextn(self, spec: ModelSpec, index: int) -> NextnBlock:
        """The block that drafts with an index in the file. spec: of the model."""
        prefix, there = f"blk.{index}.nextn.", self.file.tensors
        if (make := self.architecture.nextn_layer) is not None:
            layer, required = make(self, index), {"output_norm"}
        else:
            alone = replace(spec, layers=self._layers(spec.n_embd, [index]))
            layer, required = self.architecture.refine(self, alone).layers[0], set()
        models = {"output_norm": spec.output_norm, "token_embd": spec.token_embd, "output": spec.output}
        own = {role: prefix + suffix for role, suffix in OWN.items() if prefix + suffix in there or role in required}
        names = {role: prefix + suffix for role, suffix in REQUIRED.items()}
        tensors: dict[str, Any] = {**models, **own, **names}
        found = NextnBlock(index, spec.n_embd, spec.n_vocab, layer, **tensors, centred_output=bool(required))
        front = f"blk.{index}."
        shapes = {name: shape for name, shape in shapes_in_file(found.weights()).items() if name.startswith(front)}
        self._check_shapes(shapes)
        unknown = sorted(name for name in there if name.startswith(front) and name not in shapes)
        if unknown:
            raise UnsupportedModel(
                f"{self.file.path}: {len(unknown)} tensors are not part of a block that drafts that edgeinfer knows, "
                f"first {unknown[0]}"
            )
        return found

    def _skipped_tensors(self) -> Set[str]:
        """Those of the layers that _n_skipped counts, which are in the file and change no text."""
        if not self._n_skipped():
            return frozenset()
        first = self._n_layers()
        prefixes = tuple(f"blk.{layer}." for layer in range(first, first + self._n_skipped()))
        return {name for name in self.file.tensors if name.startswith(prefixes)}

    def fused_attention(self, prefix: str, n_q: int, n_kv: int) -> dict[str, TensorRef]:
        """Parts of attn_qkv, where the file has that in place of attn_q and the others."""
        refs: dict[str, TensorRef] = {}
        for kind, ending in [("weight", ""), ("bias", "_bias")]:
            name = f"{prefix}attn_qkv.{kind}"
            if name in self.file.tensors:
                refs["mixer.q" + ending] = TensorRows(name, 0, n_q)
                refs["mixer.k" + ending] = TensorRows(name, n_q, n_q + n_kv)
                refs["mixer.v" + ending] = TensorRows(name, n_q + n_kv, n_q + 2 * n_kv)
        return refs

    def _check_tensors(self, expected: Mapping[str, tuple[int, ...]], others: Set[str] = frozenset()) -> None:
        """Raises UnsupportedModel unless the file has the expected tensors, and none beside them and `others`."""
        architecture = self.architecture.name
        self._check_shapes(expected)
        others = others | self.architecture.rope_factors | self._skipped_tensors() | self.architecture.unused(self)
        unknown = sorted(self.file.tensors.keys() - expected.keys() - others)
        if unknown:
            # A tensor that is not read would silently change the text.
            raise UnsupportedModel(
                f"{self.file.path}: {len(unknown)} tensors are not part of a {architecture} model that edgeinfer "
                f"knows, first {unknown[0]}"
            )

    def _check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UnsupportedModel unless the file has the expected tensors."""
        architecture = self.architecture.name
        for name, shape in expected.items():
            info = self.file.tensors.get(name)
            if info is None:
                raise UnsupportedModel(f"{self.file.path}: tensor {name} {shape} is missing, {architecture} needs it")
            is_row = name.endswith(MAY_BE_ROWS) and info.shape == (1, *shape)  # ggml does not tell these apart
            if name.endswith(_MATRICES_OF_HEADS) and len(info.shape) == 3:
                is_row = (info.shape[0] * info.shape[1], info.shape[2]) == shape
            if info.shape != shape and not is_row:
                raise UnsupportedModel(f"{self.file.path}: tensor {name} must have shape {shape}: found {info.shape}")

    # ---- rope ------------------------------------------------------------------------------------------------------

    def _scaled(self, frequencies: list[float], base: float) -> tuple[list[float], float]:
        """Inverse frequencies and magnitude after `rope.scaling`. Defaults and the old key as in llama.cpp."""
        factor = self.number("rope.scaling.factor", 0.0, 1e6, self.number("rope.scale_linear", 0.0, 1e6, 1.0))
        kind = self.file.metadata.get(self._key("rope.scaling.type"), "linear")
        kinds = (*_SCALINGS, "longrope") if self.architecture.rope_factors == LONG_AND_SHORT else _SCALINGS
        if kind not in kinds:
            self.refuse("rope.scaling.type", f"must be one of {', '.join(kinds)}: found {kind!r:.80}")
        magnitude = 1.0
        if kind == "yarn":
            whole_pairs = self.flag("rope.scaling.yarn_truncate", True)  # edgeinfer's own key, see conversion/rope.py
            frequencies = rope.yarn_frequencies(frequencies, base, factor, self.original_context(), whole_pairs)
            log_multiplier = self.number("rope.scaling.yarn_log_multiplier", -0.5, 100.0, 0.0)
            magnitude = rope.yarn_magnitude(factor, log_multiplier)
        elif kind != "none":
            frequencies = [frequency / factor for frequency in frequencies]
        self._check_yarn_factor(magnitude)
        return frequencies, magnitude

    def _check_yarn_factor(self, magnitude: float) -> None:
        """llama.cpp does not look at it, and computes it; Olmo 3 has it in the file, equal to that."""
        key = "rope.scaling.yarn_attn_factor"
        value = self.number(key, 0.0, 1e6, default=1.0)
        if value != 1.0 and not math.isclose(value, magnitude, rel_tol=1e-4):
            self.refuse(key, f"must be 1 or YaRN's own {magnitude:.6g}, others are not supported: found {value!r:.80}")

    def with_factors(self, plain: RopeSpec) -> RopeSpec:
        """The frequencies divided by the factors in the file's tensors."""
        possible = self.architecture.rope_factors & self.file.tensors.keys()
        if not possible:
            return plain
        divided = {name: self._divided(plain, name) for name in sorted(possible)}
        if self.architecture.rope_factors == ROPE_FREQS:
            return replace(plain, inverse_frequencies=divided["rope_freqs.weight"])
        long = divided.get("rope_factors_long.weight", plain.inverse_frequencies)
        short = divided.get("rope_factors_short.weight", plain.inverse_frequencies)
        return replace(plain, inverse_frequencies=short, long=LongRope(self.original_context(), long))

    def _divided(self, plain: RopeSpec, name: str) -> tuple[float, ...]:
        info, n_pairs = self.file.tensors[name], plain.n_dims // 2
        if info.type.name != "F32" or info.shape != (n_pairs,):
            raise UnsupportedModel(
                f"{self.file.path}: tensor {name} must be F32 ({n_pairs},): found {info.type.name} {info.shape}"
            )
        factors: list[float] = self.file.data(name).view("<f4").tolist()
        if not all(math.isfinite(value) and value > 0 for value in factors):
            raise UnsupportedModel(f"{self.file.path}: tensor {name} must be positive and finite")
        return tuple(f / by for f, by in zip(plain.inverse_frequencies, factors, strict=True))
