"""A model written into a folder for a board, some matrices at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.fpga.content import Content, Product
from edgeinfer.exporters.fpga.sizes import HEAD_STREAM, file_sizes, has_own_head
from edgeinfer.exporters.fpga.tables import rotations, ternary_rows, write_bf16, write_int8
from edgeinfer.exporters.request import Progress
from edgeinfer.hls.files.golden import golden_inputs, products
from edgeinfer.hls.files.writer import BoardWriter
from edgeinfer.hls.packing import Bytes, pack


@dataclass(frozen=True)
class _Packed:
    """A product, ready to be written."""

    product: Product
    stream: Bytes
    scales: NDArray[np.float32]
    # x, y: golden vectors, None where it has none
    x: NDArray[np.int8] | None = None
    y: NDArray[np.int32] | None = None


def write_model(writer: BoardWriter, content: Content, progress: Progress) -> None:
    """All but texts: weights with golden vectors, norms, embeddings, the output matrix, rotations."""
    done, total = 0, sum(file_sizes(content).values())
    for packed in _packed_ahead(content):
        product = packed.product
        tensor = writer.add_stream(
            product.name, packed.stream, product.shape, packed.scales, product.phase, product.layer, product.parts
        )
        if packed.x is not None and packed.y is not None:
            writer.add_golden(tensor, packed.x, packed.y)
        done += packed.stream.size
        progress(done / total)
    for name, vector in content.vectors():
        writer.add_array("norms.bin", name, vector)
    writer.add_array("rope.bin", "rope", rotations(content.rope, content.n_ctx))
    _write_embeddings(writer, content)
    progress(0.95)


def _packed_ahead(content: Content) -> Iterator[_Packed]:
    """Each product, while a second thread reads and packs the next one."""
    with ThreadPoolExecutor(1) as pool:
        pending = None
        for product in content.products:
            ahead = pool.submit(_packed, content, product)
            if pending is not None:
                yield pending.result()
            pending = ahead
        if pending is not None:
            yield pending.result()


def _packed(content: Content, product: Product) -> _Packed:
    trits, scales = product.read()
    stream = pack(trits, content.options.geometry)
    if product.layer not in content.golden_layers:
        return _Packed(product, stream, scales)
    x = golden_inputs(trits, content.options.n_golden, content.products.index(product))
    return _Packed(product, stream, scales, x, products(trits, x))


def _write_embeddings(writer: BoardWriter, content: Content) -> None:
    """Embeddings, the output matrix where it is another one or has another type, and its ternary first stage."""
    spec, options = content.spec, content.options
    embeddings = content.stored(str(spec.token_embd))
    if options.embeddings == "int8":
        write_int8(writer, "embed.bin", "embed", embeddings)
    else:
        write_bf16(writer, "embed.bin", "embed", embeddings)
    output = content.stored(content.source.output)
    if has_own_head(content):
        write_int8(writer, "head_i8.bin", "head", output)
    if options.rescored:
        trits, scales = ternary_rows(output)
        stream = pack(trits, options.geometry)
        writer.add_stream("head", stream, (spec.n_logits, spec.n_embd), scales, "head", None, file=HEAD_STREAM)


def head_facts(content: Content) -> dict[str, object]:
    """Where the output matrix is, for `head` of the manifest."""
    array = "head" if has_own_head(content) else "embed"
    facts: dict[str, object] = {
        "tied": content.spec.tied_embeddings,
        "array": array,
        "scales": f"{array}_scales",
        "first_stage": None,
    }
    if content.options.rescored:
        facts["first_stage"] = {"tensor": "head", "rescored": min(content.options.rescored, content.spec.n_logits)}
    return facts
