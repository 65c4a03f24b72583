"""Which drafters the value of `draft` names."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.common.errors import InvalidArgument

FREE_DRAFTERS = ("suffix", "answers", "recycling")  # those without a model


def drafters_named(draft: str | Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """(names of free drafters, file of a draft model or a head) that `draft` means.

    "auto": all free ones; the name of one: that one; a file: all free ones and it. A sequence: what it names. Raises
    InvalidArgument for two files.
    """
    if draft == "auto":
        return FREE_DRAFTERS, None
    if isinstance(draft, str):
        draft = (draft,) if draft in FREE_DRAFTERS else (*FREE_DRAFTERS, draft)
    files = [one for one in draft if one not in FREE_DRAFTERS]
    if len(files) > 1:
        raise InvalidArgument(f"only one draft model or head can draft: found {', '.join(files)}; leave one out")
    return tuple(name for name in FREE_DRAFTERS if name in draft), files[0] if files else None
