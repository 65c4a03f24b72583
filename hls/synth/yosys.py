"""Yosys, in a process of its own: an error in it ends its process, and its memory is given back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version as version_of
from pathlib import Path

from edgeinfer.common.errors import BackendUnavailable, EdgeInferError

_PACKAGE = "pyosys"
_LINES = 12  # of what yosys printed, in an error


def run(commands: Sequence[str], folder: Path) -> None:
    """Run commands one after the other. folder: for relative names in them.

    Raises BackendUnavailable without pyosys, EdgeInferError with the last lines of yosys for a command that fails.
    """
    require()
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(list(commands)),
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if process.returncode != 0:
        last = "\n".join(process.stdout.splitlines()[-_LINES:])
        raise EdgeInferError(f"yosys must run {len(commands)} commands: it ended with {process.returncode}:\n{last}")


def require() -> None:
    """Raises BackendUnavailable without pyosys."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise BackendUnavailable("pyosys is needed for logic estimates: not found; pip install 'edgeinfer[fpga]'")


def version() -> str:
    """Of pyosys."""
    require()
    return version_of(_PACKAGE)


def cell_models() -> Path:
    """Verilog models of Xilinx cells, for simulation."""
    require()
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "share" / "xilinx" / "cells_sim.v"


def main() -> None:
    """Run the commands on stdin, a list in JSON."""
    from pyosys import libyosys

    design = libyosys.Design()
    for command in json.load(sys.stdin):
        libyosys.run_pass(command, design)


if __name__ == "__main__":
    main()
