"""TQ1_0: w = d t, t in {-1, 0, 1}, five trits a byte.

::

    | 32 bytes: t[i + 32 n] | 16 bytes: t[160 + i + 16 n] | 4 bytes: t[240 + i + 4 n] | d |        54 bytes
    byte i = ceil(256 v / 243), where v has the digits t + 1 of n = 0, 1, ... in base three, the highest first;
    digits are carried out at the top: digit n is 3 (byte 3^n mod 256) / 256, rounded down
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, as_f16, from_f16, signed
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix

_RUNS = ((32, 5), (16, 5), (4, 4))  # of a block: bytes, trits a byte


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 54) bytes."""
    digits, at = [], 0
    for n_bytes, n_digits in _RUNS:
        powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:n_digits, None]
        shifted = blocks[:, None, at : at + n_bytes] * powers  # modulo 256
        digits.append((shifted.astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
        at += n_bytes
    return Codes(signed(np.hstack(digits), 1), from_f16(blocks[:, at:]))


def pack(name: str, matrix: TernaryMatrix) -> Bytes:
    """The bytes of a tensor. Raises UnsupportedModel."""
    scales = matrix.scales_of(name, 256)
    codes = matrix.codes().reshape(-1, 256)
    runs, at = [], 0
    for n_bytes, n_digits in _RUNS:
        digits = codes[:, at : at + n_bytes * n_digits].reshape(len(codes), n_digits, -1).astype(np.uint16)
        powers = np.array([81, 27, 9, 3, 1], dtype=np.uint16)[:n_digits, None]
        values = (digits * powers).sum(axis=1, dtype=np.uint16)
        runs.append(((values * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8))
        at += n_bytes * n_digits
    return np.hstack([*runs, as_f16(scales)]).reshape(-1)
