"""Parts of Ollama's replies that several of them have."""

from __future__ import annotations

import hashlib
import re
import time
from datetime import UTC, datetime
from typing import Any

from edgeinfer.completion import Completion, FinishReason
from edgeinfer.server.about import About
from edgeinfer.server.exchange import Exchange, encoded
from edgeinfer.server.problem import Problem

VERSION = "0.13.0"  # whose interface this is: clients refuse older ones
LINES = "application/x-ndjson"
FOREVER = 100 * 365 * 86400  # seconds
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")


def line(content: Any) -> bytes:
    """A line of a stream."""
    return encoded(content) + b"\n"


def error_of(exchange: Exchange, problem: Problem) -> dict[str, Any]:
    """An error as Ollama writes it."""
    return {"error": problem.message}


def moment(seconds: float | None = None) -> str:
    """A time as Ollama writes it; None is now."""
    found = datetime.fromtimestamp(min(time.time() if seconds is None else seconds, 253402300799), UTC)
    return found.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"


def tagged(id: str) -> str:
    """A name with a tag, as Ollama's have."""
    return id if ":" in id.rpartition("/")[2] else f"{id}:latest"


def digest(id: str, about: About) -> str:
    """Hexadecimal digits that differ where models do."""
    return hashlib.sha256(f"{id} {about.n_bytes} {about.modified}".encode(errors="replace")).hexdigest()


def details(about: About) -> dict[str, Any]:
    """What a list of models says of one."""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": about.architecture,
        "families": [about.architecture],
        "parameter_size": about.size,
        "quantization_level": about.quantisation,
    }


def done_reason(reason: FinishReason) -> str:
    """Why a text ended."""
    return "stop" if reason in ("stop", "interrupted") else "length"


def figures(completion: Completion, started: float) -> dict[str, Any]:
    """Numbers and times of an answer, in nanoseconds.  started: by time.monotonic."""
    timings = completion.timings

    def nanoseconds(seconds: float) -> int:
        return int(1e9 * seconds)

    return {
        "total_duration": nanoseconds(time.monotonic() - started),
        "load_duration": 0,
        "prompt_eval_count": completion.usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(timings.prompt_seconds),
        "eval_count": completion.usage.completion_tokens,
        "eval_duration": nanoseconds(timings.decode_seconds),
    }


def keep_seconds(value: object) -> float | None:
    """keep_alive: seconds, or a text such as "5m"; below 0 for ever. None where it is not given. Raises Problem."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return FOREVER if value < 0 else float(value)
    text = value.strip() if isinstance(value, str) else ""
    bare = text.removeprefix("-")
    if re.fullmatch(r"\d+", bare):
        seconds = float(bare)
    elif "".join(part[0] for part in _PART.finditer(bare)) == bare and bare:
        seconds = sum(float(part[1]) * _UNITS[part[2]] for part in _PART.finditer(bare))
    else:
        raise Problem(400, f'keep_alive must be seconds or a text such as "5m": found {str(value)[:40]!r}')
    return FOREVER if text.startswith("-") else seconds
