"""GGUF files without their matrices, of which a plan is made as of whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgeinfer.exporters.gguf.writer import Layout, Tensor


def write_skeleton(path: Path, layout: Layout, tensors: Sequence[Tensor]) -> None:
    """Write a file with its header and vectors; matrices are holes that take no disk.

    The vectors are there, since rotations by frequency (rope_freqs) are part of what a model is. Raises OSError.
    """
    with path.open("wb") as file:
        file.write(layout.header)
        for tensor in tensors:
            if len(tensor.shape) < 2:
                file.seek(layout.offsets[tensor.name])
                file.writelines(np.ascontiguousarray(piece).data for piece in tensor.pieces())
        file.truncate(layout.n_bytes)
