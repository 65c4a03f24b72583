"""The bytes of each file of a folder for a board, before it is written."""

from __future__ import annotations

from edgeinfer.exporters.fpga.content import Content
from edgeinfer.exporters.fpga.options import GOLDEN_TOKENS
from edgeinfer.hls.files.folder import port_file
from edgeinfer.hls.files.manifest import ALIGNMENT
from edgeinfer.hls.geometry import round_up

HEAD_STREAM = "head_t"


def file_sizes(content: Content) -> dict[str, int]:
    """Bytes by file, in the folder. Of texts and golden vectors they are near enough for a plan."""
    spec, options, geometry = content.spec, content.options, content.options.geometry
    shapes = [product.shape for product in content.products]
    found = _streams(content, "weights", shapes)
    if options.rescored:
        shapes.append((spec.n_logits, spec.n_embd))
        found |= _streams(content, HEAD_STREAM, shapes[-1:])
    found["scales.bin"] = _joined([4 * round_up(n_out, geometry.rows) for n_out, _ in shapes])
    found["norms.bin"] = _joined([4 * len(vector) for _, vector in content.vectors()])
    found["embed.bin"] = _embeddings(content)
    if has_own_head(content):
        found["head_i8.bin"] = _joined([spec.n_logits * spec.n_embd, 4 * spec.n_logits])
    found["rope.bin"] = 4 * content.n_ctx * content.rope.n_dims
    found["golden"] = _golden(content)
    return found


def has_own_head(content: Content) -> bool:
    """Whether the output matrix is a file of its own; the int8 embeddings serve as one where they are tied."""
    return not content.spec.tied_embeddings or content.options.embeddings != "int8"


def weight_bits(content: Content) -> float:
    """Bits of memory that a trit of a layer takes, padding included."""
    n_bytes = sum(_streams(content, "weights", [product.shape for product in content.products]).values())
    return 8 * n_bytes / sum(n_out * n_in for n_out, n_in in (product.shape for product in content.products))


def _streams(content: Content, stream: str, shapes: list[tuple[int, int]]) -> dict[str, int]:
    """Of each port's file."""
    geometry = content.options.geometry
    each = _joined([geometry.stream_bytes(*shape) // geometry.n_ports for shape in shapes])
    return {port_file(stream, port): each for port in range(geometry.n_ports)}


def _joined(sizes: list[int]) -> int:
    """Of runs that begin at multiples of ALIGNMENT."""
    return sum(round_up(size, ALIGNMENT) for size in sizes[:-1]) + sizes[-1]


def _embeddings(content: Content) -> int:
    spec = content.spec
    if content.options.embeddings == "bf16":
        return 2 * spec.n_vocab * spec.n_embd
    return _joined([spec.n_vocab * spec.n_embd, 4 * spec.n_vocab])


def _golden(content: Content) -> int:
    layers, n = content.golden_layers, content.options.n_golden
    vectors = sum(n * (n_in + 4 * n_out) for product in content.products if product.layer in layers
                  for n_out, n_in in [product.shape])  # fmt: skip
    widest = sum(sum(product.shape) for product in content.products if product.layer == 0)
    return vectors + (GOLDEN_TOKENS * 4 * 4 * widest if layers else 0)
