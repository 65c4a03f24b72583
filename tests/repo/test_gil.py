"""The interpreter's lock is released and taken in one way only, which survives the end of the interpreter."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS, ENDINGS = ("backends", "edgeinfer", "exporters", "hls", "models"), ("cpp", "h", "hpp")
ONLY = ROOT / "models" / "gil.h"
OTHER_WAYS = re.compile(
    r"gil_scoped_(release|acquire)|Py_(BEGIN|END|BLOCK|UNBLOCK)_(ALLOW_)?THREADS|"
    r"PyEval_(Save|Restore|Acquire|Release)\w*|PyGILState_(Ensure|Release)"
)
SOURCES = [path for folder in FOLDERS for end in ENDINGS for path in sorted((ROOT / folder).rglob(f"*.{end}"))]


def test_no_source_has_another_way() -> None:
    found = {path.name: OTHER_WAYS.findall(path.read_text()) for path in SOURCES if path != ONLY}
    assert {name: ways for name, ways in found.items() if ways} == {}
    assert len(SOURCES) > 100


@pytest.mark.parametrize(
    "line",
    ["nb::gil_scoped_release release;", "nb::call_guard<nb::gil_scoped_acquire>()", "Py_BEGIN_ALLOW_THREADS"]
    + ["PyEval_RestoreThread(state);", "auto state = PyGILState_Ensure();"],
)
def test_such_ways_are_found(line: str) -> None:
    assert OTHER_WAYS.search(line)
