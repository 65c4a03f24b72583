"""The execution providers, asked in a process of its own."""

from __future__ import annotations

import json
from typing import Any

from edgeinfer.backends.driver_probe import ask_apart
from edgeinfer.backends.onnx.library import ProviderInfo, list_providers, open_onnx
from edgeinfer.backends.onnx.runtime import check_provider
from edgeinfer.common.errors import EdgeInferError

_REMEDY = "install another build of onnxruntime"


def probe_providers() -> tuple[list[tuple[ProviderInfo, str | None]], str | None]:
    """All providers, each with the reason why it cannot be used, None where it can; and why there is none, if so."""
    found = ask_apart(__name__, _REMEDY)
    return [(_info(record), record["reason"]) for record in found["devices"]], found["reason"]


def as_json() -> str:
    """What `probe_providers` gives, found out in this process."""
    try:
        open_onnx()
        found = [vars(info) | {"reason": check_provider(info)} for info in list_providers()]
    except EdgeInferError as error:
        return json.dumps({"devices": [], "reason": str(error)})
    return json.dumps({"devices": found, "reason": None})


def _info(record: dict[str, Any]) -> ProviderInfo:
    devices = tuple((kind, maker) for kind, maker in record["devices"])
    return ProviderInfo(record["name"], devices, record["style"], record["version"])
