"""Rows of a packed matrix are, bit for bit, those of the matrix that was packed."""

import numpy as np
import pytest

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.weights import BASE_THREE, MATRIX_TYPES
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType

# Of a block: the bytes of half floats, which must be numbers, and the bytes of ternary codes, of which 3 is none.
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "Q2_0": (0,), "F16": (0,)}
TRITS = {"TQ2_0": slice(0, 64), "Q2_0": slice(2, 18)}
ROWS = sorted((kind for kind in MATRIX_TYPES if kind.name != "I2_S"), key=int)


def random_blocks(kind: GGMLType, n: int, rng: np.random.Generator) -> np.ndarray:
    """n blocks in which every code and every scale may come, (n * block_bytes,)."""
    blocks = rng.integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    if kind in (GGMLType.F32, GGMLType.BF16):
        blocks[:, -1] = rng.integers(0, 127, n)  # no infinity, and nothing that is no number
    if kind == GGMLType.MXFP4:
        blocks[:, 0] %= 250  # the largest exponents overflow
    for at in HALVES.get(kind.name, ()):
        blocks[:, at + 1] &= 0xBF
    if kind.name in TRITS:
        codes = blocks[:, TRITS[kind.name]]
        codes &= ~(codes >> 1 & codes & 0x55)
    return blocks.reshape(-1)


@pytest.mark.parametrize("n_blocks", [1, 3, 5, 8])
@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.name)
def test_a_row_has_the_bits_of_the_row_that_was_packed(kind: GGMLType, n_blocks: int, rng: np.random.Generator) -> None:
    n_out, n_in = 37, n_blocks * max(kind.block_elements, 7)
    source = random_blocks(kind, n_out * n_in // kind.block_elements, rng)
    expected = dequantize(kind, source, (n_out, n_in)).astype(np.float32)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 4 * (n_blocks > 1)
    for packed_as in {int(kind), BASE_THREE.get(kind, int(kind))}:
        rows = np.full((n_out, n_in), np.nan, dtype=np.float32)
        _core.PackedMatrix(int(kind), n_out, n_in, source, 1.0, packed_as).read_rows(rows)
        np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))


def test_a_matrix_with_one_scale_for_all_rows_has_no_rows_to_read() -> None:
    matrix = _core.PackedMatrix(int(GGMLType.I2_S), 16, 128, np.zeros(16 * 32, np.uint8))
    with pytest.raises(ValueError, match="I2_S"):
        matrix.read_rows(np.empty((16, 128), np.float32))
