"""Q5_1: w = d q + m.

::

    | d | m | bit k of 4 bytes: bit 4 of q[k] | byte i: low bits 0-3 of q[i], high of q[i + 16] |        24 bytes
"""

from __future__ import annotations

from edgeinfer.models.formats.codes import Bytes, Codes, five_bits, from_f16, signed


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 24) bytes."""
    codes = signed(five_bits(blocks[:, 4:8], blocks[:, 8:]), 0)
    return Codes(codes, from_f16(blocks[:, :2]), from_f16(blocks[:, 2:4]))
