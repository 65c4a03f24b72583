"""Logits of quantised layers beside those of the oracle, which rounds what goes into products to int8 too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.backends.base import Session


def check_rounded(sessions: Sequence[Session], rng: np.random.Generator, most: float = 0.05) -> None:
    """That logits of both are the same where no number comes out on the other side of a rounding.

    Where one does is up to numpy's products, which each CPU adds up in another order. Few do in texts of four tokens;
    of a longer one all rows after it differ, by `most` of the spread at most in most texts.
    """
    errors: list[float] = []
    of_long: list[float] = []
    for n in [4] * 24 + [40] * 6:
        tokens = rng.integers(0, 291, n)
        found, expected = (session.forward(tokens, logits="all").logits for session in sessions)
        if n == 4:
            errors.extend(np.abs(found - expected).max(axis=1) / np.abs(expected).max())
        else:
            of_long.append(float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std()))
    assert np.median(errors) < 5e-6
    assert np.median(of_long) < most
