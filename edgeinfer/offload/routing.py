"""Recorded routing: which experts each token of a text used in each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidArgument

NONE = -1  # no expert, where a layer was not run for a token


@dataclass(frozen=True)
class Routing:
    """The experts that tokens used, and how the tokens were cut into passes.

    chosen: (n_tokens, n_layers, n_used) int32, NONE where a layer was not run for a token.  n_experts: of a layer.
    n_prompt: tokens of the prompt, the first ones.  pass_lengths: tokens of each pass, None where each is one of its
    own.
    """

    chosen: NDArray[np.int32]
    n_experts: int
    n_prompt: int = 0
    pass_lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.chosen.ndim != 3:
            raise InvalidArgument(f"routing must be (n_tokens, n_layers, n_used): found {self.chosen.shape}")
        if self.chosen.size and not NONE <= self.chosen.min() <= self.chosen.max() < self.n_experts:
            raise InvalidArgument(f"routing must be of experts 0..{self.n_experts - 1}, or {NONE} for none")
        if self.pass_lengths is not None and sum(self.pass_lengths) != self.n_tokens:
            raise InvalidArgument(f"passes must have all {self.n_tokens} tokens: found {sum(self.pass_lengths)}")

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.chosen)

    @property
    def n_layers(self) -> int:
        """Number of layers with experts."""
        return int(self.chosen.shape[1])

    def passes(self) -> Iterator[tuple[bool, list[list[int]]]]:
        """Of each pass: whether it is of the prompt, and by layer the experts that its rows want, ascending."""
        first = 0
        for length in [1] * self.n_tokens if self.pass_lengths is None else self.pass_lengths:
            rows = self.chosen[first : first + length]
            is_prompt = first < self.n_prompt
            if length == 1:
                yield is_prompt, [sorted({*used} - {NONE}) for used in rows[0].tolist()]
            else:
                yield is_prompt, [sorted({*rows[:, layer].reshape(-1).tolist()} - {NONE}) for layer in self.layers]
            first += length

    @property
    def layers(self) -> range:
        """Indices of the layers."""
        return range(self.n_layers)
