"""Logic estimates of engines, as `hls/synth/resources.json` has them."""

from __future__ import annotations

from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.synth.designs import engine
from edgeinfer.hls.synth.resources import recorded


def counts_of(geometry: Geometry) -> dict[str, int] | None:
    """lut, ff, bram18, uram and dsp of one engine; None for a geometry that has not been counted."""
    row = recorded()["designs"].get(engine(geometry).name)
    if row is None:
        return None
    luts, brams = row["lut"] + row["lut_memory"], row["ramb18"] + 2 * row["ramb36"]
    return {"lut": luts, "ff": row["ff"], "bram18": brams, "uram": row["uram"], "dsp": row["dsp"]}
