"""The devices, asked in a process of its own."""

from __future__ import annotations

import json
from typing import Any

from edgeinfer.backends.driver_probe import ask_apart
from edgeinfer.backends.opencl.device import check_device
from edgeinfer.backends.opencl.library import DeviceInfo, list_devices
from edgeinfer.common.errors import EdgeInferError

_REMEDY = "see /etc/OpenCL/vendors for the drivers, and update it or take it away"


def probe_devices() -> tuple[list[tuple[DeviceInfo, str | None]], str | None]:
    """All devices, each with the reason why it cannot be used, None where it can; and why there is none, if so."""
    found = ask_apart(__name__, _REMEDY)
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
