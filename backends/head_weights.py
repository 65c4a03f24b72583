"""The output matrix of draft heads whose files leave it out: some of their target's rows, in fewer bits.

The block of a model's own file that drafts (`nextn.*`) is a head that gets its matrix in the same way.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ModelSpec, TensorRef, read_nextn
from edgeinfer.models.arrays import Array
from edgeinfer.models.draft_head import ORDERED_OUTPUT, HeadSpec, check_target, head_of_nextn, read_head
from edgeinfer.models.gguf import GGMLType, ModelFile, TensorInfo

_THREADS, _STORE_BYTES = 4, 3 << 18  # at most; each has a store of the allocator, which keeps what it once took
_AT_ONCE = 1 << 16  # bytes of the target's that are gathered before they are rewritten, 9 times as many with the gaps
MOST_DRAFTED = 1 << 15  # tokens that a model's own block drafts: each further row takes time, and is rare
_SPECIAL_TYPES = (3, 4)  # of tokenizer.ggml.token_type: control, user defined
_EMBEDDINGS = "token_embd.weight"  # of an assistant, which its output matrix is too
_GAP = 8  # rows that are read although nobody needs them, rather than reading twice


def read_head_beside(head: ModelFile, target: ModelFile, of_target: ModelSpec) -> HeadSpec:
    """Spec of a head that is known to be one for this target, with the scale of the target's embeddings.

    Where the head's file leaves the output matrix out, it has those rows of the target's while both files are open.
    Raises UnsupportedModel.
    """
    spec = read_head(head).beside(of_target)
    check_target(spec, head.path, target, of_target)
    if spec.output_type is not None:
        assert of_target.output is not None  # whole models have one
        _define_output(head, spec, target, of_target.output)
    if spec.clusters is not None:
        _define_ordered(head, spec)
    return spec


def read_nextn_beside(file: ModelFile, of_target: ModelSpec, most: int = MOST_DRAFTED) -> HeadSpec:
    """Spec of a model's own block that drafts, the first one, as a head. Raises UnsupportedModel where there is none.

    file: the model's, opened once more, to which an output matrix is added.  most: tokens that it drafts; of a larger
    vocabulary the first ones, which in a vocabulary of merges are the most frequent ones, and the special ones.
    """
    blocks = read_nextn(file)
    if not blocks:
        raise UnsupportedModel(f"{file.path}: the model has no block that drafts (nextn)")
    ids, block = np.arange(of_target.n_vocab, dtype=np.int32), blocks[0]
    if len(ids) > most and of_target.n_embd % GGMLType.Q4_0.block_elements == 0:
        ids = np.union1d(ids[:most], _special_tokens(file)).astype(np.int32)
    spec = head_of_nextn(file, of_target, block, ids)
    if spec.output_type is not None:
        _define_output(file, spec, file, block.output)
    return spec


def _special_tokens(file: ModelFile) -> NDArray[np.int32]:
    """Control tokens and those that users defined, which come last in a vocabulary."""
    types = file.metadata.get("tokenizer.ggml.token_type")
    found = np.array(types if isinstance(types, (Array, list)) else [], dtype=np.int32)
    return np.flatnonzero(np.isin(found, _SPECIAL_TYPES)).astype(np.int32)


def _define_output(head: ModelFile, spec: HeadSpec, target: ModelFile, matrix: TensorRef) -> None:
    """Give the head's file the output matrix that it lacks, made of rows of the target's."""
    name, type = spec.decoder.output, spec.output_type
    assert isinstance(matrix, str) and isinstance(name, str) and type is not None
    if target.tensors[matrix].type == GGMLType.I2_S:
        raise UnsupportedModel(f"{target.path}: its output matrix is I2_S, of which {head.path} cannot take rows")
    make = partial(_rows, target, matrix, spec.draft_vocab, type)
    head.define(name, type, (len(spec.draft_vocab), spec.decoder.n_embd), make)


def _define_ordered(head: ModelFile, spec: HeadSpec) -> None:
    """Give an assistant's file its output matrix cluster by cluster."""
    info = head.tensors[_EMBEDDINGS]
    if info.type == GGMLType.I2_S:
        raise UnsupportedModel(f"{head.path}: its output matrix is I2_S, whose rows cannot be put into another order")
    head.define(ORDERED_OUTPUT, info.type, info.shape, partial(_ordered_rows, head, info, spec.draft_vocab))


def _ordered_rows(
    file: ModelFile, info: TensorInfo, ids: NDArray[np.int32], first: int, last: int
) -> NDArray[np.uint8]:
    """Rows ids (n,) of a matrix; of these, bytes first..last-1, which are whole rows."""
    row_bytes = info.n_bytes // info.shape[0]
    requested = ids[first // row_bytes : last // row_bytes]
    if file.makes(info.name):  # of no file
        return file.data(info.name).reshape(-1, row_bytes)[requested].reshape(-1)
    order = np.argsort(requested)  # as they are in the file, where near ones are read together
    found = np.empty((len(requested), row_bytes), dtype=np.uint8)
    found[order] = _read_rows(file, info, requested[order])
    return found.reshape(-1)


def _rows(
    target: ModelFile, name: str, ids: NDArray[np.int32], type: GGMLType, first: int, last: int
) -> NDArray[np.uint8]:
    """Rows ids (n,) of a matrix of the target as that type; of these, bytes first..last-1, which are whole rows."""
    info = target.tensors[name]
    n_in = info.shape[1]
    row_bytes = n_in // type.block_elements * type.block_bytes
    requested = ids[first // row_bytes : last // row_bytes]
    found = np.empty((len(requested), row_bytes), dtype=np.uint8)
    n_together = max(1, _AT_ONCE * info.shape[0] // info.n_bytes)

    def rewrite(at: int) -> None:
        part = slice(at, at + n_together)
        rows = _read_rows(target, info, requested[part])
        _core.rewrite_rows(int(info.type), rows.reshape(-1), n_in, int(type), found[part].reshape(-1))

    with ThreadPoolExecutor(_n_threads()) as pool:
        list(pool.map(rewrite, range(0, len(requested), n_together)))
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
