"""What a benchmark says of the machine it ran on."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from edgeinfer.backends.native import best_isa
from edgeinfer.common.devices import cpu_name


def machine() -> dict[str, Any]:
    """CPU, cores, ISA path and versions."""
    versions = {}
    for package in ("edgeinfer", "llama-cpp-python", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "isa": best_isa(), "versions": versions}


def read_ahead_kib(path: Path) -> int | None:
    """Of the device that a file lies on."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for folder in (device, device.parent):
        if (folder / "queue/read_ahead_kb").exists():
            return int((folder / "queue/read_ahead_kb").read_text())
    return None
