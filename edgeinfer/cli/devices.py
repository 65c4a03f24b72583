"""`edgeinfer devices`: what this machine can run models on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from edgeinfer.cli.options import json_option
from edgeinfer.cli.streams import Command
from edgeinfer.cli.terminal import show, visible
from edgeinfer.common.errors import EdgeInferError


@click.command(cls=Command)
@json_option
def devices(as_json: bool) -> None:
    """List the devices that can run models.

    These are the CPU, OpenCL devices (each tried with a small kernel) and execution providers of ONNX Runtime (each
    tried with a small graph). A device that cannot be used is listed with the reason and what to do.
    """
    found = {"cpu": _cpu(), "opencl": _opencl(), "onnx": _onnx()}
    show(json.dumps(found) if as_json else visible("\n".join(_lines(found))))


def _cpu() -> dict[str, Any]:
    """The CPU, and the reason if the native engine does not run on it."""
    from edgeinfer.common import devices as machine

    isa, isas, not_compiled, reason = None, [], [], None
    try:
        from edgeinfer.backends.native import available_isas, best_isa, missing_isas

        isas, not_compiled = available_isas(), missing_isas()
        isa = best_isa()
    except (EdgeInferError, ImportError) as error:
        reason = f"the native engine is not usable: {error}"
    return {
        "name": machine.cpu_name(),
        "n_cores": machine.physical_cores(),
        "n_threads": machine.default_n_threads(),
        "isa": isa,
        "isas": isas,
        "isas_not_compiled": not_compiled,
        "available_memory_bytes": machine.available_memory(),
        "reason": reason,
    }


def _opencl() -> dict[str, Any]:
    """The devices of OpenCL, each with the reason if it cannot be used, and the reason if there is none."""
    from edgeinfer.backends.opencl.probe import probe_devices
    from edgeinfer.speculation.placement import names_of

    found, reason = probe_devices()
    names = names_of([info for info, _ in found])
    records = [
        vars(info) | {"draft_device": name, "reason": why_not}
        for name, (info, why_not) in zip(names, found, strict=True)
    ]
    return {"devices": records, "reason": reason}


def _onnx() -> dict[str, Any]:
    """The execution providers of ONNX Runtime, with reasons as in `_opencl`."""
    from edgeinfer.backends.onnx.probe import probe_providers
    from edgeinfer.common import devices as machine
    from edgeinfer.speculation.placement import names_of_providers

    found, reason = probe_providers()
    names = names_of_providers([info for info, _ in found])
    records: list[dict[str, Any]] = []
    for name, (info, why_not) in zip(names, found, strict=True):
        record = {"name": info.name, "version": info.version, "hardware": info.devices, "operators": info.style}
        # ONNX Runtime does not report the free memory of a GPU.
        memory = machine.available_memory() if info.is_cpu else None
        records.append(record | {"draft_device": name, "available_memory_bytes": memory, "reason": why_not})
    return {"devices": records, "reason": reason}


# ---- text ------------------------------------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _cpu_lines(found["cpu"])
    for device in found["opencl"]["devices"]:
        yield ""
        yield from _device_lines(device)
    if found["opencl"]["reason"] is not None:
        yield f"\nOpenCL          none: {found['opencl']['reason']}"
    for provider in found["onnx"]["devices"]:
        yield ""
        yield from _provider_lines(provider)
    if found["onnx"]["reason"] is not None:
        yield f"\nONNX Runtime    none: {found['onnx']['reason']}"


def _cpu_lines(cpu: dict[str, Any]) -> Iterator[str]:
    from edgeinfer.common.arguments import human_bytes

    not_compiled = cpu["isas_not_compiled"]
    fields = {
        "CPU": cpu["name"],
        "  cores": f"{cpu['n_cores']} for this process, {cpu['n_threads']} threads by default",
        "  instructions": f"{cpu['isa']}, of {', '.join(cpu['isas'])}" if cpu["isa"] else None,
        "  not compiled": f"{', '.join(not_compiled)}: with EDGEINFER_SETS=all they are" if not_compiled else None,
        "  memory": f"{human_bytes(cpu['available_memory_bytes'])} available",
        "  not usable": cpu["reason"],
    }
    yield from _fields(fields)


def _device_lines(device: dict[str, Any]) -> Iterator[str]:
    from edgeinfer.common.arguments import human_bytes

    memory = f"{human_bytes(device['memory_bytes'])}, buffers of at most {human_bytes(device['max_buffer_bytes'])}"
    fields = {
        f"OpenCL {device['index']}": f"{device['name']} ({device['kind']})",
        "  platform": f"{device['platform']}, {device['version']}, driver {device['driver_version']}",
        "  compute units": f"{device['compute_units']}, groups of at most {device['max_work_group']}",
        "  memory": memory + (", shared with the CPU" if device["shares_host_memory"] else ""),
        "  local memory": f"{human_bytes(device['local_memory_bytes'])} a group",
        "  drafts": f"with --draft-device {device['draft_device']}",
        "  extensions": ", ".join(device["extensions"]) or "none that are used here",
        "  not usable": device["reason"],
    }
    yield from _fields(fields)


def _provider_lines(provider: dict[str, Any]) -> Iterator[str]:
    from edgeinfer.common.arguments import human_bytes

    memory = provider["available_memory_bytes"]
    hardware = ", ".join(f"{kind} of {maker}" for kind, maker in provider["hardware"])
    fields = {
        "ONNX Runtime": f"{provider['name']}, version {provider['version']}",
        "  hardware": hardware or "not told by ONNX Runtime",
        "  memory": "not told by ONNX Runtime" if memory is None else f"{human_bytes(memory)} available",
        "  drafts": f"with --draft-device {provider['draft_device']}",
        "  operators": "its own" if provider["operators"] == "contrib" else "those of the ONNX standard",
        "  not usable": provider["reason"],
    }
    yield from _fields(fields)


def _fields(fields: dict[str, str | None]) -> Iterator[str]:
    yield from (f"{label:<16}{text}" for label, text in fields.items() if text is not None)
