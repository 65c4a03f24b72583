"""Parts that a machine may lack: a test that needs one is skipped, or fails where EDGEINFER_REQUIRE names the part."""

import os
from typing import NoReturn

import pytest


def missing(part: str, why: str) -> NoReturn:
    """Skip the test, or the whole module when it is imported; fail it where this part is required."""
    if part in os.environ.get("EDGEINFER_REQUIRE", "").split(","):
        pytest.fail(f"EDGEINFER_REQUIRE names {part}, but {why}")
    pytest.skip(f"{part}: {why}", allow_module_level=True)
