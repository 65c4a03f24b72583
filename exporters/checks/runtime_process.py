"""A runtime of packages in a process of its own: one that crashes ends only that."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from edgeinfer.backends.driver_probe import interpreter
from edgeinfer.errors import BackendUnavailable, ModelFileError

_PATIENCE_SECONDS = 1800


def ask_runtime(module: str, question: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """What answer(question) of a module gives in a process of its own, which a runtime that crashes ends alone.

    Both are JSON; the answer is the last line on stdout. An answer {"missing": reason} raises BackendUnavailable,
    {"error": reason}, a crash and an answer that does not come raise ModelFileError.
    """
    program = f"import json, sys, {module} as asked; print(json.dumps(asked.answer(json.load(sys.stdin))))"
    command = [interpreter(), "-P", "-c", program]
    try:
        run = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ModelFileError(f"{runtime} did not answer within {_PATIENCE_SECONDS} s: nothing was written") from None
    if run.returncode or not run.stdout.strip():
        words = " ".join(run.stderr.split())[-400:] or "without a word"
        raise ModelFileError(f"{runtime} ended with exit code {run.returncode} on the package: {words}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    if "missing" in found:
        raise BackendUnavailable(str(found["missing"]))
    if "error" in found:
        raise ModelFileError(f"{runtime} refuses the package: {found['error']}")
    return found


def peak_bytes() -> int | None:
    """Most memory that this process has had at once; None where the system does not say."""
    try:
        with open("/proc/self/status") as status:
            kib = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    return int(kib) << 10
