"""resources.json: what the engines and the baselines take, as yosys counts it, and how they compare."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgeinfer.common.files import written_whole
from edgeinfer.hls.synth import yosys
from edgeinfer.hls.synth.counts import count
from edgeinfer.hls.synth.designs import Design

RECORD = Path(__file__).with_name("resources.json")
TOLERANCE = 0.02
BASELINE = "2bit"  # the encoding of the engine with adders
_WHAT = "logic estimates of yosys for UltraScale+ (synth_xilinx -family xcup); not placed or routed, not Vivado's"
_KINDS = ("lut", "lut_memory", "ff", "carry", "ramb18", "ramb36", "uram", "dsp", "trits_per_cycle", "luts_per_trit")


def counted(designs: Iterable[Design]) -> dict[str, Any]:
    """The record of designs: what it is, the version of yosys, and each design's parameters and counts.

    luts_per_trit is all LUTs, those of memory too, by ternary multiply-adds in a cycle.
    """
    rows = {design.name: _row(design) for design in designs}
    return {"what": _WHAT, "pyosys": yosys.version(), "designs": rows}


def _row(design: Design) -> dict[str, Any]:
    total, _ = count(design)
    return {
        "module": design.top,
        "parameters": design.parameters,
        "trits_per_cycle": design.trits_per_cycle,
        **total.as_dict(),
        "luts_per_trit": round(total.luts / design.trits_per_cycle, 2),
    }


def recorded() -> dict[str, Any]:
    """The record that is in the repository."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def record(found: dict[str, Any]) -> None:
    """Write designs into the record; those that are not among them stay, if yosys is the same."""
    before = recorded() if RECORD.exists() else {}
    kept = before.get("designs", {}) if before.get("pyosys") == found["pyosys"] else {}
    with written_whole(RECORD) as file:
        file.write(json.dumps(found | {"designs": dict(sorted((kept | found["designs"]).items()))}, indent=1).encode())
        file.write(b"\n")


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Counts of designs that are further than TOLERANCE from those of another record, in words."""
    told = []
    for name, row in found["designs"].items():
        other = wanted["designs"].get(name)
        if other is None or other["parameters"] != row["parameters"]:
            told.append(f"{name}: of other parameters, or not recorded")
            continue
        kinds = [kind for kind in _KINDS if abs(row[kind] - other[kind]) > TOLERANCE * other[kind]]
        told += [f"{name}: {row[kind]} {kind}, recorded {other[kind]}" for kind in kinds]
    return told


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """How many times the LUTs of each design the best baseline of the same record takes, at the same multiply-adds."""
    per_trit = {name: row["luts_per_trit"] for name, row in found["designs"].items()}
    baseline = min((luts for name, luts in per_trit.items() if name.startswith(BASELINE)), default=0.0)
    return {name: round(baseline / luts, 2) for name, luts in per_trit.items()}


def table(found: dict[str, Any]) -> str:
    """The record as lines of text."""
    lines = [["design", *_KINDS, "baseline / this"]]
    for (name, row), ratio in zip(found["designs"].items(), ratios(found).values(), strict=True):
        lines.append([name, *(str(row[column]) for column in _KINDS), f"{ratio:.2f}" if ratio else ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join((f"{found['what']}; pyosys {found['pyosys']}", *rows))
