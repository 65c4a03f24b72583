"""Files of experts with random contents, and what a cache must make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.models.gguf import GGMLType

PAGE = 4096
N_EMBD, N_FF = 256, 48  # a row group of 16 is not filled by the 40 rows that tests of padding take
Kind = Literal["packed", "unpacked", "split"]
Matrices = tuple[tuple[int, int, int], ...]  # gate, up, down: type, n_out, n_in


@dataclass(frozen=True)
class ExpertFiles:
    """Experts in files."""

    layout: _core.ExpertLayout
    source: _core.ExpertSource
    paths: list[Path]
    records: dict[tuple[int, int], bytes]  # by (layer, expert) what they are in memory

    @property
    def layers(self) -> list[int]:
        """The layers that have experts."""
        return sorted({layer for layer, _ in self.records})

    @property
    def n_experts(self) -> int:
        """Of each of these layers."""
        return len(self.records) // len(self.layers)

    def bytes_of(self, n_experts: int) -> int:
        """Of so many slots, where all records are equally large."""
        return n_experts * self.layout.record_bytes(self.layers[0])


def matrices(gate_type: GGMLType, down_type: GGMLType, n_ff: int = N_FF) -> Matrices:
    """Sizes of an expert's matrices."""
    gate = (int(gate_type), n_ff, N_EMBD)
    return gate, gate, (int(down_type), N_EMBD, n_ff)


SMALL = matrices(GGMLType.Q8_0, GGMLType.F16)
LARGE = matrices(GGMLType.F32, GGMLType.F32, 40)


def write_experts(
    folder: Path, kind: Kind = "packed", layers: Sequence[Matrices | None] = (SMALL,) * 3, n_experts: int = 8
) -> ExpertFiles:
    """Write experts and give what reads them. layers: None for one without experts."""
    rng = np.random.default_rng(len(layers) * n_experts)
    layout = _core.ExpertLayout()
    tensors: list[tuple[int, list[NDArray[np.uint8]]]] = []
    for layer, sizes in enumerate(layers):
        if sizes is None:
            layout.add_layer_without_experts()
            continue
        layout.add_layer(n_experts, *sizes)
        tensors += [(layer, [_blocks(rng, each) for _ in range(n_experts)]) for each in sizes]
    records = {}
    for layer, sizes in enumerate(layers):
        blocks = [each for number, each in tensors if number == layer]
        for expert in range(n_experts if sizes else 0):
            records[layer, expert] = _record(layout, layer, sizes or (), [each[expert] for each in blocks])
    if kind == "packed":
        path = folder / "experts.packed"
        source = _write_packed(path, layout, records)
        return ExpertFiles(layout, source, [path], records)
    paths = [folder / f"experts-{i}.gguf" for i in range(3 if kind == "split" else 1)]
    source = _write_unpacked(paths, layout, layers, [each for _, each in tensors])
    return ExpertFiles(layout, source, paths, records)


def _blocks(rng: np.random.Generator, matrix: tuple[int, int, int]) -> NDArray[np.uint8]:
    """A random matrix as GGUF stores it."""
    kind, n_out, n_in = matrix
    return rng.integers(0, 256, GGMLType(kind).n_bytes(n_out * n_in), dtype=np.uint8)


def _record(layout: _core.ExpertLayout, layer: int, sizes: Matrices, blocks: Sequence[NDArray[np.uint8]]) -> bytes:
    """A record, packed as dense weights are."""
    record = bytearray(layout.record_bytes(layer))
    for (kind, n_out, n_in), data, offset in zip(sizes, blocks, layout.offsets(layer), strict=True):
        weights = _core.Weights(_core.packed_bytes(kind, n_out, n_in))
        weights.set_matrix("", "matrix", kind, n_out, n_in)
        weights.pack_rows("", "matrix", 0, kind, data, _core.Threads(1))
        record[offset : offset + weights.n_bytes] = weights.data.tobytes()
    return bytes(record)


def _write_packed(path: Path, layout: _core.ExpertLayout, records: dict[tuple[int, int], bytes]) -> _core.ExpertSource:
    path.write_bytes(bytes(2 * PAGE) + b"".join(records[key] for key in sorted(records)))
    names = [f"experts of layer {i}" for i in range(layout.n_layers)]
    return _core.ExpertSource.packed(layout, str(path), 2 * PAGE, names)


def _write_unpacked(
    paths: list[Path],
    layout: _core.ExpertLayout,
    layers: Sequence[Matrices | None],
    tensors: list[list[NDArray[np.uint8]]],
) -> _core.ExpertSource:
    """Tensors one after the other, in turns to each of the files, at places that are multiples of 32."""
    contents = [bytearray(b"GGUF" + bytes(28)) for _ in paths]
    fields = []
    sizes = [(layer, part, each) for layer, matrix in enumerate(layers) for part, each in enumerate(matrix or ())]
    for number, ((layer, part, (kind, _, _)), data) in enumerate(zip(sizes, tensors, strict=True)):
        file = number % len(paths)
        stride = len(data[0])
        name = f"blk.{layer}.ffn_{('gate', 'up', 'down')[part]}_exps.weight"
        fields.append((name, file, len(contents[file]), stride, kind, 1.0))
        contents[file] += b"".join(each.tobytes() for each in data)
        contents[file] += bytes(-len(contents[file]) % 32)
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return _core.ExpertSource.unpacked(layout, [str(path) for path in paths], fields)
