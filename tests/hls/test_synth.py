"""Logic estimates: what the records say, and that yosys still counts it."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
from parts import is_there, missing

from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.synth import fmax, yosys
from edgeinfer.hls.synth.counts import Counts, _counts
from edgeinfer.hls.synth.designs import designs, engine, geometry_of, open_engine
from edgeinfer.hls.synth.resources import counted, differences, ratios, recorded, table

COUNTED_HERE = "g3x5-14x4"  # the engine that yosys is done with first
ENGINES = [name for name in designs() if name.startswith(("base3", "g3x5"))]


def test_every_design_is_recorded_as_it_is() -> None:
    rows = recorded()["designs"]
    assert rows.keys() == designs().keys()
    for name, design in designs().items():
        row = rows[name]
        facts = (design.top, design.parameters, design.trits_per_cycle)
        assert (row["module"], row["parameters"], row["trits_per_cycle"]) == facts
        luts = (row["lut"] + row["lut_memory"]) / design.trits_per_cycle
        assert row["dsp"] == 0 and row["luts_per_trit"] == pytest.approx(luts, abs=0.005)


def test_the_engines_with_tables_reach_their_goals() -> None:
    """Whole engines: with the fill of tables, the sequencer, the buffers and the totals; and so is the baseline."""
    found, rows = ratios(recorded()), recorded()["designs"]
    assert all(rows[name]["luts_per_trit"] <= 6.7 for name in ENGINES if name.startswith("base3"))
    assert rows["base3-8x8"]["luts_per_trit"] <= 4.5 and found["base3-8x8"] >= 3


def test_clock_rates_are_of_the_engines_as_they_are() -> None:
    for name, row in fmax.recorded()["designs"].items():
        assert row["parameters"] == designs()[name].parameters and len(row["mhz"]) == len(fmax.SEEDS)
        assert row["cells"]["DP16KD"] > 0 and min(row["mhz"]) > 0


def test_yosys_counts_what_is_recorded() -> None:
    if not is_there("pyosys"):
        missing("pyosys", "it is not installed")
    found = counted([designs()[COUNTED_HERE]])
    assert found["pyosys"] == recorded()["pyosys"]
    assert differences(found, recorded()) == []


def test_a_count_that_is_off_and_a_design_that_is_not_recorded_are_told() -> None:
    off = copy.deepcopy(recorded())
    off["designs"] = {name: off["designs"][name] for name in ("base3-8x8", "2bit-8x32")}
    off["designs"]["base3-8x8"]["lut"] = round(off["designs"]["base3-8x8"]["lut"] * 1.03)
    off["designs"]["2bit-8x32"]["parameters"]["ACC_BITS"] = 20
    lut, parameters = differences(off, recorded())
    assert lut.startswith("base3-8x8: ") and "lut, recorded" in lut
    assert parameters.startswith("2bit-8x32: of other parameters")


def test_cells_are_counted_as_the_luts_they_take() -> None:
    cells = Counter({"LUT6": 3, "LUT2": 2, "INV": 1, "FDRE": 4, "RAM32M16": 1, "SRL16E": 2, "RAMB18E2": 1, "MUXF7": 9})
    assert _counts(cells, 2) == Counts(lut=12, lut_memory=20, ff=8, ramb18=2)
    with pytest.raises(EdgeInferError, match="found DSP58"):
        _counts(Counter({"DSP58": 1}), 1)


def test_the_table_names_every_design_and_what_it_shows() -> None:
    lines = table(recorded()).splitlines()
    assert "logic estimates" in lines[0] and len(lines) == 2 + len(designs())
    assert json.loads(json.dumps(recorded())) == recorded()


def test_an_engine_takes_the_accumulators_that_its_matrices_need() -> None:
    small, large = engine(Geometry("base3", 4, 16), 4095, 8), engine(Geometry("base3", 4, 16), 4096, 9)
    assert (small.parameters["ACC_BITS"], large.parameters["ACC_BITS"]) == (20, 21)
    assert (small.parameters["MAX_TILES"], large.parameters["MAX_TILES"]) == (2, 3)
    with pytest.raises(InvalidArgument, match="found ei_open_base3"):
        geometry_of(open_engine(1))


def test_an_error_of_yosys_is_told(tmp_path: Path) -> None:
    if not is_there("pyosys"):
        missing("pyosys", "it is not installed")
    with pytest.raises(EdgeInferError, match="(?s)it ended with .*nothing.v"):
        yosys.run(["read_verilog nothing.v"], tmp_path)
