"""Logic estimates of engines, as `hls/synth/resources.json` has them."""

from __future__ import annotations

import json
from pathlib import Path

from edgeinfer.hls.geometry import Geometry

_RECORD = Path(__file__).parents[1] / "synth" / "resources.json"


def counts_of(geometry: Geometry) -> dict[str, int] | None:
    """lut, ff, bram18, uram and dsp of one engine; None for a geometry that has not been counted."""
    if not _RECORD.exists():
        return None
    name = f"{geometry.encoding}-{geometry.rows}x{geometry.tables}"
    row = json.loads(_RECORD.read_text())["designs"].get(name)
    if row is None:
        return None
    luts, brams = row["lut"] + row["lut_memory"], row["ramb18"] + 2 * row["ramb36"]
    return {"lut": luts, "ff": row["ff"], "bram18": brams, "uram": row["uram"], "dsp": row["dsp"]}
