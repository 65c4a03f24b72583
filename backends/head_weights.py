"""The output matrix of draft heads whose files leave it out: some of their target's rows, in fewer bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.errors import UnsupportedModel
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import HeadSpec, check_target, read_head
from edgeinfer.models.gguf import GGMLType, ModelFile

_AT_ONCE = 256  # rows that are gathered before they are rewritten


def read_head_beside(head: ModelFile, target: ModelFile, of_target: ModelSpec) -> HeadSpec:
    """Spec of a head that is known to be one for this target, with the scale of the target's embeddings.

    Where the head's file leaves the output matrix out, it has those rows of the target's while both files are open.
    Raises UnsupportedModel.
    """
    spec = read_head(head).beside(of_target)
    check_target(spec, head.path, target, of_target)
    if spec.output_type is not None:
        matrix, name = of_target.output, spec.decoder.output
        assert isinstance(matrix, str) and isinstance(name, str)  # whole models have one, and so do these heads
        if target.tensors[matrix].type == GGMLType.I2_S:
            raise UnsupportedModel(f"{target.path}: its output matrix is I2_S, of which {head.path} cannot take rows")
        make = partial(_rows, target, matrix, spec.draft_vocab, spec.output_type)
        head.define(name, spec.output_type, (len(spec.draft_vocab), of_target.n_embd), make)
    return spec


def _rows(
    target: ModelFile, name: str, ids: NDArray[np.int32], type: GGMLType, first: int, last: int
) -> NDArray[np.uint8]:
    """Rows ids (n,) of a matrix of the target as that type; of these, bytes first..last-1, which are whole rows."""
    info = target.tensors[name]
    n_in = info.shape[1]
    row_bytes = n_in // type.block_elements * type.block_bytes
    rows, wanted = target.data(name).reshape(info.shape[0], -1), ids[first // row_bytes : last // row_bytes]
    found = np.empty((len(wanted), row_bytes), dtype=np.uint8)

    def rewrite(at: int) -> None:
        part = slice(at, at + _AT_ONCE)
        _core.rewrite_rows(int(info.type), rows[wanted[part]].reshape(-1), n_in, int(type), found[part].reshape(-1))

    with ThreadPoolExecutor() as pool:
        list(pool.map(rewrite, range(0, len(wanted), _AT_ONCE)))
    return found.reshape(-1)
