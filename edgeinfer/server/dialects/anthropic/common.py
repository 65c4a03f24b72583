"""Parts of Anthropic's replies that several of them have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeinfer.completion import Completion
from edgeinfer.engine import Engine
from edgeinfer.server.exchange import Exchange, encoded
from edgeinfer.server.problem import Problem

EVENTS = "text/event-stream; charset=utf-8"
_KINDS = {"server_error": "api_error", "not_supported_error": "invalid_request_error"}


def event(kind: str, **content: Any) -> bytes:
    """An event of a stream."""
    return b"event: " + kind.encode() + b"\ndata: " + encoded({"type": kind, **content}) + b"\n\n"


PING = event("ping")


def error_of(exchange: Exchange, problem: Problem) -> dict[str, Any]:
    """An error as Anthropic writes it."""
    kind = _KINDS.get(problem.kind, problem.kind)
    return {"type": "error", "error": {"type": kind, "message": problem.message}, "request_id": exchange.id}


def end_of(reason: str | None, met: str | None) -> dict[str, Any]:
    """What says why a message ended; None while it goes on.  met: the stop sequence."""
    return {"stop_reason": reason, "stop_sequence": met, "stop_details": None}


def met_stop(engine: Engine, completion: Completion, stops: Sequence[str]) -> str | None:
    """The stop sequence that ended a text, None where something else did."""
    if completion.finish_reason != "stop" or not stops:
        return None
    emitted = engine.detokenize(completion.tokens)
    found = [(place, stop) for stop in stops if (place := emitted.rfind(stop)) >= 0]
    return min(found)[1] if found else None


def stop_reason(completion: Completion, has_calls: bool, met: str | None) -> str:
    """Why a text ended."""
    if completion.finish_reason in ("length", "repetition", "timeout"):
        return "max_tokens"
    if met is not None:
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"
