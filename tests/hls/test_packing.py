"""Streams of weights: their layout, their sizes, and the way back."""

import numpy as np
import pytest

from edgeinfer.common.errors import InvalidArgument, ShapeError
from edgeinfer.hls.geometry import ENCODINGS, Geometry, accumulator_bits
from edgeinfer.hls.packing import from_ports, pack, to_ports, unpack

GEOMETRIES = [
    Geometry("base3", 4, 16),
    Geometry("base3", 8, 8),
    Geometry("base3", 1, 1, 1),
    Geometry("g3x5", 16, 4),
    Geometry("g3x5", 2, 4, 2),
    Geometry("g3x5", 14, 4),
    Geometry("2bit", 4, 64),
    Geometry("2bit", 2, 2, 1),
]


def random_trits(seed: int, n_out: int, n_in: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, (n_out, n_in)).astype(np.int8)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 83), (64, 160), (33, 79)], ids=str)
def test_the_way_back_gives_the_same_trits(geometry: Geometry, shape: tuple[int, int]) -> None:
    trits = random_trits(1, *shape)
    stream = pack(trits, geometry)
    assert stream.size == geometry.stream_bytes(*shape)
    assert np.array_equal(unpack(stream, *shape, geometry), trits)
    assert np.array_equal(from_ports(to_ports(stream, geometry), geometry), stream)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_each_index_stands_where_the_layout_says(geometry: Geometry) -> None:
    n_out, n_in = 2 * geometry.rows + 1, 3 * geometry.step_inputs - 1
    trits, code = random_trits(2, n_out, n_in), geometry.code
    stream = int.from_bytes(pack(trits, geometry).tobytes(), "little")
    for step in range(geometry.n_steps(n_in)):
        for tile in range(geometry.n_tiles(n_out)):
            beat = stream >> 8 * geometry.beat_bytes * (step * geometry.n_tiles(n_out) + tile)
            for r in range(geometry.rows):
                for t in range(geometry.tables):
                    index = beat >> code.n_bits * (r * geometry.tables + t) & (1 << code.n_bits) - 1
                    row, first = tile * geometry.rows + r, (step * geometry.tables + t) * code.n_trits
                    inputs = [k for k in range(first, first + code.n_trits)]
                    found = [trits[row, k] if row < n_out and k < n_in else 0 for k in inputs]
                    assert index == sum((int(w) + 1) * 3**j for j, w in enumerate(found))


def test_ports_have_sixteen_bytes_in_turn() -> None:
    geometry = Geometry("base3", 4, 16)
    stream = pack(random_trits(3, 8, 160), geometry)
    assert np.array_equal(to_ports(stream, geometry)[1][:32], np.concatenate([stream[16:32], stream[80:96]]))


def test_published_sizes_are_met() -> None:
    """Of BitNet b1.58 2B-4T in base 3: the bytes that bitnet-kv260 publishes of its weights."""
    geometry = Geometry("base3", 4, 16)
    shapes = [(2560 + 2 * 640, 2560), (2560, 2560), (2 * 6912, 2560), (2560, 6912)]
    assert 30 * sum(geometry.stream_bytes(*shape) for shape in shapes) == 417_546_240


def test_accumulators_hold_the_largest_sum() -> None:
    assert [accumulator_bits(n) for n in (4095, 4096, 6912)] == [20, 21, 21]
    assert [each.entry_bits for each in ENCODINGS.values()] == [11, 10, 9]


def test_what_is_damaged_is_refused() -> None:
    geometry = Geometry("base3", 4, 16)
    trits = random_trits(4, 5, 81)
    stream = pack(trits, geometry)
    with pytest.raises(ShapeError, match="cut short"):
        unpack(stream[:-64], 5, 81, geometry)
    for at, value, message in ((3, 243, "found 243"), (64 + 16, 122, "past the matrix")):
        damaged = stream.copy()
        damaged[at] = value
        with pytest.raises(ShapeError, match=message):
            unpack(damaged, 5, 81, geometry)
    small = Geometry("base3", 1, 1)  # 85 beats of a byte, and 43 bytes to the end of the lanes
    behind = pack(trits, small)
    behind[100] = 1
    with pytest.raises(ShapeError, match="past the last beat"):
        unpack(behind, 5, 81, small)
    with pytest.raises(ShapeError, match="not ternary"):
        pack(trits * 2, geometry)


def test_a_geometry_is_refused_with_what_is_wanted() -> None:
    for fields, message in (
        (("base5", 4, 16), "base3, g3x5, 2bit"),
        (("base3", 3, 12), "power of two"),
        (("g3x5", 1, 1), "whole bytes"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Geometry(*fields)


def test_the_hash_tells_geometries_apart() -> None:
    assert len({geometry.hash() for geometry in GEOMETRIES}) == len(GEOMETRIES)
    assert Geometry("base3", 4, 16).hash() == Geometry("base3", 4, 16).hash()
