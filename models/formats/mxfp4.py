"""MXFP4: w = 2^(e - 127) v(q), of the OCP Microscaling formats (Rouhani et al., arXiv:2310.10537).

::

    | e | byte i: low q[i], high q[i + 16], i = 0..15 |        17 bytes

v of the codes 0..7: 0, 1/2, 1, 3/2, 2, 3, 4, 6; codes 8..15 are their negatives. The codes here are twice v, the scales
half of 2^(e - 127), as in ggml; there is no NaN.
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, nibbles

_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 17) bytes."""
    return Codes(_DOUBLED[nibbles(blocks[:, 1:])], np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128))
