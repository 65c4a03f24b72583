"""Waiting for what another thread or process does, for as long as a slow machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], bool], seconds: float = 60.0, otherwise: str = "it never was so") -> None:
    """Look until something is so. Raises AssertionError where it is not after so many seconds."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.001)
