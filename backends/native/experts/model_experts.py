"""The experts of a model file for the decoder: where their matrices lie, how they are packed, and packing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.weights import MATRIX_TYPES, Packing
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.types import ExpertSizes
from edgeinfer.models import ExpertRows, Experts, ExpertsRef, ModelSpec, PlainExperts
from edgeinfer.models.gguf import GGMLType, ModelFile

ExpertRole: TypeAlias = Literal["gate", "up", "down"]
EXPERT_ROLES: tuple[ExpertRole, ...] = get_args(ExpertRole)  # in the order of ExpertPart in layout.h
EXPERT_TYPES = MATRIX_TYPES - {GGMLType.I2_S}  # which has one scale for all rows of a tensor


class ExpertSlice(NamedTuple):
    """Where a matrix of an expert lies."""

    part: int  # which file of the model
    # offset, n_bytes: in that file
    offset: int
    n_bytes: int
    name: str  # of the tensor it is a part of


@dataclass(frozen=True)
class ExpertPart:
    """The matrices of one role of all experts of a layer."""

    role: ExpertRole
    name: str
    type: GGMLType
    packed_as: int  # see Packing.format_of
    shape: tuple[int, int]  # (n_out, n_in) of one expert's
    # first_byte, n_bytes: of expert 0 in the tensor; those of the next one come expert_bytes later
    first_byte: int
    n_bytes: int
    expert_bytes: int

    def data(self, model: ModelFile, expert: int) -> NDArray[np.uint8]:
        """An expert's matrix, as GGUF stores it."""
        first = self.first_byte + expert * self.expert_bytes
        return model.data(self.name, first, first + self.n_bytes)

    def release(self, model: ModelFile, expert: int) -> None:
        """See ModelFile.release."""
        first = self.first_byte + expert * self.expert_bytes
        model.release(self.name, first, first + self.n_bytes)

    def slice_of(self, model: ModelFile, expert: int) -> ExpertSlice:
        """Where an expert's matrix lies. Raises UnsupportedModel for a tensor that is made as it is read."""
        if model.makes(self.name):
            raise UnsupportedModel(f"{model.path}: tensor {self.name} does not lie in the file as it is used")
        info = model.tensors[self.name]
        offset = info.offset + self.first_byte + expert * self.expert_bytes
        return ExpertSlice(info.part, offset, self.n_bytes, self.name)


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer."""

    index: int
    n_experts: int
    n_used: int
    parts: tuple[ExpertPart, ExpertPart, ExpertPart]  # gate, up, down


@dataclass(frozen=True)
class ModelExperts:
    """The experts of a model."""

    layers: tuple[ExpertLayer, ...]  # those that have any, in order
    layout: _core.ExpertLayout  # of their records

    @property
    def n_bytes(self) -> int:
        """Of the records of all experts, 0 for a model without any."""
        return self.layout.n_bytes

    def slice_of(self, model: ModelFile, layer: int, role: ExpertRole, expert: int) -> ExpertSlice:
        """Where a matrix of an expert lies in the model's files; layer: counted over all layers."""
        of_layer = next(each for each in self.layers if each.index == layer)
        return of_layer.parts[EXPERT_ROLES.index(role)].slice_of(model, expert)

    def inputs(self) -> set[tuple[int, int]]:
        """Packed format and n_in of all matrices."""
        return {(part.packed_as, part.shape[1]) for layer in self.layers for part in layer.parts}

    @property
    def n_used(self) -> int:
        """Experts that a token needs of a layer at most."""
        return max((each.n_used for each in self.layers), default=0)

    @property
    def least_cache(self) -> int:
        """Bytes of the smallest cache with which a pass can run: n_used experts, two at least, of each size."""
        return _core.DiskExperts.least_bytes(self.layout, self.n_used)

    def sizes(self) -> ExpertSizes:
        """What they take in memory; all zeros for a model without experts."""
        a_token = sum(each.n_used * self.layout.record_bytes(each.index) for each in self.layers)
        n_experts = max((each.n_experts for each in self.layers), default=0)
        return ExpertSizes(self.n_bytes, self.least_cache, a_token, len(self.layers), n_experts, self.n_used)


def experts_of(model: ModelFile, spec: ModelSpec, packing: Packing) -> ModelExperts:
    """The experts of a model. Raises UnsupportedModel for a tensor type that the engine lacks, and too many experts."""
    layout, layers = _core.ExpertLayout(), []
    for index, layer in enumerate(spec.layers):
        block = layer.ffn
        if not isinstance(block, Experts):
            layout.add_layer_without_experts()
            continue
        _check_room(model, index, block)
        gate, up, down = (_part(model, block, role, packing) for role in EXPERT_ROLES)
        layout.add_layer(block.n_experts, *((part.packed_as, *part.shape) for part in (gate, up, down)))
        layers.append(ExpertLayer(index, block.n_experts, block.n_used, (gate, up, down)))
    return ModelExperts(tuple(layers), layout)


def _check_room(model: ModelFile, index: int, block: Experts) -> None:
    """Raises UnsupportedModel where a token needs more experts, or chooses from more groups, than there is room for."""
    if block.n_used > _core.MOST_EXPERTS_USED or block.n_groups > _core.MOST_EXPERT_GROUPS:
        raise UnsupportedModel(
            f"{model.path}: a token uses {block.n_used} experts of layer {index}, in {block.n_groups} groups; the "
            f"native engine takes {_core.MOST_EXPERTS_USED} experts and {_core.MOST_EXPERT_GROUPS} groups at most"
        )


def _part(model: ModelFile, block: Experts, role: ExpertRole, packing: Packing) -> ExpertPart:
    is_none = isinstance(block, PlainExperts) and role == "up"  # which is in the place of the gate
    ref: ExpertsRef = getattr(block, role)
    name = ref.name if isinstance(ref, ExpertRows) else ref
    info = model.tensors[name]
    if info.type not in EXPERT_TYPES:
        raise UnsupportedModel(
            f"{model.path}: tensor {name} {info.shape} has type {info.type.name}, which the native engine lacks for "
            f"experts; it has {', '.join(sorted(each.name for each in EXPERT_TYPES))}"
        )
    shapes = block.shapes()
    _, n_out, n_in = shapes.get(role, shapes["up"])
    expert_bytes = info.n_bytes // block.n_experts
    row_bytes = expert_bytes // info.shape[1]
    first = ref.first * row_bytes if isinstance(ref, ExpertRows) else 0
    if is_none:
        n_out = 0  # and so no bytes
    return ExpertPart(
        role, name, info.type, packing.format_of(info, role), (n_out, n_in), first, n_out * row_bytes, expert_bytes
    )


# ---- packing ---------------------------------------------------------------------------------------------------------


def resident_experts(
    experts: ModelExperts, model: ModelFile, threads: _core.Threads, progress: Progress | None = None
) -> _core.ExpertRecords:
    """The records of all experts in memory, packed now."""
    records = _core.ExpertRecords(experts.layout)
    pack_records(experts, model, threads, records.record, progress)
    return records


def pack_records(
    experts: ModelExperts,
    model: ModelFile,
    threads: _core.Threads,
    record_of: Callable[[int, int], NDArray[np.uint8]],
    progress: Progress | None = None,
) -> None:
    """Pack every expert into record_of(layer, expert), one after the other, in the order of the records.

    The memory that reading an expert took is given back, so that little of the file is in memory.
    """
    total = sum(layer.n_experts for layer in experts.layers)
    done = 0
    for layer in experts.layers:
        for expert in range(layer.n_experts):
            record = record_of(layer.index, expert)
            for number, part in enumerate(layer.parts):
                if not part.n_bytes:
                    continue
                data = part.data(model, expert)
                _core.pack_expert(experts.layout, layer.index, number, int(part.type), data, record, threads)
                part.release(model, expert)
            done += 1
            if progress is not None:
                progress(done / total)


def write_records(
    experts: ModelExperts,
    model: ModelFile,
    threads: _core.Threads,
    write: Callable[[NDArray[np.uint8]], None],
    progress: Progress | None = None,
) -> None:
    """Give the records of all experts to `write`, one after the other, packed now; only one is in memory at a time."""
    largest = max((experts.layout.record_bytes(layer.index) for layer in experts.layers), default=0)
    buffer, before = np.zeros(largest, np.uint8), 0

    def record_of(layer: int, expert: int) -> NDArray[np.uint8]:
        nonlocal before
        if before:
            write(buffer[:before])
        before = experts.layout.record_bytes(layer)
        buffer[:] = 0
        return buffer[:before]

    pack_records(experts, model, threads, record_of, progress)
    if before:
        write(buffer[:before])
