"""What an expert on a device is made of: its tensors in the file, and the sizes of all buffers, before any is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.opencl.matrices import FORMATS, RUN, Part, joined
from edgeinfer.backends.opencl.parts import LinearParts
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ExpertRows, Experts, ExpertsRef, ModelSpec, PlainExperts, TensorRef, TensorRows
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile

_MATRICES = ("gate", "up", "down")


def has_gates(block: Experts) -> bool:
    """Whether experts are gated networks; the others have no gate and no bias of one."""
    return not isinstance(block, PlainExperts)


def first_rows(block: Experts) -> int:
    """Numbers of the first product of an expert: gate and up, or up alone."""
    return (2 if has_gates(block) else 1) * block.n_ff


def experts_of(spec: ModelSpec) -> dict[int, Experts]:
    """The blocks of experts, by layer."""
    return {index: layer.ffn for index, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)}


@dataclass(frozen=True)
class ExpertParts:
    """The matrices of one expert, with their biases; scales of experts are factors of theirs.

    gate_up: up alone where there are no gates.
    """

    gate_up: LinearParts
    down: LinearParts

    @classmethod
    def read(cls, model: ModelFile, block: Experts, expert: int) -> ExpertParts:
        """Find them, without converting any. Raises UnsupportedModel."""
        *first, down = (_part(model, block, role, expert) for role in _roles(block))
        *biases, down_bias = (_vector(model, getattr(block, f"{role}_bias"), expert) for role in _roles(block))
        bias = None
        if any(each is not None for each in biases):
            none = np.zeros(block.n_ff, np.float32)
            bias = np.concatenate([none if each is None else each for each in biases])
        return cls(LinearParts(joined(first), bias), LinearParts([[down]], down_bias))

    @property
    def n_bytes(self) -> int:
        """Of its buffers."""
        linears = self.gate_up, self.down
        matrices = sum(sum(sizes) for linear in linears for sizes in linear.matrix_bytes)
        return matrices + sum(linear.bias.nbytes for linear in linears if linear.bias is not None)


def _roles(block: Experts) -> Sequence[str]:
    return _MATRICES if has_gates(block) else _MATRICES[1:]


def release(model: ModelFile, block: Experts, expert: int) -> None:
    """Let the system take back the memory that reading an expert took."""
    for role in _roles(block):
        name, first, last = _place(model, block, role, expert)
        model.release(name, first, last)


def work_bytes(blocks: Mapping[int, Experts], n_batch: int) -> dict[str, int]:
    """Bytes of each buffer that all experts share: n_batch * n_used rows of experts."""
    n_rows = n_batch * max(block.n_used for block in blocks.values())
    n_in, n_ff = (max(getattr(block, size) for block in blocks.values()) for size in ("n_in", "n_ff"))
    widest = max(n_in, n_ff)
    numbers = {"x": n_in, "gate_up": max(map(first_rows, blocks.values())), "gated": n_ff, "out": n_in}
    of_codes = {"scales": widest // RUN + 1, "sums": widest // RUN + 1}
    return {name: 4 * n_rows * n for name, n in (numbers | of_codes).items()} | {"codes": n_rows * widest}


def _part(model: ModelFile, block: Experts, role: str, expert: int) -> Part:
    name, first, last = _place(model, block, role, expert)
    info = model.tensors[name]
    _, n_out, n_in = block.shapes()[role]
    if info.type not in FORMATS or (FORMATS[info.type].bits and n_in % RUN):
        known = ", ".join(sorted(type.name for type in FORMATS))
        raise UnsupportedModel(
            f"{model.path}: tensor {name} {info.shape} has type {info.type.name}, which OpenCL devices lack for "
            f"experts in that shape; they have {known}: load without expert_device (--expert-device)"
        )
    scale = getattr(block, f"{role}_scale")
    factor = 1.0 if scale is None else float(_whole(model, scale)[expert])
    return Part(name, info.type, n_out, n_in, model.data(name, first, last), factor)


def _place(model: ModelFile, block: Experts, role: str, expert: int) -> tuple[str, int, int]:
    """Where an expert's matrix lies: the tensor, and its first and last byte there."""
    ref: ExpertsRef = getattr(block, role)
    name = ref.name if isinstance(ref, ExpertRows) else ref
    info = model.tensors[name]
    expert_bytes = info.n_bytes // block.n_experts
    row_bytes = expert_bytes // info.shape[1]
    n_before = ref.first if isinstance(ref, ExpertRows) else 0
    first = expert * expert_bytes + n_before * row_bytes
    return name, first, first + block.shapes()[role][1] * row_bytes


def _vector(model: ModelFile, ref: ExpertsRef | None, expert: int) -> NDArray[np.float32] | None:
    """An expert's bias."""
    if ref is None:
        return None
    row: NDArray[np.float32] = _whole(model, ref.name if isinstance(ref, ExpertRows) else ref)[expert]
    return row[ref.first : ref.last] if isinstance(ref, ExpertRows) else row


def _whole(model: ModelFile, ref: TensorRef) -> NDArray[np.float32]:
    name = ref.name if isinstance(ref, TensorRows) else ref
    info = model.tensors[name]
    values = dequantize(info.type, model.data(name), info.shape)
    return values[ref.first : ref.last] if isinstance(ref, TensorRows) else values


def rows_of(places: Sequence[tuple[int, int]]) -> int:
    """All rows of (slot, n_rows)."""
    return sum(n for _, n in places)
