"""Q4_0: w = d (q - 8).

::

    | d | byte i: low q[i], high q[i + 16], i = 0..15 |        18 bytes
"""

from __future__ import annotations

from edgeinfer.models.formats.codes import Bytes, Codes, from_f16, nibbles, signed


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 18) bytes."""
    return Codes(signed(nibbles(blocks[:, 2:]), 8), from_f16(blocks[:, :2]))
