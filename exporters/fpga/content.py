"""What a folder for a board holds of a model: its products by layer and phase, its vectors, and the facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.fpga.options import USUAL_N_CTX, BoardOptions
from edgeinfer.exporters.ternary.source import StoredTensor, TernarySource, TernaryTensor
from edgeinfer.hls.files.manifest import Part
from edgeinfer.hls.packing import Trits
from edgeinfer.models import ModelSpec, attention_of, check_blocks
from edgeinfer.models.formats import dequantize
from edgeinfer.models.formats.ternary_matrix import Floats, TernaryMatrix
from edgeinfer.models.gguf import GGMLType
from edgeinfer.models.reader import ROPE_TENSORS
from edgeinfer.models.spec import Attention, Dense, RopeSpec, TensorRef

# The fields of blocks that a folder has a place for; see check_blocks.
BLOCKS: dict[type, tuple[str, ...]] = {
    Attention: (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "qk_norm"),
        *("norm", "post_norm", "sub_norm", "q_norm", "k_norm"),
    ),
    Dense: ("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm"),
}
_PLAIN = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0, "logit_soft_cap": None}
_VECTORS = {  # by block and field, with the name in the folder
    "mixer": {"norm": "attn_norm", "q_norm": "q_norm", "k_norm": "k_norm", "sub_norm": "attn_sub_norm"}
    | {"post_norm": "attn_post_norm"},
    "ffn": {"norm": "ffn_norm", "sub_norm": "ffn_sub_norm", "post_norm": "ffn_post_norm"},
}


@dataclass(frozen=True)
class Product:
    """The matrices of a layer that share their input, as one matrix (n_out, n_in): rows of one behind the other's."""

    name: str
    phase: str
    layer: int
    tensors: Sequence[TernaryTensor]

    @property
    def shape(self) -> tuple[int, int]:
        """(n_out, n_in)."""
        return sum(tensor.shape[0] for tensor in self.tensors), self.tensors[0].shape[1]

    @property
    def parts(self) -> list[Part]:
        """Which rows are which tensor."""
        ends = np.cumsum([0, *(tensor.shape[0] for tensor in self.tensors)]).tolist()
        return [Part(tensor.name, *ends[n : n + 2]) for n, tensor in enumerate(self.tensors)]

    def read(self) -> tuple[Trits, Floats]:
        """Trits int8 (n_out, n_in) and the scale of each row (n_out,). Raises UnsupportedModel."""
        trits, scales = np.empty(self.shape, dtype=np.int8), np.empty(self.shape[0], dtype=np.float32)
        for tensor, part in zip(self.tensors, self.parts, strict=True):
            matrix: TernaryMatrix = tensor.matrix()
            trits[part.first : part.last] = matrix.trits
            scales[part.first : part.last] = matrix.row_scales(tensor.name)
        return trits, scales


@dataclass(frozen=True)
class Content:
    """A model and how it is to be written."""

    source: TernarySource
    spec: ModelSpec
    options: BoardOptions
    products: Sequence[Product]

    @property
    def n_ctx(self) -> int:
        """Positions that there are rotations for."""
        return self.options.n_ctx or min(self.spec.n_ctx_train, USUAL_N_CTX)

    @property
    def rope(self) -> RopeSpec:
        """The rotation, which all layers share."""
        rope = attention_of(self.spec.layers[0]).rope
        assert rope is not None  # check_model
        return rope.of_context(self.n_ctx)

    @property
    def golden_layers(self) -> list[int]:
        """The first layer, one in the middle, and the last."""
        n = self.spec.n_layers
        return sorted({0, n // 2, n - 1}) if self.options.n_golden else []

    def stored(self, name: str) -> StoredTensor:
        """A tensor that is no ternary matrix. Raises UnsupportedModel for one that is."""
        found = next(tensor for tensor in self.source.tensors if tensor.name == name)
        if not isinstance(found, StoredTensor) or found.type == GGMLType.I2_S:
            raise UnsupportedModel(
                f"{self.source.path}: tensor {name} must not be ternary: found I2_S; a board has embeddings and the "
                "output matrix in int8 or bf16: take a file with them in F16, BF16 or Q6_K"
            )
        return found

    def vectors(self) -> Iterator[tuple[str, Floats]]:
        """The norms, by their names in the folder."""
        for index, layer in enumerate(self.spec.layers):
            for block, names in _VECTORS.items():
                for field, name in names.items():
                    ref = getattr(getattr(layer, block), field, None)
                    if ref is not None:
                        yield f"layers.{index}.{name}", self._vector(ref)
        yield "output_norm", self._vector(self.spec.output_norm)

    def _vector(self, name: str | None) -> Floats:
        tensor = self.stored(str(name))
        return dequantize(tensor.type, tensor.data(), tensor.shape).reshape(-1)


def content_of(source: TernarySource, spec: ModelSpec, options: BoardOptions) -> Content:
    """What a model becomes. Raises UnsupportedModel for one that a board of this kind cannot run, by name."""
    check_model(source, spec)
    tensors = {tensor.name: tensor for tensor in source.tensors}
    unknown = sorted(set(tensors) - set(spec.tensor_shapes()) - ROPE_TENSORS)
    if unknown:
        raise UnsupportedModel(
            f"{source.path}: tensor {unknown[0]} has no place in a folder for a board: nothing is left out"
        )
    content = Content(source, spec, options, list(_products(source, spec, tensors)))
    for name in (str(spec.token_embd), source.output):
        content.stored(name)
    return content


def check_model(source: TernarySource, spec: ModelSpec) -> None:
    """Raises UnsupportedModel for what a folder has no place for."""
    check_blocks(spec.blocks(), BLOCKS, "FPGA", source.path)
    for field, value in _PLAIN.items():
        if getattr(spec, field) != value:
            raise UnsupportedModel(f"{source.path}: {field} must be {value} for a board: found {getattr(spec, field)}")
    facts = ((_layer_facts(spec, index), attention_of(layer).rope) for index, layer in enumerate(spec.layers))
    first, *others = facts
    for index, other in enumerate(others, 1):
        if other != first:
            raise UnsupportedModel(f"{source.path}: all layers must be alike for a board: layer {index} differs from 0")
    if attention_of(spec.layers[0]).rope is None:
        raise UnsupportedModel(f"{source.path}: queries and keys must be rotated (RoPE) for a board: layer 0 has none")


def _products(source: TernarySource, spec: ModelSpec, tensors: Mapping[str, Any]) -> Iterator[Product]:
    for index, layer in enumerate(spec.layers):
        mixer, ffn = attention_of(layer), layer.ffn
        assert isinstance(ffn, Dense)  # check_blocks
        phases = {
            "qkv": (mixer.q, mixer.k, mixer.v),
            "o": (mixer.output,),
            "gate_up": (ffn.gate, ffn.up),
            "down": (ffn.down,),
        }
        for phase, refs in phases.items():
            found = [tensors.get(ref) if isinstance(ref, str) else None for ref in refs]
            if not all(isinstance(tensor, TernaryTensor) for tensor in found):
                raise UnsupportedModel(
                    f"{source.path}: {phase} of layer {index} must be ternary matrices of their own: found "
                    f"{', '.join(_described(ref) for ref in refs)}"
                )
            yield Product(f"layers.{index}.{phase}", phase, index, [each for each in found if each is not None])


def _described(ref: TensorRef) -> str:
    return ref if isinstance(ref, str) else f"a part of {ref.name}"


def model_facts(content: Content) -> dict[str, Any]:
    """What the host and the kernels must know of the architecture, for `model` of the manifest."""
    spec, rope, metadata = content.spec, content.rope, content.source.metadata
    base = metadata.get(f"{spec.architecture}.rope.freq_base", 10000.0)
    return {
        "name": str(metadata.get("general.name", content.source.path.name)),
        "architecture": spec.architecture,
        "n_layers": spec.n_layers,
        "n_vocab": spec.n_vocab,
        "n_logits": spec.n_logits,
        "n_ctx": content.n_ctx,
        "norm_epsilon": spec.norm_epsilon,
        "tied_embeddings": spec.tied_embeddings,
        "rope": {"kind": rope.kind, "n_dims": rope.n_dims, "base": float(str(base)), "magnitude": rope.magnitude},
        **_layer_facts(spec, 0),
    }


def _layer_facts(spec: ModelSpec, index: int) -> dict[str, Any]:
    """Sizes and kinds of a layer."""
    mixer, ffn = attention_of(spec.layers[index]), spec.layers[index].ffn
    assert isinstance(ffn, Dense)  # check_blocks
    norms = [name for block, names in _VECTORS.items() for field, name in names.items()
             if getattr(getattr(spec.layers[index], block), field, None) is not None]  # fmt: skip
    return {
        "n_embd": spec.n_embd,
        "n_heads": mixer.n_heads,
        "n_kv_heads": mixer.n_kv_heads,
        "head_dim": mixer.head_dim,
        "n_ff": ffn.n_ff,
        "attention_scale": mixer.scale,
        "activation": ffn.activation,
        "qk_norm": mixer.qk_norm or "none",
        "norms": norms,
    }
