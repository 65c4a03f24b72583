"""A runtime of packages in a process of its own: one that crashes ends only that."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from edgeinfer.backends.driver_probe import interpreter
from edgeinfer.common.errors import BackendUnavailable, ModelFileError

_PATIENCE_SECONDS = 1800
# Runtimes in C++ write to stdout too, before the answer or when the process ends: they get stderr in its place.
_BEGUN = "import json, os, sys; out = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1)"
_ANSWERED = "json.dump(asked.answer(json.load(sys.stdin)), out); out.close()"


def ask_runtime(
    module: str, question: Mapping[str, Any], runtime: str, patience_seconds: int = _PATIENCE_SECONDS
) -> dict[str, Any]:
    """What answer(question) of a module gives in a process of its own, which a runtime that crashes ends alone.

    Both are JSON; what the runtime itself prints counts as stderr. An answer {"missing": reason} raises
    BackendUnavailable, {"error": reason}, a crash and an answer that does not come raise ModelFileError.
    """
    program = f"{_BEGUN}; import {module} as asked; {_ANSWERED}"
    command = [interpreter(), "-P", "-c", program]
    try:
        run = subprocess.run(
            command,
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",  # what a runtime prints may end within a character
            timeout=patience_seconds,
        )
    except subprocess.TimeoutExpired:
        raise ModelFileError(f"{runtime} did not answer within {patience_seconds} s: nothing was written") from None
    if run.returncode or not run.stdout.strip():
        words = " ".join(run.stderr.split())[-400:] or "without a word"
        raise ModelFileError(f"{runtime} ended with exit code {run.returncode} on the package: {words}")
    found: dict[str, Any] = json.loads(run.stdout)
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
