"""Types of tensors and of metadata, and where a tensor lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from edgeinfer.models.arrays import Numbers, Strings

MetadataValue: TypeAlias = (
    int | float | bool | str | Strings | Numbers | list[int] | list[float] | list[bool] | list[str]
)

I2_S_TAIL_BYTES = 32  # after the last block of a tensor: its scale as float32, and room


class GGMLType(IntEnum):
    """How the elements of a tensor are stored. A row is made of whole blocks."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    I2_S = 36  # of bitnet.cpp; ggml has given the number up
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block_elements(self) -> int:
        """Elements that are stored together."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _BLOCKS[self][1]

    def n_bytes(self, n_elements: int) -> int:
        """Bytes of a tensor of whole blocks."""
        tail = I2_S_TAIL_BYTES if self == GGMLType.I2_S else 0
        return n_elements // self.block_elements * self.block_bytes + tail


TERNARY_TYPES = frozenset({GGMLType.TQ1_0, GGMLType.TQ2_0, GGMLType.I2_S, GGMLType.Q2_0})
_BLOCKS = {  # elements, bytes: ggml-common.h, the block_* structs
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.I2_S: (128, 32),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
}
TYPE_OF_CODE = {int(kind): kind for kind in GGMLType}
OF_IK_LLAMA = {134: "IQ1_BN", 135: "IQ2_BN", 335: "IQ2_BN_R4"}  # ternary; their rows had no scale at first


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor. shape is in numpy's order, (n_out, n_in) for a matrix: GGUF's dimensions reversed."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int  # in bytes, from the start of the file
    n_bytes: int
    part: int  # index of that file in ModelFile.paths

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)
