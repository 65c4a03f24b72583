"""`report.json` of a folder for a board: bytes of each kind, and bits a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.exporters.fpga.content import Content
from edgeinfer.exporters.fpga.sizes import weight_bits


def report_json(content: Content, files: Mapping[str, int]) -> dict[str, Any]:
    """The content of report.json. files: bytes by name."""
    kinds: dict[str, int] = {}
    for name, n_bytes in files.items():
        kind = name.split("/")[0].split(".")[0]
        kinds[kind] = kinds.get(kind, 0) + n_bytes
    return {
        "bytes": dict(sorted(kinds.items())),
        "ddr_bits_a_trit": round(weight_bits(content), 6),
    }
