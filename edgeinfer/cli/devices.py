"""`edgeinfer devices`: what this machine can run models on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import click

from edgeinfer.cli import ENVIRONMENT
from edgeinfer.cli.options import json_option
from edgeinfer.cli.terminal import visible
from edgeinfer.errors import EdgeInferError

_PATIENCE_SECONDS = 60  # some drivers compile for long when they do it first
_REMEDIES = {
    "opencl": "see /etc/OpenCL/vendors for the drivers, and update it or take it away",
    "onnx": "install another build of onnxruntime",
}


@click.command(context_settings=ENVIRONMENT)
@json_option
def devices(as_json: bool) -> None:
    """Show the devices that can run models.

    The CPU, those of OpenCL, each tried with a small kernel, and the execution providers of ONNX Runtime, each tried
    with a small graph. What cannot be used is listed with the reason and what to do.
    """
    found = {"cpu": _cpu(), "opencl": _asked("opencl"), "onnx": _asked("onnx")}
    click.echo(json.dumps(found) if as_json else visible("\n".join(_lines(found))))


def _cpu() -> dict[str, Any]:
    """The CPU, and why the native engine does not run on it, if so."""
    from edgeinfer import devices as machine

    isa, isas, reason = None, [], None
    try:
        from edgeinfer.backends.native import available_isas, best_isa

        isa, isas = best_isa(), available_isas()
    except (EdgeInferError, ImportError) as error:
        reason = f"the native engine is not usable: {error}"
    return {
        "name": machine.cpu_name(),
        "n_cores": machine.physical_cores(),
        "n_threads": machine.default_n_threads(),
        "isa": isa,
        "isas": isas,
        "available_memory_bytes": machine.available_memory(),
        "reason": reason,
    }


def _asked(library: Literal["opencl", "onnx"]) -> dict[str, Any]:
    """What `ask_<library>` gives, asked in a process of its own: a driver that crashes or hangs ends only that."""
    command = [sys.executable, "-P", "-c", f"from edgeinfer.cli import devices; print(devices.ask_{library}())"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        reason = f"a driver did not answer within {_PATIENCE_SECONDS} s; {_REMEDIES[library]}"
        return {"devices": [], "reason": reason}
    if run.returncode:
        last_words = (run.stderr.strip().splitlines() or ["without a word"])[-1]
        reason = f"a driver ended the process that asked it (exit code {run.returncode}: {last_words})"
        return {"devices": [], "reason": f"{reason}; {_REMEDIES[library]}"}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def ask_opencl() -> str:
    """JSON of the devices of OpenCL, each with the reason why it cannot be used, if so; and why there is none."""
    try:
        from edgeinfer.backends.opencl import check_device, list_devices

        found = [vars(info) | {"reason": check_device(info)} for info in list_devices()]
    except EdgeInferError as error:
        return json.dumps({"devices": [], "reason": str(error)})
    return json.dumps({"devices": found, "reason": None})


def ask_onnx() -> str:
    """JSON of the execution providers of ONNX Runtime, and the reasons, as `ask_opencl` gives."""
    try:
        from edgeinfer import devices as machine
        from edgeinfer.backends.onnx import check_provider, library_version, list_providers, open_onnx

        open_onnx()
        found = [
            {"name": info.name, "hardware": info.devices, "operators": info.style, "reason": check_provider(info)}
            # What a graphics card has left ONNX Runtime does not say.
            | {"available_memory_bytes": machine.available_memory() if info.is_cpu else None}
            for info in list_providers()
        ]
    except EdgeInferError as error:
        return json.dumps({"devices": [], "reason": str(error)})
    return json.dumps({"version": library_version(), "devices": found, "reason": None})


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
        yield from _provider_lines(provider, found["onnx"]["version"])
    if found["onnx"]["reason"] is not None:
        yield f"\nONNX Runtime    none: {found['onnx']['reason']}"


def _cpu_lines(cpu: dict[str, Any]) -> Iterator[str]:
    from edgeinfer.memory.plan import human_bytes

    fields = {
        "CPU": cpu["name"],
        "  cores": f"{cpu['n_cores']} for this process, {cpu['n_threads']} threads by default",
        "  instructions": f"{cpu['isa']}, of {', '.join(cpu['isas'])}" if cpu["isa"] else None,
        "  memory": f"{human_bytes(cpu['available_memory_bytes'])} available",
        "  not usable": cpu["reason"],
    }
    yield from _fields(fields)


def _device_lines(device: dict[str, Any]) -> Iterator[str]:
    from edgeinfer.memory.plan import human_bytes

    memory = f"{human_bytes(device['memory_bytes'])}, buffers of at most {human_bytes(device['max_buffer_bytes'])}"
    fields = {
        f"OpenCL {device['index']}": f"{device['name']} ({device['kind']})",
        "  platform": f"{device['platform']}, {device['version']}, driver {device['driver_version']}",
        "  compute units": f"{device['compute_units']}, groups of at most {device['max_work_group']}",
        "  memory": memory + (", shared with the CPU" if device["shares_host_memory"] else ""),
        "  local memory": f"{human_bytes(device['local_memory_bytes'])} a group",
        "  extensions": ", ".join(device["extensions"]) or "none that are used here",
        "  not usable": device["reason"],
    }
    yield from _fields(fields)


def _provider_lines(provider: dict[str, Any], version: str) -> Iterator[str]:
    from edgeinfer.memory.plan import human_bytes

    memory = provider["available_memory_bytes"]
    hardware = ", ".join(f"{kind} of {maker}" for kind, maker in provider["hardware"])
    fields = {
        "ONNX Runtime": f"{provider['name']}, version {version}",
        "  hardware": hardware or "not told by ONNX Runtime",
        "  memory": "not told by ONNX Runtime" if memory is None else f"{human_bytes(memory)} available",
        "  operators": "its own" if provider["operators"] == "contrib" else "those of the ONNX standard",
        "  not usable": provider["reason"],
    }
    yield from _fields(fields)


def _fields(fields: dict[str, str | None]) -> Iterator[str]:
    yield from (f"{label:<16}{text}" for label, text in fields.items() if text is not None)
