"""Libraries with drivers, asked in a process of its own: a driver that crashes or hangs ends only that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from edgeinfer.common.errors import BackendUnavailable

PATIENCE_SECONDS = 60  # some drivers compile for long when they do it first


def interpreter() -> str:
    """The file of the Python that runs here. Raises BackendUnavailable where there is none to start.

    `sys.executable` is another program, or empty, where Python is a part of one.
    """
    own = sys.executable or ""
    is_python = "python" in os.path.basename(own).lower() and not getattr(sys, "frozen", False)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = [os.path.join(prefix, "bin", name) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)]
    for path in ([own] if is_python else []) + installed:
        if os.access(path, os.X_OK):
            return path
    raise BackendUnavailable(
        f"no process of Python can be started: sys.executable is {own!r}, no Python, and there is no {installed[0]}; "
        "set sys.executable to the file of a Python"
    )


def ask_apart(module: str, remedy: str) -> dict[str, Any]:
    """What as_json() of a module gives in a process of its own: an object with "devices", and the "reason" for none.

    remedy: what to do about a driver that does not answer.
    """
    try:
        command = [interpreter(), "-P", "-c", f"import {module} as probe; print(probe.as_json())"]
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
    except BackendUnavailable as error:
        return {"devices": [], "reason": str(error)}
    except subprocess.TimeoutExpired:
        return {"devices": [], "reason": f"a driver did not answer within {PATIENCE_SECONDS} s; {remedy}"}
    if run.returncode:
        last_words = (run.stderr.strip().splitlines() or ["without a word"])[-1]
        reason = f"a driver ended the process that asked it (exit code {run.returncode}: {last_words})"
        return {"devices": [], "reason": f"{reason}; {remedy}"}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found
