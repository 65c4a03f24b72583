"""Which blocks hold no numbers: the same as their weights say, without making these."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from tiny_models import TENSOR_TYPES

from edgeinfer.models.formats import dequantize
from edgeinfer.models.formats.finite import MXFP4_LARGEST, first_not_finite
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType

BLOCK_TYPES = sorted(set(TENSOR_TYPES) - {"I2_S", "MXFP4"})
_OTHERS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS")


def weights_of(type: str, blocks: np.ndarray) -> np.ndarray:
    kind = GGMLType[type]
    if type in _OTHERS:
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type])
    return dequantize(kind, blocks.reshape(-1), (len(blocks), kind.block_elements))


@pytest.mark.parametrize("type", (*BLOCK_TYPES, *_OTHERS))
def test_a_block_is_found_where_its_weights_are_no_numbers(type: str, rng: np.random.Generator) -> None:
    kind = GGMLType[type]
    blocks = rng.integers(0, 256, (1500, kind.block_bytes), np.uint8)
    blocks[::3] |= rng.integers(0, 256, (500, kind.block_bytes), np.uint8)  # more exponents of ones
    with np.errstate(all="ignore"):
        bad = ~np.isfinite(weights_of(type, blocks)).all(axis=1)
    assert 0 < bad.sum() < len(blocks)
    found = [first_not_finite(kind, block) for block in blocks]
    assert [each is not None for each in found] == bad.tolist()
    assert first_not_finite(kind, blocks.reshape(-1)) == int(bad.argmax()) * kind.block_elements
    assert first_not_finite(kind, blocks[~bad].reshape(-1)) is None


def test_the_first_is_found_after_pieces_without_any() -> None:
    halves = np.ones(3 << 20, "<f2")
    halves[(2 << 20) + 5] = np.inf
    halves[(2 << 20) + 9] = np.nan
    assert first_not_finite(GGMLType.F16, halves.view(np.uint8)) == (2 << 20) + 5
    assert first_not_finite(GGMLType.F16, halves[: 2 << 20].view(np.uint8)) is None


def test_exponents_of_mxfp4_that_float32_cannot_hold() -> None:
    largest = np.array([[MXFP4_LARGEST, *[0x77] * 16]], np.uint8)
    assert np.isfinite(dequantize(GGMLType.MXFP4, largest.reshape(-1), (1, 32))).all()
    assert first_not_finite(GGMLType.MXFP4, largest.reshape(-1)) is None
    largest[0, 0] += 1
    with np.errstate(all="ignore"):
        assert np.isinf(dequantize(GGMLType.MXFP4, largest.reshape(-1), (1, 32))).all()
    assert first_not_finite(GGMLType.MXFP4, largest.reshape(-1)) == 0


def test_i2_s_has_one_scale_after_its_blocks() -> None:
    data = np.full(32 + I2_S_TAIL_BYTES, 0xFF, np.uint8)
    data[32:36] = np.array([0.5], "<f4").view(np.uint8)
    assert first_not_finite(GGMLType.I2_S, data) is None
    data[32:36] = np.array([np.nan], "<f4").view(np.uint8)
    assert first_not_finite(GGMLType.I2_S, data) == first_not_finite(GGMLType.I2_S, data[32:]) == 0


def test_integers_are_numbers() -> None:
    for kind in (GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64):
        assert first_not_finite(kind, np.full(64, 0xFF, np.uint8)) is None
