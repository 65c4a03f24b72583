"""The draft head in torch: Dovetail's gate (arXiv:2412.18934, section 3.2) and llama blocks after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ModelSpec, RopeSpec, attention_of, dense_of
from edgeinfer.models.draft_head import ARCHITECTURE, HeadSpec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.rope import inverse_frequencies
from edgeinfer.training.features import Taps
from edgeinfer.training.target import Rotation, Turns, turned


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a head, named as in its file."""

    n_embd: int  # width of a feature
    n_layers: int  # blocks after the gate
    n_ff: int
    n_heads: int
    n_kv_heads: int
    norm_epsilon: float
    rope_base: float
    n_ctx: int  # positions of the target's training
    n_taps: int = 0  # layers of the target whose rows are combined to a feature; 0: its rows after the last norm

    @classmethod
    def of(cls, file: ModelFile, spec: ModelSpec, n_layers: int, taps: Taps = True) -> HeadSizes:
        """Those of the target, with as many blocks as given. Raises UnsupportedModel for heads that do not divide."""
        shape = _shape_of(file, spec)
        if spec.n_embd % (2 * shape[1]):
            raise UnsupportedModel(
                f"{file.path}: a draft head needs rows of a multiple of 2 x {shape[1]} heads: found {spec.n_embd}"
            )
        return cls._of(file, spec.architecture, spec, n_layers, shape, taps)

    @classmethod
    def of_head(cls, file: ModelFile, head: HeadSpec) -> HeadSizes:
        """Those of the head in a file."""
        decoder = head.decoder
        shape = _shape_of(file, decoder) if decoder.layers else (0, 1, 1)  # without blocks nothing depends on it
        return cls._of(file, ARCHITECTURE, decoder, decoder.n_layers, shape, head.taps)

    @classmethod
    def _of(
        cls, file: ModelFile, architecture: str, spec: ModelSpec, n_layers: int, shape: tuple[int, int, int], taps: Taps
    ) -> HeadSizes:
        base = file.metadata.get(f"{architecture}.rope.freq_base", 10000.0)
        rope_base = float(base) if isinstance(base, int | float) else 1e4
        n_taps = 0 if isinstance(taps, bool) else len(taps)
        return cls(spec.n_embd, n_layers, *shape, spec.norm_epsilon, rope_base, spec.n_ctx_train, n_taps)

    def keys(self) -> dict[str, int | float]:
        """The file's metadata of them, by keys without the prefix "draft-head."."""
        return {
            "embedding_length": self.n_embd,
            "block_count": self.n_layers,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.layer_norm_rms_epsilon": self.norm_epsilon,
            "rope.freq_base": self.rope_base,
            "context_length": self.n_ctx,
        }


def _shape_of(file: ModelFile, spec: ModelSpec) -> tuple[int, int, int]:
    """(n_ff, n_heads, n_kv_heads) of the layers. Raises UnsupportedModel where they differ."""
    blocks = [(attention_of(layer), dense_of(layer)) for layer in spec.layers]
    shapes = {(dense.n_ff, attention.n_heads, attention.n_kv_heads) for attention, dense in blocks}
    if len(shapes) != 1:
        raise UnsupportedModel(
            f"{file.path}: a draft head has the sizes of its target's layers, which must all be the same: found "
            f"(n_ff, n_heads, n_kv_heads) of {', '.join(map(str, sorted(shapes)))}"
        )
    return shapes.pop()


KeysValues = tuple[torch.Tensor, torch.Tensor]  # (n, n_kv_heads, m, head_dim) each


class Block(nn.Module):
    """A llama block: attention and a gated network, each after an RMS norm and with a residual connection."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        n_embd, head_dim = sizes.n_embd, sizes.n_embd // sizes.n_heads
        self.sizes = sizes
        self.attn_norm = nn.RMSNorm(n_embd, sizes.norm_epsilon)
        self.attn_q = _linear(n_embd, n_embd)
        self.attn_k = _linear(n_embd, sizes.n_kv_heads * head_dim)
        self.attn_v = _linear(n_embd, sizes.n_kv_heads * head_dim)
        self.attn_output = _linear(n_embd, n_embd)
        self.ffn_norm = nn.RMSNorm(n_embd, sizes.norm_epsilon)
        self.ffn_gate = _linear(n_embd, sizes.n_ff)
        self.ffn_up = _linear(n_embd, sizes.n_ff)
        self.ffn_down = _linear(sizes.n_ff, n_embd)

    def forward(
        self,
        x: torch.Tensor,
        turns: Turns,
        mask: torch.Tensor,
        past: Sequence[KeysValues] = (),
    ) -> tuple[torch.Tensor, KeysValues]:
        """The rows and their own keys and values.

        x: (n, m, n_embd) float32.  turns: of the rows' positions.  past: keys and values of earlier rows.
        mask: (n, 1, m, k) over the k rows of `past` and x, in this order; True for what a row sees.
        """
        sizes = self.sizes
        h = self.attn_norm(x)
        q = turned(self._heads(self.attn_q(h)).float(), turns).transpose(1, 2)
        k = turned(self._heads(self.attn_k(h)).float(), turns).transpose(1, 2)
        v = self._heads(self.attn_v(h)).transpose(1, 2)
        group = sizes.n_heads // sizes.n_kv_heads
        keys, values = (
            torch.cat(parts, dim=2).repeat_interleave(group, dim=1)
            for parts in zip(*past, (k, v), strict=True)  # all keys, and all values
        )
        y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.attn_output(y.transpose(1, 2).flatten(-2)).float()
        h = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(h)) * self.ffn_up(h)).float(), (k, v)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(-1, (-1, self.sizes.n_embd // self.sizes.n_heads))


class NormOfParts(nn.Module):
    """An RMS norm of each part of a row. weight: (n_parts * n_embd,)."""

    def __init__(self, n_parts: int, n_embd: int, epsilon: float) -> None:
        super().__init__()
        self._n_embd = n_embd
        self._epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(n_parts * n_embd))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (..., n_parts * n_embd)."""
        parts = rows.unflatten(-1, (-1, self._n_embd))
        return functional.rms_norm(parts, (self._n_embd,), eps=self._epsilon).flatten(-2) * self.weight


class DraftHead(nn.Module):
    """From the feature of a position and the token after it to the feature of the next position.

    h1 = W1 f;  h2 = SiLU(W2 norm(e));  z = sigmoid(Wz [h1; h2]);  x = z h1 + (1 - z) h2;  then the blocks.
    f: the target's row after its last norm, or with taps a product with its rows after several layers, each normed.
    e: its embedding of the token.
    """

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        n_embd = sizes.n_embd
        self.sizes = sizes
        self.feature = _linear(n_embd, n_embd)
        self.token_norm = nn.RMSNorm(n_embd, sizes.norm_epsilon)
        self.token = _linear(n_embd, n_embd)
        self.mix = _linear(2 * n_embd, n_embd)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.n_layers))
        n_dims = n_embd // sizes.n_heads
        frequencies = tuple(inverse_frequencies(sizes.rope_base, n_dims))
        self.rope = Rotation(RopeSpec("interleaved", n_dims, frequencies))
        if sizes.n_taps:
            self.combine_norm = NormOfParts(sizes.n_taps, n_embd, sizes.norm_epsilon)
            self.combine = _linear(sizes.n_taps * n_embd, n_embd)

    def combined(self, rows: torch.Tensor) -> torch.Tensor:
        """Features (..., n_embd) of the target's rows: combined by a head with taps, otherwise the rows themselves."""
        return self.combine(self.combine_norm(rows)).float() if self.sizes.n_taps else rows

    def forward(
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        past: Sequence[Sequence[KeysValues]] = (),
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """The next features, (n, m, n_embd), and the keys and values of each block.

        features, embeddings: (n, m, n_embd).  positions: (n, m).  past: results of earlier calls,
        whose rows these may see.  mask: as for Block.forward.
        """
        h1 = self.feature(features)
        h2 = functional.silu(self.token(self.token_norm(embeddings)))
        z = torch.sigmoid(self.mix(torch.cat([h1, h2], dim=-1)).float())
        x = z * h1.float() + (1 - z) * h2.float()
        turns, own = self.rope(positions), []
        for index, block in enumerate(self.blocks):
            x, keys_values = block(x, turns, mask, [each[index] for each in past])
            own.append(keys_values)
        return x, own

    @torch.no_grad()
    def begin_with(self, next_feature: torch.Tensor, last_norm: torch.Tensor | None = None) -> None:
        """Start as a linear guess: next_feature (n_embd, n_embd) times the feature.

        The gate is half open; the token adds little yet, and the blocks nothing. last_norm: weights of the target's
        last norm, used with taps. The combined row then starts as the last layer's row after this norm; rows of the
        other layers, scaled to the same size, add nothing yet.
        """
        if last_norm is not None and self.sizes.n_taps:
            self.combine_norm.weight.fill_(last_norm.square().mean().sqrt().item())
            self.combine_norm.weight[-self.sizes.n_embd :] = last_norm
            self.combine.weight.zero_()
            self.combine.weight[:, -self.sizes.n_embd :].fill_diagonal_(1.0)
        self.feature.weight.copy_(2.0 * next_feature)
        self.token.weight.mul_(0.1)
        self.mix.weight.zero_()
        for block in self.blocks:
            block.attn_output.weight.zero_()
            block.ffn_down.weight.zero_()

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The weights, by their names in a file."""
        return {_file_name(name): values.detach().float().cpu().numpy() for name, values in self.named_parameters()}

    def load_tensors(self, tensors: dict[str, NDArray[np.float32]]) -> None:
        """Set the weights to those of `tensors`."""
        state = {name: torch.from_numpy(tensors[_file_name(name)]) for name, _ in self.named_parameters()}
        self.load_state_dict(state)

    def load_file(self, file: ModelFile) -> None:
        """Set the weights to those of the head in a file. Raises UnsupportedModel if it has other sizes."""
        expected = {name: values.shape for name, values in self.tensors().items()}
        found = {name: file.tensors[name].shape for name in expected if name in file.tensors}
        n_blocks = file.metadata.get("draft-head.block_count")
        if found != expected or n_blocks != self.sizes.n_layers:
            raise UnsupportedModel(
                f"{file.path} must have {self.sizes.n_layers} blocks and {self.sizes.n_taps} taps of rows of "
                f"{self.sizes.n_embd}: found {n_blocks} blocks"
            )
        self.load_tensors(
            {name: dequantize(file.tensors[name].type, file.data(name), shape) for name, shape in expected.items()}
        )


def _file_name(parameter: str) -> str:
    name = parameter.replace("blocks.", "blk.")
    return name if name.startswith(("blk.", "combine")) else f"gate.{name}"


def _linear(n_in: int, n_out: int) -> nn.Linear:
    """A matrix without a bias, with Xavier's normal initial values."""
    linear = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(linear.weight, std=math.sqrt(2 / (n_in + n_out)))
    return linear
