"""What a session that is closed refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgeinfer.backends.base import Session
from edgeinfer.common.errors import EdgeInferError


def check_refuses(session: Session) -> None:
    """Every call but `close` and `interrupt` says that it is closed."""
    calls: list[Callable[[], object]] = [
        lambda: session.forward([1]),
        lambda: session.commit([]),
        lambda: session.truncate(0),
        lambda: session.n_past,
        session.memory,
    ]
    for call in calls:
        with pytest.raises(EdgeInferError, match="closed"):
            call()
