"""JSON that a stranger wrote: an object, no key with two values, no NaN."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from edgeinfer.common.errors import ModelFileError

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parsed(text: bytes, where: str, nan: bool = False) -> dict[str, Any]:
    """The object in a text in UTF-8. where: begins the message of an error.  nan: whether NaN may stand in it.

    Raises ModelFileError.
    """
    constant = float if nan else _constant
    try:
        found = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=constant)
        if _HALF.search(text):  # half a character, as "\\ud800", which no file can have
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: no JSON: {error!s:.200}") from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{where}: must be a JSON object: found {type(found).__name__}")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"the key {key!r:.80} stands there twice, with different values")
        found[key] = value
    return found


def _constant(name: str) -> float:
    """Python writes infinities, which some configurations hold; NaN is of no use."""
    if name == "NaN":
        raise ValueError("NaN is no number")
    return -math.inf if name.startswith("-") else math.inf
