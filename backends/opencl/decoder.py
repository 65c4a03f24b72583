"""The forward pass on a device: the kernels in the order in which blocks say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.device_session import Batch, DeviceDecoder
from edgeinfer.backends.opencl.cache import Cache
from edgeinfer.backends.opencl.device import Buffer, Kernel, OpenCLDevice
from edgeinfer.backends.opencl.matrices import RUN, Activations
from edgeinfer.backends.opencl.parts import (
    HEAD_ROWS,
    TOP,
    AttentionShape,
    ModelParts,
    activation_bytes,
    head_activation_bytes,
    ropes_of,
    scaling_of,
    scalings_of,
)
from edgeinfer.backends.opencl.weights import DeviceAttention, DeviceDense, Linear, Weights
from edgeinfer.common.errors import Interrupted
from edgeinfer.common.overriding import override
from edgeinfer.common.types import HiddenStates, Logits, MemoryUse
from edgeinfer.models import Activation, Attention, ModelSpec

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "clamped_swiglu": 3}  # see gate.cl
_FINISH_ABOVE = 8  # tokens: larger passes wait after each layer, so that they can be stopped
_OF_ATTENTION = ("turn_and_store", "attend", "keep_path")
_OF_FRONT = ("silu", "blend", "take_parents")


class Decoder(DeviceDecoder):
    """Weights on a device and the buffers of a pass; see DeviceDecoder. Whatever fails there raises BackendLost.

    group: work-items of those groups that sum together.
    """

    def __init__(
        self, device: OpenCLDevice, parts: ModelParts, spec: ModelSpec, n_batch: int, progress: Progress | None = None
    ) -> None:
        self.device, self.spec = device, spec
        self.group = 16 if device.is_cpu else _power_of_two(min(64, device.info.max_work_group))
        self._stopped = False
        self._ropes, self._scalings = ropes_of(spec), list(scalings_of(spec))
        self._make_kernels(parts)
        sizes = activation_bytes(spec, n_batch) if parts.fusion is None else head_activation_bytes(spec, n_batch)
        n_before = device.n_allocated
        self.buffers = {name: device.buffer(n_bytes) for name, n_bytes in sizes.items()}
        self._activation_bytes = device.n_allocated - n_before
        self.weights = Weights(device, parts, progress)

    @override
    def new_cache(self, n_ctx: int) -> Cache:
        return Cache(self.device, self.spec, n_ctx)

    @override
    def cache_bytes(self, cache: Cache) -> int:
        return cache.n_bytes

    @override
    def memory(self) -> MemoryUse:
        """Bytes of the buffers of weights and of a pass."""
        return MemoryUse(self.weights.n_bytes, 0, self._activation_bytes)

    @override
    def begin(self) -> None:
        self._stopped = False

    @override
    def interrupt(self) -> None:
        """See DeviceDecoder.interrupt. It is looked for before each batch and each layer."""
        self._stopped = True

    @override
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        rows: NDArray[np.int32],
        out: Logits,
        taps: Sequence[int],
        tapped: HiddenStates,
    ) -> None:
        self.run(cache, batch, taps, tapped)
        for first in range(0, len(rows), HEAD_ROWS):
            here = rows[first : first + HEAD_ROWS]
            self.make_logits(here)
            self.device.read(self.buffers["logits"], out[first : first + len(here)])
        if not len(rows):
            self.device.finish()

    @override
    def keep_path(self, cache: Cache, rows: NDArray[np.int32], n_past: int) -> None:
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if not moved.size or not cache.of_shape:
            return
        n_in_place = int(moved[0])
        rows, n_past = rows[n_in_place:] - np.int32(n_in_place), n_past + n_in_place
        self.device.write(self.buffers["rows"], rows)
        for shape, held in cache.of_shape.items():
            items, group = [shape.head_dim, held.n_layers * shape.n_kv_heads], [min(16, shape.head_dim), 1]
            arguments = held.keys, held.values, self.buffers["rows"], len(rows), cache.n_ctx, n_past
            self.device.run(self._attention_kernels[shape]["keep_path"], items, group, *arguments)

    # ---- a pass, in parts that drafting.py uses too ------------------------------------------------------------------

    def run(self, cache: Cache, batch: Batch, taps: Sequence[int] = (), tapped: HiddenStates | None = None) -> None:
        """Run a batch through the layers. Without features of its own a head's are those that were handed on."""
        self._poll()
        self.device.write(self.buffers["ids"], batch.ids)
        if batch.sees is not None:
            self.device.write(self.buffers["sees"], batch.sees)
        if batch.features is not None:
            self.device.write(self.buffers["features"], batch.features)
        self.write_places(cache, batch)
        self.embed(self.buffers["ids"], len(batch))
        self.run_layers(cache, batch, taps, tapped)

    def write_places(self, cache: Cache, batch: Batch) -> None:
        """What the kernels need to know of the positions of a batch."""
        device, buffers = self.device, self.buffers
        device.write(buffers["positions"], batch.positions)
        own = batch.positions[batch.first :]
        for i, scales in enumerate(cache.query_scales):
            device.write(buffers[f"query_scales{i}"], scales.at(own))
        for i, rope in enumerate(cache.ropes):
            angles = own[:, None] * np.array(rope.inverse_frequencies)  # float64
            turns = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * rope.magnitude
            device.write(buffers[f"turns{i}"], turns.astype(np.float32))

    def embed(self, ids: Buffer, n: int, first: int = 0) -> None:
        """What the layers begin with: embeddings of ids[first : first + n], of a head joined with its features."""
        self.weights.token_embd.matrices[0].gather(ids, self.buffers["x"], n, self.spec.embedding_scale, first)
        self._fuse(n)

    def run_layers(
        self, cache: Cache, batch: Batch, taps: Sequence[int] = (), tapped: HiddenStates | None = None
    ) -> None:
        """All layers, and copies of what comes out of those that are tapped."""
        n_before = dict.fromkeys(cache.of_shape, 0)  # layers of each shape so far
        for index, (mixer, ffn) in enumerate(self.weights.layers):
            self._poll()
            shape = AttentionShape.of(mixer.block)
            self._attention(cache, shape, n_before[shape], mixer, batch)
            n_before[shape] += 1
            self._dense(ffn, len(batch))
            if len(batch) > _FINISH_ABOVE:
                self.device.finish()
            self._tap(index, self.buffers["x"], taps, tapped)
        n_layers = len(self.weights.layers)
        if n_layers in taps:  # what the output matrix reads
            x = self._norm(self.weights.output_norm, self.buffers["x"], len(batch), self.spec.n_embd)
            self._tap(n_layers, x, taps, tapped)

    def make_logits(self, rows: NDArray[np.int32]) -> None:
        """Logits of at most HEAD_ROWS rows of the last batch, into their buffer."""
        spec, buffers, n = self.spec, self.buffers, len(rows)
        self.device.write(buffers["rows"], rows)
        items, output = [spec.n_embd, n], self.weights.output
        self.launch("take_rows", items, [16, 1], buffers["x"], buffers["rows"], buffers["normed"], spec.n_embd)
        x = self._norm(self.weights.output_norm, buffers["normed"], n, spec.n_embd)
        output.multiply(self._inputs(x, n, output), buffers["logits"], n, spec.logit_scale)
        if spec.logit_soft_cap is not None:
            n_logits = n * spec.n_logits
            self.launch("cap_logits", [n_logits], [16], buffers["logits"], spec.logit_soft_cap, n_logits)

    def launch(self, name: str, items: Sequence[int], group: Sequence[int], *arguments: object) -> None:
        """Enqueue one of the kernels that no block has for itself."""
        self.device.run(self._kernels[name], items, group, *arguments)

    def _poll(self) -> None:
        """Raises Interrupted if `interrupt` was called since `begin`."""
        if self._stopped:
            raise Interrupted("the forward pass was interrupted; the session is as it was before")

    def _tap(self, index: int, x: Buffer, taps: Sequence[int], tapped: HiddenStates | None) -> None:
        """Copy x out where this layer is wanted."""
        if tapped is not None:
            for place in (place for place, tap in enumerate(taps) if tap == index):
                self.device.read(x, tapped[place])

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _fuse(self, n: int) -> None:
        """Blend the embeddings of a head's tokens with the features that come with them."""
        fusion, buffers, size = self.weights.fusion, self.buffers, self.spec.n_embd
        if fusion is None:
            return
        pairs, items, group = buffers["pairs"], [size, n], [16, 1]
        fusion.feature.multiply(self._inputs(buffers["features"], n, fusion.feature), pairs, n, stride=2 * size)
        normed = self._norm(fusion.token_norm, buffers["x"], n, size)
        fusion.token.multiply(self._inputs(normed, n, fusion.token), pairs, n, first=size, stride=2 * size)
        self.launch("silu", items, group, pairs, size)
        fusion.mix.multiply(self._inputs(pairs, n, fusion.mix), buffers["added"], n)
        self.launch("blend", items, group, pairs, buffers["added"], buffers["x"], size)

    def _attention(self, cache: Cache, shape: AttentionShape, index: int, layer: DeviceAttention, batch: Batch) -> None:
        """Add what attention gives. index: of the layer among those of its shape, in the cache."""
        block, buffers, n = layer.block, self.buffers, len(batch)
        kernels, held = self._attention_kernels[shape], cache.of_shape[shape]
        x = self._norm(layer.norms.get("norm"), buffers["x"], n, block.n_embd)
        layer.qkv.multiply(self._inputs(x, n, layer.qkv), buffers["qkv"], n)
        self._norm_heads(layer, n)
        rope_index = None if block.rope is None else self._ropes.index(block.rope)
        turns = buffers["positions"] if rope_index is None else buffers[f"turns{rope_index}"]
        n_dims, halves = (0, 0) if block.rope is None else (block.rope.n_dims, int(block.rope.kind == "halves"))
        scales = buffers[f"query_scales{self._scalings.index(scaling_of(block))}"]
        n_heads = block.n_heads + 2 * block.n_kv_heads
        self.device.run(
            *(kernels["turn_and_store"], [block.head_dim, n_heads, n], [min(16, block.head_dim), 1, 1]),
            *(buffers["qkv"], held.keys, held.values, turns, scales),
            *(index, cache.n_ctx, batch.n_past + batch.first, n_dims, halves),
        )
        self.device.run(
            *(kernels["attend"], [self.group, block.n_heads, n], [self.group, 1, 1]),
            *(buffers["qkv"], held.keys, held.values, buffers["positions"], buffers["sees"], buffers["heads"]),
            *(index, cache.n_ctx, batch.n_past, n, batch.n_nodes, batch.first),
            *(block.window or 0, block.soft_cap or 0.0),
        )
        heads = self._norm(layer.norms.get("sub_norm"), buffers["heads"], n, block.n_q, buffers["heads"])
        self._add(layer.output, self._inputs(heads, n, layer.output), layer.norms.get("post_norm"), n)

    def _norm_heads(self, layer: DeviceAttention, n: int) -> None:
        """Norms on queries and keys, where the block has them."""
        block, first = layer.block, 0
        if block.qk_norm is None:
            return
        stride = block.n_q + 2 * block.n_kv
        for role, n_heads in (("q_norm", block.n_heads), ("k_norm", block.n_kv_heads)):
            runs, size = (n_heads, block.head_dim) if block.qk_norm == "per_head" else (1, n_heads * block.head_dim)
            place = self.buffers["qkv"], first, stride
            self.launch(
                *("rms_norm", [self.group, runs, n], [self.group, 1, 1], *place, *place),
                *(layer.norms[role], size, self.spec.norm_epsilon),
            )
            first += n_heads * block.head_dim

    def _dense(self, layer: DeviceDense, n: int) -> None:
        """Add what a feed-forward network gives."""
        block, buffers = layer.block, self.buffers
        x = self._norm(layer.norms.get("norm"), buffers["x"], n, block.n_embd)
        layer.gate_up.multiply(self._inputs(x, n, layer.gate_up), buffers["gate_up"], n)
        arguments = buffers["gate_up"], buffers["gated"], block.n_ff
        self.device.run(self._gate_kernels[block.activation], [block.n_ff, n], [16, 1], *arguments)
        gated = self._norm(layer.norms.get("sub_norm"), buffers["gated"], n, block.n_ff, buffers["gated"])
        self._add(layer.down, self._inputs(gated, n, layer.down), layer.norms.get("post_norm"), n)

    def _add(self, linear: Linear, x: Activations, post_norm: Buffer | None, n: int) -> None:
        """Add what a product gives, after its norm if it has one, to the residual stream."""
        spec, buffers = self.spec, self.buffers
        if post_norm is None and linear.has_no_bias:
            linear.multiply(x, buffers["x"], n, spec.residual_scale, keep=1.0)
            return
        linear.multiply(x, buffers["added"], n)
        added = self._norm(post_norm, buffers["added"], n, spec.n_embd, buffers["added"])
        self.launch("add", [n * spec.n_embd], [16], buffers["x"], added, spec.residual_scale, n * spec.n_embd)

    def _norm(self, weight: Buffer | None, x: Buffer, n: int, size: int, out: Buffer | None = None) -> Buffer:
        """Where the RMS norm of x (n, size) lies: in out, or in `normed`; x itself without a weight."""
        if weight is None:
            return x
        out = self.buffers["normed"] if out is None else out
        items, group = [self.group, 1, n], [self.group, 1, 1]
        self.launch("rms_norm", items, group, x, 0, size, out, 0, size, weight, size, self.spec.norm_epsilon)
        return out

    def _inputs(self, x: Buffer, n: int, linear: Linear) -> Activations:
        """x (n, n_in) as inputs of a product, rounded to codes where that wants them."""
        inputs = Activations(x, *(self.buffers[name] for name in ("codes", "scales", "sums")))
        if linear.takes_codes:
            items = [linear.n_in // RUN, n]
            self.launch("quantise", items, [16, 1], x, inputs.codes, inputs.scales, inputs.sums, linear.n_in)
        return inputs

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def _make_kernels(self, parts: ModelParts) -> None:
        """Those of passes and of trees, of each shape of attention and of each activation."""
        of_pass = "rms_norm quantise add take_rows cap_logits".split()
        of_pass += _OF_FRONT if parts.fusion is not None else ()
        of_tree = ("top_k", "choose_level")
        self._kernels = self._built("decoder.cl", of_pass) | self._built("tree.cl", of_tree, TOP=TOP)
        self._attention_kernels: dict[AttentionShape, dict[str, Kernel]] = {}
        self._gate_kernels: dict[Activation, Kernel] = {}
        for mixer, ffn in parts.layers:
            shape, activation = AttentionShape.of(mixer.block), ffn.block.activation
            if shape not in self._attention_kernels:
                self._attention_kernels[shape] = self._kernels_of(mixer.block)
            if activation not in self._gate_kernels:
                number = ACTIVATIONS[activation]
                self._gate_kernels[activation] = self._built("gate.cl", ["gate"], ACTIVATION=number)["gate"]

    def _kernels_of(self, block: Attention) -> dict[str, Kernel]:
        sizes = {"HEAD_DIM": block.head_dim, "N_HEADS": block.n_heads, "N_KV_HEADS": block.n_kv_heads}
        return self._built("attention.cl", _OF_ATTENTION, **sizes)

    def _built(self, source: str, names: Sequence[str], **macros: int) -> dict[str, Kernel]:
        sources, defines = ["common.cl", source], {"GROUP": self.group, **macros}
        return {name: self.device.kernel(name, sources, defines) for name in names}


def _power_of_two(n: int) -> int:
    """The largest that is at most n."""
    return 1 << (n.bit_length() - 1)
