"""Tiny models whose matrices have any shapes and ternary weights, for exports to boards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tiny_models import Floats, Sizes, add_bpe, add_keys, add_matrix, named_writer, normal, size_keys, written

Fill = Literal["random", "ones", "minus ones", "zeros"]
_N_VOCAB = 291


@dataclass(frozen=True)
class Shapes:
    """Sizes of a layer, whose products are (n_q + 2 n_kv, n_embd), (n_embd, n_q), (2 n_ff, n_embd), (n_embd, n_ff)."""

    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    fill: Fill = "random"

    @property
    def products(self) -> list[tuple[int, int]]:
        """(n_out, n_in) of each."""
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return [
            (n_q + 2 * n_kv, self.n_embd),
            (self.n_embd, n_q),
            (2 * self.n_ff, self.n_embd),
            (self.n_embd, self.n_ff),
        ]


def random_shapes(n: int, seed: int, most_in: int = 4500) -> list[Shapes]:
    """n models. The first are extremes: one row and one input, 4,096 inputs and more, weights that are all alike."""
    rng = np.random.default_rng(seed)
    found = [
        Shapes(1, 1, 1, 2, 1),
        Shapes(3, 1, 1, 2, most_in),
        Shapes(7, 1, 1, 4, 4096, "ones"),
        Shapes(5, 2, 1, 2, 4097, "minus ones"),
        Shapes(33, 3, 1, 10, 61, "zeros"),
    ]
    while len(found) < n:
        head_dim, n_kv_heads = 2 * int(rng.integers(1, 17)), int(rng.integers(1, 4))
        n_heads = n_kv_heads * int(rng.integers(1, 5))
        found.append(Shapes(int(rng.integers(2, 321)), n_heads, n_kv_heads, head_dim, int(rng.integers(2, 641))))
    return found[:n]


def write_ternary_model(path: Path, shapes: Shapes, seed: int) -> Path:
    """A llama of one layer whose matrices are F32 numbers -s, 0 or s, one s a matrix."""
    sizes = Sizes(
        shapes.n_embd, 1, shapes.n_heads, shapes.n_kv_heads, shapes.head_dim, shapes.n_ff, _N_VOCAB
    )  # fmt: skip
    writer = named_writer(path, "llama", "F32")
    keys = size_keys(sizes) | {"context_length": 64, "rope.freq_base": 10000.0}
    add_keys(writer, {f"llama.{key}": value for key, value in keys.items()})
    add_bpe(writer, _N_VOCAB, {}, "{{ messages }}")
    for name in ("token_embd", "output"):
        add_matrix(writer, f"{name}.weight", "F32", normal(seed, name, (_N_VOCAB, shapes.n_embd)))
    n_q, n_kv = shapes.n_heads * shapes.head_dim, shapes.n_kv_heads * shapes.head_dim
    of_layer = {"attn_q": (n_q, shapes.n_embd), "attn_k": (n_kv, shapes.n_embd), "attn_v": (n_kv, shapes.n_embd)}
    of_layer |= {"attn_output": (shapes.n_embd, n_q), "ffn_down": (shapes.n_embd, shapes.n_ff)}
    of_layer |= {name: (shapes.n_ff, shapes.n_embd) for name in ("ffn_gate", "ffn_up")}
    for name, shape in of_layer.items():
        add_matrix(writer, f"blk.0.{name}.weight", "F32", ternary_weights(shape, shapes.fill, seed, name))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(shapes.n_embd, dtype=np.float32))
    return written(writer, path)


def ternary_weights(shape: tuple[int, int], fill: Fill, seed: int, name: str) -> Floats:
    """-s, 0 and s, or all alike."""
    scale = np.float32(2.0 ** (seed % 5 - 2))
    if fill == "random":
        return np.clip(np.round(normal(seed, name, shape)), -1, 1).astype(np.float32) * scale
    return np.full(shape, {"ones": 1, "minus ones": -1, "zeros": 0}[fill], dtype=np.float32) * scale
