"""The JSON of a request, within limits of size, depth and memory."""

from __future__ import annotations

import json
from typing import Any

from edgeinfer.common.arguments import shown
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem


def parse(data: bytes, limits: Limits) -> dict[str, Any]:
    """The object of a body. Raises Problem."""
    if data.count(b"[") + data.count(b"{") > limits.containers:
        raise Problem(400, f"the body may have {limits.containers} lists and objects: found more")
    try:
        content = json.loads(data.decode(), parse_constant=_refuse)
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise Problem(400, f"the body must be JSON in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise Problem(400, f"the body must be a JSON object: found {shown(content)}")
    _check_depth(content, limits)
    return content


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _too_deep(limits: Limits) -> Problem:
    return Problem(400, f"the body may be nested {limits.depth} deep: found more")


def _check_depth(content: Any, limits: Limits) -> None:
    """Raises Problem where lists and objects lie deeper in one another than they may."""
    level = [content]
    for _ in range(limits.depth):
        level = [
            part
            for each in level
            for part in (each.values() if isinstance(each, dict) else each)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(limits)
