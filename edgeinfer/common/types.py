"""Names of the arrays and records that pass between the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.settings import CacheType, LoadSettings, TernaryBits

TokenIds: TypeAlias = NDArray[np.int32]  # (n,)
Logits: TypeAlias = NDArray[np.float32]  # (m, n_vocab)
HiddenStates: TypeAlias = NDArray[np.float32]  # (n_taps, n, n_embd)
Features: TypeAlias = NDArray[np.float32]  # (n, n_embd), hidden rows after the final norm, or made of others

LogitsRows: TypeAlias = Literal["last", "all"] | Sequence[int]


@dataclass(frozen=True)
class Output:
    """What a forward pass gives back."""

    # (m, n_vocab) float32, one row for each row that was asked for, in that order. They stay as they are as long as
    # somebody has them or a view of them; after that, a later pass may use their memory
    logits: Logits
    # (n_taps, n, n_embd) float32, the residual stream after each tapped layer, or what the output matrix reads, as it
    # was asked for; or None
    hidden: HiddenStates | None = None
    # (m, n_logits) int32, the tokens that these logits are of, where they are others in each row; or None
    tokens: TokenIds | None = None

    @property
    def features(self) -> Features | None:
        """(n, n_taps * n_embd): all that was tapped of a row, side by side."""
        if self.hidden is None or len(self.hidden) == 1:
            return None if self.hidden is None else self.hidden[0]
        return np.concatenate(list(self.hidden), axis=1)


@dataclass(frozen=True)
class Nodes:
    """A draft tree that a device made in one call."""

    # tokens, parents, p: (n,), as in DraftTree
    tokens: TokenIds
    parents: TokenIds
    p: NDArray[np.float32]
    # candidates, probabilities: (n_rows, k) the top-k tokens, most probable first, and their probabilities. Row 0 is
    # for the position after the text, row 1 + i for the position after node i; nodes of the last level have no row.
    candidates: NDArray[np.int32]
    probabilities: NDArray[np.float32]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes held by a session, by purpose."""

    weights: int  # without experts
    kv_cache: int
    activations: int
    drafters: int = 0  # all that speculation needs beside the model
    experts: int = 0  # all experts of the model, or the cache of those that are in memory
    # main memory that another device takes to compute experts, none for one with memory of its own
    expert_device: int = 0
    # mapped, mapped_experts: of weights and of experts, what are pages of a mapped file, which the system may take back
    # and read again
    mapped: int = 0
    mapped_experts: int = 0
    windows: int = 0  # of the KV cache, what layers with a sliding window have
    states: int = 0  # of the KV cache, what recurrent layers have: states, earlier ones, rows of tokens

    @property
    def total(self) -> int:
        """All bytes together."""
        of_experts = self.experts + self.expert_device
        return self.weights + self.kv_cache + self.activations + self.drafters + of_experts


@dataclass(frozen=True)
class MemoryPlan:
    """What a session is to be made with, and the bytes that it will take."""

    settings: LoadSettings  # as the backend takes them; n_ctx, n_batch, cache_type and expert_cache are theirs
    use: MemoryUse
    ternary_bits: TernaryBits = "2"  # that a ternary weight takes in memory, which changes no bit of the result
    cache_positions: int | None = None  # of all texts together, None for those of one

    @property
    def n_sequences(self) -> int:
        """Most texts that run at once."""
        return self.settings.n_texts

    @property
    def n_positions(self) -> int:
        """Positions of the KV cache, which all texts share; what texts have in common is there once."""
        return self.settings.n_ctx if self.cache_positions is None else self.cache_positions

    @property
    def n_ctx(self) -> int:
        """See LoadSettings."""
        return self.settings.n_ctx

    @property
    def n_batch(self) -> int:
        """See LoadSettings."""
        return self.settings.n_batch

    @property
    def cache_type(self) -> CacheType:
        """See LoadSettings."""
        return self.settings.cache_type

    @property
    def expert_cache(self) -> int | None:
        """See LoadSettings."""
        return self.settings.expert_cache


@dataclass(frozen=True)
class ExpertSizes:
    """What the experts of a model take in memory, in bytes, and how many there are."""

    total: int  # all of them
    least: int  # the smallest cache with which a pass can run, that of one layer's n_used experts
    a_token: int  # what one token reads, all layers together
    n_layers: int
    n_experts: int
    n_used: int


@dataclass(frozen=True)
class Device:
    """A CPU with the number of threads to use on it; isa is the instruction-set path, None for the best one."""

    n_threads: int
    isa: str | None = None
