"""The forward pass on a device: what lies there, and the kernels in the order of ModelSpec's recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.opencl.device import Buffer, Kernel, OpenCLDevice
from edgeinfer.backends.opencl.matrices import RUN, Activations, DeviceMatrix
from edgeinfer.backends.opencl.parts import (
    HEAD_ROWS,
    TOP,
    GateParts,
    LinearParts,
    ModelParts,
    activation_bytes,
    kv_bytes,
    ropes_of,
)
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.models import ModelSpec
from edgeinfer.types import Features, HiddenStates, Logits, Nodes, TokenIds

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2}
_FINISH_ABOVE = 8  # tokens: larger passes wait after each layer, so that they can be stopped


class Linear:
    """Matrices side by side on the device, and their bias."""

    def __init__(self, device: OpenCLDevice, parts: LinearParts) -> None:
        self.matrices = [DeviceMatrix(device, run) for run in parts.runs]
        self.n_out = sum(matrix.n_out for matrix in self.matrices)
        self.n_in = self.matrices[0].n_in
        self.takes_codes = any(matrix.format.bits for matrix in self.matrices)
        self.has_no_bias = parts.bias is None
        self._bias = None if parts.bias is None else device.upload(parts.bias)

    def multiply(
        self,
        x: Activations,
        out: Buffer,
        n: int,
        factor: float = 1.0,
        keep: float = 0.0,
        first: int = 0,
        stride: int | None = None,
    ) -> None:
        """out (n, n_out) = keep * out + factor * product + bias; or columns of out (n, stride), from `first` on."""
        stride = self.n_out if stride is None else stride
        for matrix in self.matrices:
            matrix.multiply(x, out, n, first, stride, self._bias, factor, keep)
            first += matrix.n_out


@dataclass(frozen=True)
class Layer:
    """See LayerParts; on the device."""

    qkv: Linear
    attn_output: Linear
    gate_up: Linear
    down: Linear
    norms: dict[str, Buffer]


@dataclass(frozen=True)
class Gate:
    """See GateParts; on the device."""

    feature: Linear
    token_norm: Buffer
    token: Linear
    mix: Linear


@dataclass(frozen=True)
class Batch:
    """Tokens of one pass. ids: (n,) int32.

    n_past: tokens whose slots of the cache those of the chain or of the tree follow.  n_nodes: of the tree that these
    tokens are in, 0 for a chain.  first: node of the tree that the first of them is; the ones before it have been
    passed.  positions: (first + n,) int32, of all nodes up to the last of them.  sees: (n_nodes, n_nodes) uint8, row i:
    what node i sees; None for a chain, and where it is on the device.  features: (n, n_embd), that come with the tokens
    of a draft head.
    """

    ids: TokenIds
    positions: TokenIds
    sees: NDArray[np.uint8] | None
    n_past: int
    n_nodes: int = 0
    first: int = 0
    features: Features | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Decoder:
    """A model on a device, its KV cache and its buffers. Whatever fails there raises BackendLost.

    poll: called now and then during a pass; what it raises ends the pass.
    """

    def __init__(
        self,
        device: OpenCLDevice,
        parts: ModelParts,
        spec: ModelSpec,
        n_ctx: int,
        n_batch: int,
        poll: Callable[[], None],
        progress: Progress | None = None,
    ) -> None:
        self.device, self.spec = device, spec
        self._poll = poll
        self._ropes, self._rope_of = ropes_of(spec, n_ctx)
        self._query_scales = QueryScales.of(spec, n_ctx)
        self._group = 16 if device.is_cpu else _power_of_two(min(64, device.info.max_work_group))
        self._n_ctx = n_ctx
        self._kernels = self._make_kernels()
        sizes = activation_bytes(spec, n_ctx, n_batch)
        n_before = device.n_allocated
        self._buffers = {name: device.buffer(n_bytes) for name, n_bytes in sizes.items()}
        self.activation_bytes = device.n_allocated - n_before
        self._keys, self._values = (device.buffer(kv_bytes(spec, n_ctx)) for _ in range(2))
        self.kv_bytes = device.n_allocated - n_before - self.activation_bytes
        self._load(parts, progress)

    def forward(
        self, batch: Batch, rows: NDArray[np.int32], out: Logits, taps: Sequence[int], tapped: HiddenStates | None
    ) -> None:
        """Run a batch.

        out: (len(rows), n_logits), for the logits of these rows.  tapped: (len(taps), n, n_embd), for outputs of
        layers.
        """
        self._pass(batch, taps, tapped)
        for first in range(0, len(rows), HEAD_ROWS):
            here = rows[first : first + HEAD_ROWS]
            self._head(here)
            self.device.read(self._buffers["logits"], out[first : first + len(here)])
        if not len(rows):
            self.device.finish()

    def draft(self, batch: Batch, n_levels: int, width: int, n_logits: int, assumed: Sequence[int] = ()) -> Nodes:
        """Run a chain, then levels of a tree behind it, all chosen on the device; see OpenCLSession.draft.

        n_logits: the first of a row, that nodes are chosen from.  assumed: see DraftingHead.draft. Nothing is read
        before the end, so that the host waits for the device once.
        """
        buffers, n_nodes = self._buffers, n_levels * width
        self._pass(batch)
        for token in assumed:
            self._hand_on(len(batch) - 1)
            place = np.array([batch.n_past + len(batch)], dtype=np.int32)
            batch = Batch(np.array([token], dtype=np.int32), place, None, int(place[0]))
            self._pass(batch)
        last, n_past = len(batch) - 1, batch.n_past + len(batch)
        rows, before = np.array([last], dtype=np.int32), -1 - last  # the first level follows "node" -1, in that row
        for first in range(0, n_nodes, width):
            self._head(rows)
            self._choose(len(rows), width, before, first, n_nodes, n_logits)
            if first + width < n_nodes:
                places = np.arange(first + width, dtype=np.int32) // width + np.int32(n_past)
                batch = Batch(np.zeros(width, dtype=np.int32), places, None, n_past, n_nodes, first)
                self._write_places(batch)
                self._hand_on_to_level(first, width, before)
                self._embed(buffers["node_ids"], width, first)
                self._fuse(width)
                self._run_layers(batch, (), None)
                rows, before = np.arange(width, dtype=np.int32), first
        n_rows = n_nodes - width + 1  # the text, and the nodes that were passed
        shapes = {"node_ids": (n_nodes,), "parents": (n_nodes,), "candidates": (n_rows, TOP)}
        ids, parents, candidates = (
            self.device.read(buffers[name], np.empty(shape, dtype=np.int32)) for name, shape in shapes.items()
        )
        shapes = {"node_chances": (n_nodes,), "chances": (n_rows, TOP)}
        p, chances = (
            self.device.read(buffers[name], np.empty(shape, dtype=np.float32)) for name, shape in shapes.items()
        )
        return Nodes(ids, parents, p, candidates, chances)

    def keep_path(self, rows: NDArray[np.int32], n_past: int) -> None:
        """Move the keys and values of these rows of the last batch to slots n_past, n_past + 1, ..."""
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if not moved.size or not self._layers:
            return
        n_in_place = int(moved[0])
        rows, n_past = rows[n_in_place:] - np.int32(n_in_place), n_past + n_in_place
        spec = self.spec
        self.device.write(self._buffers["rows"], rows)
        items, group = [spec.head_dim, spec.n_layers * spec.n_kv_heads], [min(16, spec.head_dim), 1]
        cache = self._keys, self._values
        self._run("keep_path", items, group, *cache, self._buffers["rows"], len(rows), self._n_ctx, n_past)

    # ---- a pass ------------------------------------------------------------------------------------------------------

    def _pass(self, batch: Batch, taps: Sequence[int] = (), tapped: HiddenStates | None = None) -> None:
        """Run a batch through the layers. Without features of its own a head's are those that were handed on."""
        self._write(batch)
        self._embed(self._buffers["ids"], len(batch))
        self._fuse(len(batch))
        self._run_layers(batch, taps, tapped)

    def _write(self, batch: Batch) -> None:
        """What the kernels need to know of a batch."""
        self.device.write(self._buffers["ids"], batch.ids)
        if batch.sees is not None:
            self.device.write(self._buffers["sees"], batch.sees)
        if batch.features is not None:
            self.device.write(self._buffers["features"], batch.features)
        self._write_places(batch)

    def _write_places(self, batch: Batch) -> None:
        """What the kernels need to know of the positions of a batch."""
        device, buffers = self.device, self._buffers
        device.write(buffers["positions"], batch.positions)
        own = batch.positions[batch.first :]
        device.write(buffers["query_scales"], self._query_scales.at(own))
        for i, rope in enumerate(self._ropes):
            angles = own[:, None] * np.array(rope.inverse_frequencies)  # float64
            turns = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * rope.magnitude
            device.write(buffers[f"turns{i}"], turns.astype(np.float32))

    def _embed(self, ids: Buffer, n: int, first: int = 0) -> None:
        self._token_embd.matrices[0].gather(ids, self._buffers["x"], n, self.spec.embedding_scale, first)

    def _fuse(self, n: int) -> None:
        """Blend the embeddings of a head's tokens with the features that come with them."""
        gate, buffers, size = self._gate, self._buffers, self.spec.n_embd
        if gate is None:
            return
        pairs, items, group = buffers["pairs"], [size, n], [16, 1]
        gate.feature.multiply(self._inputs(buffers["features"], n, gate.feature), pairs, n, stride=2 * size)
        normed = self._norm(gate.token_norm, buffers["x"], n, size)
        gate.token.multiply(self._inputs(normed, n, gate.token), pairs, n, first=size, stride=2 * size)
        self._run("silu", items, group, pairs, size)
        gate.mix.multiply(self._inputs(pairs, n, gate.mix), buffers["added"], n)
        self._run("blend", items, group, pairs, buffers["added"], buffers["x"], size)

    def _hand_on(self, row: int) -> None:
        """Let that row of the last batch, which a head gave, be the feature of the next token."""
        if self._gate is not None:
            buffers, size = self._buffers, self.spec.n_embd
            self.device.write(buffers["rows"], np.array([row], dtype=np.int32))
            self._run("take_rows", [size, 1], [16, 1], buffers["x"], buffers["rows"], buffers["features"], size)

    def _hand_on_to_level(self, first: int, width: int, before: int) -> None:
        """Let rows of the last batch, from node `before` on, be the features of the nodes from `first` on."""
        if self._gate is not None:
            buffers, size = self._buffers, self.spec.n_embd
            nodes = buffers["x"], buffers["parents"], buffers["features"], size, first, before
            self._run("take_parents", [size, width], [16, 1], *nodes)

    def _run_layers(self, batch: Batch, taps: Sequence[int], tapped: HiddenStates | None) -> None:
        for index, layer in enumerate(self._layers):
            self._poll()
            self._attention(index, layer, batch)
            self._feed_forward(layer, len(batch))
            if len(batch) > _FINISH_ABOVE:
                self.device.finish()
            self._tap(index, self._buffers["x"], taps, tapped)
        if len(self._layers) in taps:  # what the output matrix reads
            x = self._norm(self._output_norm, self._buffers["x"], len(batch), self.spec.n_embd)
            self._tap(len(self._layers), x, taps, tapped)

    def _tap(self, index: int, x: Buffer, taps: Sequence[int], tapped: HiddenStates | None) -> None:
        """Copy x out where this layer is wanted."""
        if tapped is not None:
            for place in (place for place, tap in enumerate(taps) if tap == index):
                self.device.read(x, tapped[place])

    def _attention(self, index: int, layer: Layer, batch: Batch) -> None:
        spec, buffers, n = self.spec, self._buffers, len(batch)
        n_heads = spec.n_heads + 2 * spec.n_kv_heads
        x = self._norm(layer.norms.get("attn_norm"), buffers["x"], n, spec.n_embd)
        layer.qkv.multiply(self._inputs(x, n, layer.qkv), buffers["qkv"], n)
        self._norm_heads(layer, n)
        rope_index = self._rope_of[index]
        rope = None if rope_index is None else self._ropes[rope_index]
        turns = buffers["positions"] if rope is None else buffers[f"turns{rope_index}"]
        n_dims, halves = (0, 0) if rope is None else (rope.n_dims, int(rope.kind == "halves"))
        self._run(
            *("turn_and_store", [spec.head_dim, n_heads, n], [min(16, spec.head_dim), 1, 1]),
            *(buffers["qkv"], self._keys, self._values, turns, buffers["query_scales"]),
            *(index, self._n_ctx, batch.n_past + batch.first, n_dims, halves),
        )
        self._run(
            *("attend", [self._group, spec.n_heads, n], [self._group, 1, 1]),
            *(buffers["qkv"], self._keys, self._values, buffers["positions"], buffers["sees"], buffers["heads"]),
            *(index, self._n_ctx, batch.n_past, n, batch.n_nodes, batch.first),
            *(spec.attention[index].window or 0, spec.attention_soft_cap or 0.0),
        )
        n_q = spec.n_heads * spec.head_dim
        heads = self._norm(layer.norms.get("attn_sub_norm"), buffers["heads"], n, n_q, buffers["heads"])
        self._add(layer.attn_output, self._inputs(heads, n, layer.attn_output), layer.norms.get("attn_post_norm"), n)

    def _norm_heads(self, layer: Layer, n: int) -> None:
        """Norms on queries and keys, where the model has them."""
        spec = self.spec
        stride = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
        first = 0
        for role, n_heads in (("attn_q_norm", spec.n_heads), ("attn_k_norm", spec.n_kv_heads)):
            runs, size = (n_heads, spec.head_dim) if spec.qk_norm == "per_head" else (1, n_heads * spec.head_dim)
            if spec.qk_norm is not None:
                place = self._buffers["qkv"], first, stride
                self._run(
                    *("rms_norm", [self._group, runs, n], [self._group, 1, 1], *place, *place),
                    *(layer.norms[role], size, spec.norm_epsilon),
                )
            first += n_heads * spec.head_dim

    def _feed_forward(self, layer: Layer, n: int) -> None:
        spec, buffers = self.spec, self._buffers
        x = self._norm(layer.norms.get("ffn_norm"), buffers["x"], n, spec.n_embd)
        layer.gate_up.multiply(self._inputs(x, n, layer.gate_up), buffers["gate_up"], n)
        self._run("gate", [spec.n_ff, n], [16, 1], buffers["gate_up"], buffers["gated"], spec.n_ff)
        gated = self._norm(layer.norms.get("ffn_sub_norm"), buffers["gated"], n, spec.n_ff, buffers["gated"])
        self._add(layer.down, self._inputs(gated, n, layer.down), layer.norms.get("ffn_post_norm"), n)

    def _add(self, linear: Linear, x: Activations, post_norm: Buffer | None, n: int) -> None:
        """Add what a product gives, after its norm if it has one, to the residual stream."""
        spec, buffers = self.spec, self._buffers
        if post_norm is None and linear.has_no_bias:
            linear.multiply(x, buffers["x"], n, spec.residual_scale, keep=1.0)
            return
        linear.multiply(x, buffers["added"], n)
        added = self._norm(post_norm, buffers["added"], n, spec.n_embd, buffers["added"])
        self._run("add", [n * spec.n_embd], [16], buffers["x"], added, spec.residual_scale, n * spec.n_embd)

    def _norm(self, weight: Buffer | None, x: Buffer, n: int, size: int, out: Buffer | None = None) -> Buffer:
        """Where the RMS norm of x (n, size) lies: in out, or in `normed`; x itself without a weight."""
        if weight is None:
            return x
        out = self._buffers["normed"] if out is None else out
        items, group = [self._group, 1, n], [self._group, 1, 1]
        self._run("rms_norm", items, group, x, 0, size, out, 0, size, weight, size, self.spec.norm_epsilon)
        return out

    def _inputs(self, x: Buffer, n: int, linear: Linear) -> Activations:
        """x (n, n_in) as inputs of a product, rounded to codes where that wants them."""
        inputs = Activations(x, *(self._buffers[name] for name in ("codes", "scales", "sums")))
        if linear.takes_codes:
            items = [linear.n_in // RUN, n]
            self._run("quantise", items, [16, 1], x, inputs.codes, inputs.scales, inputs.sums, linear.n_in)
        return inputs

    def _head(self, rows: NDArray[np.int32]) -> None:
        """Logits of at most HEAD_ROWS rows of the last batch, into their buffer."""
        spec, buffers, n = self.spec, self._buffers, len(rows)
        self.device.write(buffers["rows"], rows)
        items = [spec.n_embd, n]
        self._run("take_rows", items, [16, 1], buffers["x"], buffers["rows"], buffers["normed"], spec.n_embd)
        x = self._norm(self._output_norm, buffers["normed"], n, spec.n_embd)
        self._output.multiply(self._inputs(x, n, self._output), buffers["logits"], n, spec.logit_scale)
        if spec.logit_soft_cap is not None:
            n_logits = n * spec.n_logits
            self._run("cap_logits", [n_logits], [16], buffers["logits"], spec.logit_soft_cap, n_logits)

    def _choose(self, n_rows: int, width: int, before: int, first: int, n_nodes: int, n_logits: int) -> None:
        """Choose the level of a tree that begins with node `first`, by the logits of that which begins `before`."""
        buffers, group = self._buffers, [self._group, 1]
        candidates, first_row = (buffers["candidates"], buffers["chances"]), before + 1 if first else 0
        items, names = [self._group, n_rows], buffers["ids"] if self._draft_vocab is None else self._draft_vocab
        self._run(
            *("likeliest", items, group, buffers["logits"], *candidates, names, int(self._draft_vocab is not None)),
            *(n_logits, self.spec.n_logits, first_row),
        )
        nodes = (buffers[name] for name in ("node_ids", "parents", "node_chances", "reach", "sees"))
        self._run("choose_level", [1], [1], *candidates, *nodes, first_row, n_rows, width, before, first, n_nodes)

    def _run(self, name: str, items: Sequence[int], group: Sequence[int], *arguments: object) -> None:
        self.device.run(self._kernels[name], items, group, *arguments)

    # ---- loading -----------------------------------------------------------------------------------------------------

    def _make_kernels(self) -> dict[str, Kernel]:
        spec = self.spec
        defines = {
            "GROUP": self._group,
            "HEAD_DIM": spec.head_dim,
            "N_HEADS": spec.n_heads,
            "N_KV_HEADS": spec.n_kv_heads,
            "ACTIVATION": _ACTIVATIONS[spec.activation],
            "TOP": TOP,
        }
        names = "rms_norm quantise turn_and_store attend gate add take_rows cap_logits keep_path likeliest choose_level"
        names += " silu blend take_parents" if spec.gate is not None else ""
        return {name: self.device.kernel(name, ["decoder.cl"], defines) for name in names.split()}

    def _load(self, parts: ModelParts, progress: Progress | None) -> None:
        """Convert and upload everything."""
        n_steps = len(parts.layers) + 2

        def loaded(n: int) -> None:
            if progress is not None:
                progress(n / n_steps)

        n_before = self.device.n_allocated
        self._token_embd = Linear(self.device, parts.token_embd)
        loaded(1)
        self._output = self._token_embd if parts.output is None else Linear(self.device, parts.output)
        loaded(2)
        self._output_norm = None if parts.output_norm is None else self.device.upload(parts.output_norm)
        self._draft_vocab = None if parts.draft_vocab is None else self.device.upload(parts.draft_vocab)
        self._gate = None if parts.gate is None else self._load_gate(parts.gate)
        self._layers: list[Layer] = []
        for layer in parts.layers:
            qkv, attn_output, gate_up, down = (
                Linear(self.device, parts) for parts in (layer.qkv, layer.attn_output, layer.gate_up, layer.down)
            )
            norms = {role: self.device.upload(norm) for role, norm in layer.norms.items()}
            self._layers.append(Layer(qkv, attn_output, gate_up, down, norms))
            loaded(2 + len(self._layers))
        self.weight_bytes = self.device.n_allocated - n_before

    def _load_gate(self, parts: GateParts) -> Gate:
        feature, token, mix = (Linear(self.device, linear) for linear in (parts.feature, parts.token, parts.mix))
        return Gate(feature, self.device.upload(parts.token_norm), token, mix)


def _power_of_two(n: int) -> int:
    """The largest that is at most n."""
    return 1 << (n.bit_length() - 1)
