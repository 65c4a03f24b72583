"""What the CPU takes for an expert."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.experts.model_experts import ModelExperts
from edgeinfer.models.gguf import ModelFile

_MOST_BYTES = 64 << 20  # of experts that are multiplied in turn: more than most caches have
_TRIES = 3


def expert_seconds(
    experts: ModelExperts, model: ModelFile, isa: str, n_threads: int, sizes: Sequence[int]
) -> dict[int, float]:
    """Seconds of the products of one expert with so many rows, by rows: of the first layer, the best of three tries."""
    layer = experts.layers[0]
    n_experts = max(1, min(layer.n_experts, _MOST_BYTES // experts.layout.record_bytes(layer.index)))
    matrices = [
        _core.PackedMatrix(int(part.type), *part.shape, part.data(model, expert), 1.0, part.packed_as)
        for expert in range(n_experts)
        for part in layer.parts
        if part.n_bytes  # of experts without gates one has none
    ]
    return {n: min(_core.time_products(matrices, isa, n_threads, n) for _ in range(_TRIES)) / n_experts for n in sizes}
