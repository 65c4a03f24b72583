"""Q4_1: w = d q + m.

::

    | d | m | byte i: low q[i], high q[i + 16], i = 0..15 |        20 bytes
"""

from __future__ import annotations

from edgeinfer.models.formats.codes import Bytes, Codes, from_f16, nibbles, signed


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 20) bytes."""
    return Codes(signed(nibbles(blocks[:, 4:]), 0), from_f16(blocks[:, :2]), from_f16(blocks[:, 2:4]))
