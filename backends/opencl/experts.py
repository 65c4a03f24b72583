"""Experts of a model in a device's memory, which compute there while the CPU computes others.

What they give is near what the CPU gives, not bit-equal: sums run in the device's order, and scales of some formats are
rounded (see matrices.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.opencl.decoder import ACTIVATIONS
from edgeinfer.backends.opencl.device import Kernel, OpenCLDevice
from edgeinfer.backends.opencl.expert_parts import (
    ExpertParts,
    experts_of,
    first_rows,
    has_gates,
    release,
    rows_of,
    work_bytes,
)
from edgeinfer.backends.opencl.library import DeviceInfo
from edgeinfer.backends.opencl.matrices import RUN, Activations
from edgeinfer.backends.opencl.weights import Linear
from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.models import Experts, ModelSpec
from edgeinfer.models.gguf import ModelFile

_GROUP = 16  # work-items of a group in kernels that go through rows


@dataclass(frozen=True)
class ExpertBuffers:
    """Bytes on a device."""

    expert: int  # of the largest one
    work: Mapping[str, int]  # of each buffer that all experts compute in
    n_experts: int  # of the model, all layers together

    def total(self, n_slots: int) -> int:
        """With so many experts on the device."""
        return n_slots * self.expert + sum(self.work.values())


def expert_buffers(model: ModelFile, spec: ModelSpec, n_batch: int, info: DeviceInfo) -> ExpertBuffers:
    """What the experts of a model take on a device; what its driver takes beside that is not known.

    Raises UnsupportedModel for a type of tensors that does not run there, BudgetExceeded where the device has no
    buffers that large.
    """
    blocks = experts_of(spec)
    largest = max(ExpertParts.read(model, block, 0).n_bytes for block in blocks.values())
    work = work_bytes(blocks, n_batch)
    if max(*work.values(), largest) > info.max_buffer_bytes:
        raise BudgetExceeded(
            f"{model.path}: experts need a buffer of {max(*work.values(), largest)} bytes for passes of {n_batch} "
            f"tokens, and those of {info.name} have at most {info.max_buffer_bytes}: use smaller batches"
        )
    return ExpertBuffers(largest, work, sum(block.n_experts for block in blocks.values()))


def _kind(block: Experts) -> tuple[int, bool]:
    """Of the kernel between the products of an expert: its activation, and whether there are no gates."""
    return ACTIVATIONS[block.activation], not has_gates(block)


class OpenCLExperts:
    """Some experts of a model, in slots on a device. The file must stay open. Not thread-safe.

    n_slots: experts that are there at once.  n_batch: tokens of a pass at most. What fails raises BackendLost.
    """

    def __init__(self, model: ModelFile, spec: ModelSpec, device: OpenCLDevice, n_slots: int, n_batch: int) -> None:
        self.n_slots = n_slots
        self._model, self._device = model, device
        self._blocks = experts_of(spec)
        n_before = device.n_allocated
        self._buffers = {name: device.buffer(n) for name, n in work_bytes(self._blocks, n_batch).items()}
        self._work_bytes = device.n_allocated - n_before
        self._slots: dict[int, _DeviceExpert] = {}
        self._shape = 0, 0  # of the outputs of what runs now
        self._quantise = device.kernel("quantise", ["common.cl", "decoder.cl"], {"GROUP": _GROUP})
        self._activate: dict[tuple[int, bool], Kernel] = {}
        for key in {_kind(block) for block in self._blocks.values()}:
            macros = {"GROUP": _GROUP, "ACTIVATION": key[0], "PLAIN": int(key[1])}
            self._activate[key] = device.kernel("gate", ["common.cl", "gate.cl"], macros)

    @property
    def n_bytes(self) -> int:
        """Of all buffers now."""
        return self._work_bytes + sum(slot.n_bytes for slot in self._slots.values())

    def upload(self, slot: int, layer: int, expert: int) -> None:
        """Put an expert into a slot, in place of another one. Raises ModelFileChanged."""
        block = self._blocks[layer]
        parts = ExpertParts.read(self._model, block, expert)
        self._slots[slot] = _DeviceExpert(self._device, parts, self._slots.get(slot))
        self._model.check()
        release(self._model, block, expert)

    def start(self, layer: int, places: Sequence[tuple[int, int]], rows: NDArray[np.float32]) -> None:
        """Begin to compute experts of a layer; `finish` gives the outputs.

        places: (slot, n_rows) of each.  rows: their inputs, one below the other, (n, n_in); kept until the end.
        """
        block, n = self._blocks[layer], rows_of(places)
        self._device.write(self._buffers["x"], rows)
        self._shape = n, block.n_in
        experts = [(self._slots[slot], n_rows) for slot, n_rows in places]
        gate_ups = [(expert.gate_up, n_rows) for expert, n_rows in experts]
        self._multiply(gate_ups, "x", "gate_up", block.n_in, first_rows(block), n)
        gated = self._buffers["gate_up"], self._buffers["gated"]
        self._device.run(self._activate[_kind(block)], [block.n_ff, n], [_GROUP, 1], *gated, block.n_ff)
        downs = [(expert.down, n_rows) for expert, n_rows in experts]
        self._multiply(downs, "gated", "out", block.n_ff, block.n_in, n)
        self._device.flush()

    def finish(self) -> NDArray[np.float32]:
        """(n, n_in): f_e of each row of inputs, without weights."""
        return self._device.read(self._buffers["out"], np.empty(self._shape, np.float32))

    def close(self) -> None:
        """Give the memory of the device back, when what runs there is done."""
        self._device.finish()
        self._slots.clear()
        self._buffers.clear()

    def _multiply(self, linears: Sequence[tuple[Linear, int]], x: str, out: str, n_in: int, n_out: int, n: int) -> None:
        """Products of the rows of each expert with one of its matrices, all rows rounded to codes first."""
        codes, scales, sums = (self._buffers[name] for name in ("codes", "scales", "sums"))
        inputs = Activations(self._buffers[x], codes, scales, sums)
        if any(linear.takes_codes for linear, _ in linears):
            self._device.run(self._quantise, [n_in // RUN, n], [_GROUP, 1], inputs.values, codes, scales, sums, n_in)
        first = 0
        for linear, n_rows in linears:
            linear.multiply(inputs, self._buffers[out], n_rows, stride=n_out, first_row=first)
            first += n_rows


class _DeviceExpert:
    """See ExpertParts; on the device. before: one that is no longer needed."""

    def __init__(self, device: OpenCLDevice, parts: ExpertParts, before: _DeviceExpert | None) -> None:
        self.n_bytes = parts.n_bytes
        self.gate_up: Linear = Linear(device, parts.gate_up, None if before is None else before.gate_up)
        self.down: Linear = Linear(device, parts.down, None if before is None else before.down)
