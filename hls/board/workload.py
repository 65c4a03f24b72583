"""What a board does for a token of a model: the products of its layers, and the bytes that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.hls.geometry import LANE_BYTES, Geometry
from edgeinfer.models.spec import Attention, Dense, ModelSpec, attention_of

_HEAD_TRITS = 80  # of 16 bytes in base 3


@dataclass(frozen=True)
class Product:
    """A ternary matrix (n_out, n_in) of a layer, of those with the same input merged into one."""

    phase: str
    n_out: int
    n_in: int


@dataclass(frozen=True)
class Workload:
    """products: of all layers, in order.  n_q: numbers of all queries of a token, n_kv of its keys in all layers.

    n_logits: rows of the output matrix.  tied: whether it is the embeddings.
    """

    name: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_q: int
    n_kv: int
    products: Sequence[Product]
    n_logits: int
    tied: bool

    @property
    def n_weights(self) -> int:
        """Ternary weights of all layers."""
        return sum(each.n_out * each.n_in for each in self.products)

    def weight_bytes(self, geometry: Geometry) -> int:
        """Of the streams of all layers, padding included."""
        return sum(geometry.stream_bytes(each.n_out, each.n_in) for each in self.products)

    @property
    def head_bytes(self) -> int:
        """Of the output matrix as int8 with a scale a row."""
        return self.n_logits * (self.n_embd + 4)

    def embedding_bytes(self, type: Literal["int8", "bf16"]) -> int:
        """Of the embeddings, int8 with a scale a row."""
        return self.n_vocab * (self.n_embd + 4 if type == "int8" else 2 * self.n_embd)

    @property
    def ternary_head_bytes(self) -> int:
        """Of the first stage of the output matrix, ternary in base 3, each row padded to 16 bytes."""
        return self.n_logits * -(-self.n_embd // _HEAD_TRITS) * LANE_BYTES

    def cache_bytes(self, n_ctx: int) -> int:
        """Of keys and values in float16."""
        return 2 * 2 * self.n_kv * n_ctx


def layer_products(n_embd: int, n_q: int, n_kv: int, n_ff: int) -> list[Product]:
    """The four products of a layer with grouped attention and a gated feed-forward network."""
    return [
        Product("qkv", n_q + 2 * n_kv, n_embd),
        Product("o", n_embd, n_q),
        Product("gate_up", 2 * n_ff, n_embd),
        Product("down", n_embd, n_ff),
    ]


def workload(name: str, n_layers: int, n_embd: int, n_kv: int, n_ff: int, n_vocab: int, tied: bool) -> Workload:
    """Of a model whose layers are alike, with as many queries as inputs. n_kv: numbers of a token's keys in a layer."""
    products = layer_products(n_embd, n_embd, n_kv, n_ff) * n_layers
    return Workload(name, n_layers, n_embd, n_vocab, n_embd, n_kv * n_layers, products, n_vocab, tied)


def workload_of(name: str, spec: ModelSpec) -> Workload:
    """Of a model, whatever the formats of its matrices. Raises UnsupportedModel for layers that are not dense."""
    products: list[Product] = []
    n_kv = 0
    for index, layer in enumerate(spec.layers):
        attention, ffn = attention_of(layer), layer.ffn
        if not isinstance(attention, Attention) or not isinstance(ffn, Dense):
            found = f"{type(attention).__name__} and {type(ffn).__name__}"
            raise UnsupportedModel(f"{name}: layer {index} must be Attention and Dense for a board: found {found}")
        products += layer_products(spec.n_embd, attention.n_q, attention.n_kv, ffn.n_ff)
        n_kv += attention.n_kv
    first = attention_of(spec.layers[0])
    n_q = first.n_q if isinstance(first, Attention) else spec.n_embd
    sizes = spec.n_layers, spec.n_embd, spec.n_vocab, n_q, n_kv
    return Workload(name, *sizes, products, spec.n_logits, spec.tied_embeddings)


BITNET_2B4T = workload("BitNet b1.58 2B-4T", n_layers=30, n_embd=2560, n_kv=640, n_ff=6912, n_vocab=128_256, tied=True)
BITNET_07B = workload("bitnet_b1_58-large", n_layers=24, n_embd=1536, n_kv=1536, n_ff=4096, n_vocab=32_002, tied=False)
