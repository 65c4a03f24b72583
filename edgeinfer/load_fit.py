"""How large the weights of a model may be, so that a load takes no more than a given memory."""

from __future__ import annotations

import math
from typing import NoReturn

from edgeinfer.arguments import human_bytes
from edgeinfer.errors import BudgetExceeded
from edgeinfer.load_options import LoadOptions
from edgeinfer.load_plan import plan_load
from edgeinfer.models.gguf import GGMLType, ModelFile

_SMALL = GGMLType.Q4_0  # of all matrices in the plan: what else a load takes does not depend on it


def weight_bytes_that_fit(file: ModelFile, memory: int, n_ctx: int | None = None) -> int:
    """The most bytes of tensors with which `edgeinfer.load` takes no more than `memory`, all in the ledger counted.

    file: its matrices are defined anew, without their bytes; it is of no use for anything else afterwards. Raises
    BudgetExceeded where nothing is left for weights, and what plan_load raises.
    """
    for name, info in list(file.tensors.items()):
        if len(info.shape) > 1 and info.shape[-1] % _SMALL.block_elements == 0:
            file.define(name, _SMALL, info.shape, _never_read)
    with_options = LoadOptions(budget=memory) if n_ctx is None else LoadOptions(budget=memory, n_ctx=n_ctx)
    plan = plan_load(file, with_options)
    try:
        weights = sum(plan.ledger.of(purpose) for purpose in ("weights", "mapped weights", "experts"))
        others = plan.ledger.peak - weights
    finally:
        plan.close()
    if others >= memory:
        raise BudgetExceeded(f"{file.path}: {human_bytes(others)} are needed beside the weights: {memory} may be taken")
    # Packed matrices have whole groups of 16 rows; what lies in the file alone, such as embeddings, takes no memory.
    in_file = sum(info.type.n_bytes(math.prod(info.shape)) for info in file.tensors.values())
    return math.floor((memory - others) * min(1.0, in_file / max(1, weights)))


def _never_read(first: int, last: int) -> NoReturn:
    raise AssertionError("a plan reads no weights")
