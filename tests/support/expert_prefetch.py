"""Reading experts ahead, at a share that a test or a benchmark says."""

from __future__ import annotations

import math

from edgeinfer.backends.native import NativeModel
from edgeinfer.models import Experts


def set_expert_prefetch(model: NativeModel, share: float) -> None:
    """Read this share of the experts of a token ahead in all layers but the first one with experts, 0 for none.

    See ExpertCache.set_prefetch; without an expert cache there is nothing to read.
    """
    cache = model.expert_cache
    if cache is None:
        return
    for layer, block in enumerate(layer.ffn for layer in model.spec.layers):
        if isinstance(block, Experts):
            cache.set_prefetch(layer, math.ceil(share * block.n_used))
