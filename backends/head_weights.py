"""The output matrix of draft heads whose files leave it out: some of their target's rows, in fewer bits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import HeadSpec, check_target, read_head
from edgeinfer.models.gguf import GGMLType, ModelFile, TensorInfo

_THREADS, _STORE_BYTES = 4, 3 << 18  # at most; each has a store of the allocator, which keeps what it once took
_AT_ONCE = 1 << 16  # bytes of the target's that are gathered before they are rewritten, 9 times as many with the gaps
_GAP = 8  # rows that are read although nobody wants them, rather than reading twice


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
    wanted = ids[first // row_bytes : last // row_bytes]
    found = np.empty((len(wanted), row_bytes), dtype=np.uint8)
    n_together = max(1, _AT_ONCE * info.shape[0] // info.n_bytes)

    def rewrite(at: int) -> None:
        part = slice(at, at + n_together)
        rows = _read_rows(target, info, wanted[part])
        _core.rewrite_rows(int(info.type), rows.reshape(-1), n_in, int(type), found[part].reshape(-1))

    with ThreadPoolExecutor(_n_threads()) as pool:
        list(pool.map(rewrite, range(0, len(wanted), n_together)))
    return found.reshape(-1)


def _n_threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)


def kept_bytes(head: HeadSpec) -> int:
    """What the allocator keeps of the threads that make an output matrix of the target's rows."""
    return 0 if head.output_type is None else _n_threads() * _STORE_BYTES


def _read_rows(file: ModelFile, info: TensorInfo, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Rows ids (n,) of a matrix as the file has them, (n, row_bytes); near ones are read together."""
    row_bytes = info.n_bytes // info.shape[0]
    runs = []
    for run in np.split(ids, np.flatnonzero(np.diff(ids) > _GAP) + 1):
        first = info.offset + int(run[0]) * row_bytes
        data = file.read(info.part, first, info.offset + (int(run[-1]) + 1) * row_bytes)
        runs.append(np.frombuffer(data, np.uint8).reshape(-1, row_bytes)[run - run[0]])
    return np.concatenate(runs)
