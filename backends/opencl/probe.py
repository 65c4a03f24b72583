"""The devices, asked in a process of its own: a driver that crashes or hangs ends only that."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from edgeinfer.backends.opencl.device import check_device
from edgeinfer.backends.opencl.library import DeviceInfo, list_devices
from edgeinfer.errors import EdgeInferError

_PATIENCE_SECONDS = 60  # some drivers compile for long when they do it first
_REMEDY = "see /etc/OpenCL/vendors for the drivers, and update it or take it away"
_COMMAND = "from edgeinfer.backends.opencl import probe; print(probe.as_json())"


def probe_devices() -> tuple[list[tuple[DeviceInfo, str | None]], str | None]:
    """All devices, each with the reason why it cannot be used, None where it can; and why there is none, if so."""
    try:
        run = subprocess.run(
            [sys.executable, "-P", "-c", _COMMAND],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [], f"a driver did not answer within {_PATIENCE_SECONDS} s; {_REMEDY}"
    if run.returncode:
        last_words = (run.stderr.strip().splitlines() or ["without a word"])[-1]
        return [], f"a driver ended the process that asked it (exit code {run.returncode}: {last_words}); {_REMEDY}"
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return [(_info(record), record["reason"]) for record in found["devices"]], found["reason"]


def as_json() -> str:
    """What `probe_devices` gives, found out in this process."""
    try:
        found = [vars(info) | {"reason": check_device(info)} for info in list_devices()]
    except EdgeInferError as error:
        return json.dumps({"devices": [], "reason": str(error)})
    return json.dumps({"devices": found, "reason": None})


def _info(record: dict[str, Any]) -> DeviceInfo:
    fields = {name: value for name, value in record.items() if name != "reason"}
    return DeviceInfo(**fields | {"extensions": tuple(record["extensions"])})
