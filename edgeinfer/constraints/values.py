"""The Python value of a complete answer."""

from __future__ import annotations

import json

from edgeinfer.constraints.library import one_line
from edgeinfer.constraints.options import Wanted


def value_of(text: str, wanted: Wanted) -> tuple[object, str | None]:
    """(value, None), or (None, why there is none): of JSON, what it says, or the pydantic object; else the text."""
    if not wanted.is_json:
        return text, None
    try:
        return (json.loads(text) if wanted.model is None else wanted.model.model_validate_json(text)), None
    except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError: the model has own rules
        return None, one_line(error)
