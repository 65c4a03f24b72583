"""The packed ternary formats: by hand, there and back for any shape, and what they refuse."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from packed_ternary import (
    pack_base_three,
    pack_two_bit,
    unpack_base_three,
    unpack_two_bit,
)

from edgeinfer.common.errors import ShapeError
from edgeinfer.models.formats.ternary_packing import packed_shape

FORMATS = {"two_bit": (pack_two_bit, unpack_two_bit, 16), "base_three": (pack_base_three, unpack_base_three, 20)}
Pack = Callable[[np.ndarray, np.ndarray], np.ndarray]
Unpack = Callable[[np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]


def a_matrix(n_out: int, n_in: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(-1, 2, (n_out, n_in), dtype=np.int8), rng.standard_normal(n_out, dtype=np.float32)


@pytest.mark.parametrize("pack, unpack, inputs", FORMATS.values(), ids=FORMATS)
@given(n_out=st.integers(1, 50), n_in=st.integers(1, 90), seed=st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_a_matrix_of_any_shape_comes_back(
    pack: Pack, unpack: Unpack, inputs: int, n_out: int, n_in: int, seed: int
) -> None:
    trits, scales = a_matrix(n_out, n_in, seed)
    packed = pack(trits, scales)
    assert packed.shape == packed_shape(n_out, n_in, inputs) == (-(-n_out // 16), 64 + 64 * -(-n_in // inputs))
    back, back_scales = unpack(packed, n_out, n_in)
    assert_array_equal(back, trits)
    assert_array_equal(back_scales, scales)


@pytest.mark.parametrize("pack, unpack, inputs", FORMATS.values(), ids=FORMATS)
def test_what_fills_up_counts_nothing(pack: Pack, unpack: Unpack, inputs: int) -> None:
    trits, scales = a_matrix(17, 21, 1)
    whole, whole_scales = unpack(pack(trits, scales), 32, 2 * inputs)
    assert not whole[17:].any() and not whole_scales[17:].any()
    assert (whole[:17, 21:] == -1).all()  # code 0


def test_two_bits_lie_where_the_drawing_has_them() -> None:
    trits = np.zeros((3, 48), dtype=np.int8)
    trits[2, 32 + 0 + 1] = 1  # line 2, bits 1:0 of byte 4 * 2 + 1
    trits[2, 16 + 8 + 3] = -1  # line 1, bits 5:4 of byte 4 * 2 + 3
    trits[0, 12] = 1  # line 0, bits 7:6 of byte 0
    group = pack_two_bit(trits, np.array([1, 2, 4], dtype=np.float32))[0]
    lines = np.full((3, 64), 0b01010101, dtype=np.uint8)
    lines[2, 9], lines[1, 11], lines[0, 0] = 0b01010110, 0b01000101, 0b10010101
    assert_array_equal(group[64:].reshape(3, 64), lines)
    assert group[:64].view("<f4").tolist() == [1, 2, 4] + [0] * 13


def test_five_trits_lie_where_the_drawing_has_them() -> None:
    trits = np.zeros((2, 40), dtype=np.int8)
    trits[1, [1, 5, 9, 13, 17]] = [1, 0, -1, 0, 1]  # line 0, byte 4 * 1 + 1: 1 - 9 + 81
    trits[0, 20] = -1  # line 1, byte 0
    lines = np.zeros((2, 64), dtype=np.uint8)
    lines[0, 5], lines[1, 0] = 73, 0x81
    assert_array_equal(pack_base_three(trits, np.ones(2, dtype=np.float32))[0, 64:].reshape(2, 64), lines)


def test_every_byte_of_five_trits_is_read_as_it_is_written() -> None:
    trits = np.stack(np.meshgrid(*[[-1, 0, 1]] * 5), axis=-1).reshape(-1, 5, 1).repeat(4, axis=2).astype(np.int8)
    matrix = trits.reshape(243, 20)
    packed = pack_base_three(matrix, np.zeros(243, dtype=np.float32))
    assert len(np.unique(packed[:, 64:])) == 243
    assert_array_equal(unpack_base_three(packed, 243, 20)[0], matrix)


@pytest.mark.parametrize("pack, unpack, inputs", FORMATS.values(), ids=FORMATS)
def test_what_is_no_ternary_matrix_is_refused(pack: Pack, unpack: Unpack, inputs: int) -> None:
    trits, scales = a_matrix(16, 40, 1)
    with pytest.raises(ShapeError, match="found -1..2; this matrix is not ternary"):
        pack(np.where(trits == 1, np.int8(2), trits), scales)
    with pytest.raises(ShapeError, match=r"scales must be float32 \(16,\), one a row: found float32 \(15,\)"):
        pack(trits, scales[:15])
    with pytest.raises(ShapeError, match="trits must be int8"):
        pack(trits.astype(np.float32), scales)
    with pytest.raises(ShapeError, match="at least one row"):
        pack(trits[:0], scales[:0])
    packed = pack(trits, scales)
    with pytest.raises(ShapeError, match="cut short"):
        unpack(packed[:, :-1], 16, 40)
    packed[0, 70] = 0xFF
    with pytest.raises(ShapeError, match="damaged"):
        unpack(packed, 16, 40)
