"""Q8_0: w = d q, q signed.

::

    | d | q[0] ... q[31] |        34 bytes
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, from_f16


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 34) bytes."""
    return Codes(blocks[:, 2:].view(np.int8), from_f16(blocks[:, :2]))
