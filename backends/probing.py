"""Libraries with drivers, asked in a process of its own: a driver that crashes or hangs ends only that."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

PATIENCE_SECONDS = 60  # some drivers compile for long when they do it first


def ask_apart(module: str, remedy: str) -> dict[str, Any]:
    """What as_json() of a module gives in a process of its own: an object with "devices", and the "reason" for none.

    remedy: what to do about a driver that does not answer.
    """
    command = [sys.executable, "-P", "-c", f"import {module} as probe; print(probe.as_json())"]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"devices": [], "reason": f"a driver did not answer within {PATIENCE_SECONDS} s; {remedy}"}
    if run.returncode:
        last_words = (run.stderr.strip().splitlines() or ["without a word"])[-1]
        reason = f"a driver ended the process that asked it (exit code {run.returncode}: {last_words})"
        return {"devices": [], "reason": f"{reason}; {remedy}"}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found
