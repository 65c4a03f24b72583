"""A model loaded in a process of its own, its context filled: what it takes and how fast it is, against the profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from edgeinfer.backends.driver_probe import interpreter
from edgeinfer.common import errors
from edgeinfer.common.errors import BackendLost, EdgeInferError
from edgeinfer.loading.options import LoadOptions
from edgeinfer.memory.budget import Item, Ledger

if TYPE_CHECKING:
    from edgeinfer.profiler.report import Profile

_RUN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from edgeinfer.profiler.verify_child import main; main()"
)
_LAST_LINES = 400  # characters of what a process says before it ends


@dataclass(frozen=True)
class Measured:
    """A speed.  unit: "tokens/s", or "s" until the first token.  n_past: tokens before those that were timed."""

    name: str
    unit: str
    n_past: int
    expected: float
    measured: float

    @property
    def error(self) -> float:
        """Expected over measured, less 1."""
        return self.expected / self.measured - 1.0


@dataclass(frozen=True)
class Verification:
    """What was planned and taken, and how fast it was.

    ledger: as that process planned it before it loaded anything, with what it took.  n_tokens: in its context.
    was_disturbed: other processes had the cores meanwhile, so it can be faster.
    """

    ledger: Ledger
    n_tokens: int
    speeds: tuple[Measured, ...]
    was_disturbed: bool = False

    @property
    def error(self) -> float | None:
        """Planned peak over the peak that was taken, less 1; None where the system does not tell."""
        return self.ledger.peak / self.ledger.peak_taken - 1.0 if self.ledger.peak_taken else None

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        speeds = [vars(of) | {"error": of.error} for of in self.speeds]
        found = {"ledger": self.ledger.as_json(), "n_tokens": self.n_tokens, "error": self.error, "speeds": speeds}
        return found | {"was_disturbed": self.was_disturbed}


def verified(profile: Profile, options: LoadOptions) -> Verification:
    """Load the model of a profile as it says, in a process of its own, and compare.

    Raises what `load` raises there, BackendLost where the process is ended from outside, as for lack of memory, and
    BackendUnavailable where no Python can be started.
    """
    given = {of.name: getattr(options, of.name) for of in fields(options) if of.name != "progress"}
    settings = profile.settings
    given |= {"n_ctx": settings.n_ctx, "backend": profile.backend, "draft": settings.draft}
    if settings.expert_cache is not None:
        given["expert_cache"] = settings.expert_cache
    asked = {"path": str(profile.path), "options": given, "prompt_tokens": profile.speed.prompt_tokens}
    path = json.dumps([os.path.abspath(folder) for folder in sys.path])  # the modules that this process finds
    command = [interpreter(), "-P", "-c", _RUN, path]
    process = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    return _verification(profile, _reply_of(process))


def _reply_of(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the process found. Raises what it raised."""
    try:
        reply: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = process.stderr.strip()[-_LAST_LINES:]
        raise BackendLost(
            f"the process that verifies ended with code {process.returncode}: {said or 'it said nothing'}"
        ) from None
    if "error" in reply:
        kind = getattr(errors, reply["error"], EdgeInferError)
        error = EdgeInferError.__new__(kind)  # some take more than a message
        error.args = (reply["message"],)
        raise error
    return reply


def _verification(profile: Profile, reply: dict[str, Any]) -> Verification:
    items = [
        Item(item["purpose"], item["planned"], item["taken"], item["mapped"], item["detail"])
        for item in reply["ledger"]["items"]
    ]
    ledger = reply["ledger"]
    taken = Ledger(tuple(items), ledger["loading"], ledger["taken"], ledger["peak_taken"])
    return Verification(taken, reply["n_tokens"], tuple(_speeds(profile, reply["speeds"])), reply["was_disturbed"])


def _speeds(profile: Profile, speeds: list[dict[str, Any]]) -> Iterator[Measured]:
    """Each measured speed beside the expected one; those of answers that ended at once are left out."""
    for of in speeds:
        speed = profile.speeds.speed(profile.settings, profile.planned, of["n_past"], max(1, of["n_prompt"]))
        expected = speed.tokens_per_second
        if of["unit"] == "s":
            expected = speed.first_token_seconds
        elif of["is_drafted"] and speed.drafted is not None:
            expected = speed.drafted.tokens_per_second
        if of["measured"] > 0:
            yield Measured(of["name"], of["unit"], of["n_past"], expected, of["measured"])
