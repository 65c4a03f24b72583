"""Quantisers: what they write, the gguf package reads as we do, and it lies as near as its own does."""

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgeinfer.common.errors import ShapeError, UnsupportedModel
from edgeinfer.models.formats import dequantize, quantize
from edgeinfer.models.gguf import GGMLType

ROOM = {"F32": 0.0, "F16": 1.0, "Q8_0": 1.02, "Q4_0": 1.0}  # of our error against that of the gguf package


@pytest.mark.parametrize("type", [GGMLType[name] for name in ROOM], ids=lambda type: type.name)
def test_the_gguf_package_reads_what_is_written_as_we_do(type: GGMLType, rng: np.random.Generator) -> None:
    weights = rng.standard_normal((7, 96), dtype=np.float32)
    weights[3, :32] = 0
    data = quantize(type, weights)
    ours = dequantize(type, data, weights.shape)
    kind = gguf.GGMLQuantizationType(int(type))
    theirs = gguf.dequantize(data.view({"F32": np.float32, "F16": np.float16}.get(type.name, np.uint8)), kind)
    assert_array_equal(ours, theirs.reshape(weights.shape).astype(np.float32))
    assert not ours[3, :32].any()
    known = gguf.dequantize(gguf.quantize(weights, kind), kind)
    assert np.square(ours - weights).sum() <= ROOM[type.name] * np.square(known - weights).sum()


@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.Q4_0], ids=lambda type: type.name)
def test_weights_that_the_format_has_are_kept(type: GGMLType, rng: np.random.Generator) -> None:
    codes = rng.integers(-7, 8, (4, 32)).astype(np.float32)
    codes[:, 5] = -8 if type == GGMLType.Q4_0 else 127
    weights = codes * np.float32(0.25)
    assert_array_equal(dequantize(type, quantize(type, weights), weights.shape), weights)


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(
        UnsupportedModel,
        match="type IQ4_NL cannot be written; these can: BF16, F16, F32, MXFP4, Q2_K, .*Q8_0",
    ):
        quantize(GGMLType.IQ4_NL, np.zeros((1, 256), np.float32))
    with pytest.raises(ShapeError, match=r"rows of Q8_0 must be a multiple of 32: found \(2, 48\)"):
        quantize(GGMLType.Q8_0, np.zeros((2, 48), np.float32))
    for bad in (np.nan, np.inf, 7e4):
        with pytest.raises(ShapeError, match="must be finite and at most 65504"):
            quantize(GGMLType.F16, np.full((1, 32), bad, np.float32))
