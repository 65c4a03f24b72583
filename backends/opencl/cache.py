"""The KV cache of one sequence on a device."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.backends.opencl.device import Buffer, OpenCLDevice
from edgeinfer.backends.opencl.parts import AttentionShape, ropes_of, scalings_of, shapes_of
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.models import ModelSpec


@dataclass(frozen=True)
class KeysValues:
    """Half floats of the layers of one shape, (n_layers, n_kv_heads, n_ctx, head_dim) each."""

    keys: Buffer
    values: Buffer
    n_layers: int


class Cache:
    """Keys and values of all layers, and what depends on the size of the context.

    ropes, query_scales: those of ropes_of and of scalings_of, for n_ctx positions.  n_bytes: of the buffers.
    """

    def __init__(self, device: OpenCLDevice, spec: ModelSpec, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.ropes = [rope.of_context(n_ctx) for rope in ropes_of(spec)]
        self.query_scales = [QueryScales.of(block, n_ctx) for block in scalings_of(spec).values()]
        n_before = device.n_allocated
        self.of_shape: dict[AttentionShape, KeysValues] = {}
        for shape, n_layers in shapes_of(spec).items():
            n_bytes = shape.kv_bytes(n_layers, n_ctx)
            self.of_shape[shape] = KeysValues(device.buffer(n_bytes), device.buffer(n_bytes), n_layers)
        self.n_bytes = device.n_allocated - n_before
