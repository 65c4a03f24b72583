"""Q5_0: w = d (q - 16).

::

    | d | bit k of 4 bytes: bit 4 of q[k] | byte i: low bits 0-3 of q[i], high of q[i + 16] |        22 bytes
"""

from __future__ import annotations

from edgeinfer.models.formats.codes import Bytes, Codes, five_bits, from_f16, signed


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 22) bytes."""
    return Codes(signed(five_bits(blocks[:, 2:6], blocks[:, 6:]), 16), from_f16(blocks[:, :2]))
