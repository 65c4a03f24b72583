"""Which drafters the value of `draft` names."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.common.errors import InvalidArgument

MODEL_FREE = ("suffix", "answers", "recycling")  # those without a model
OWN_BLOCK = "mtp"  # the block that drafts in the model's own file; "auto" takes it where there is one


def drafters_named(draft: str | Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """(names of model-free drafters, file of a draft model or a head, or OWN_BLOCK) that `draft` means.

    "auto": all of them; the name of one: that one; a file or OWN_BLOCK: all of them and it. A sequence: what it names.
    Raises InvalidArgument for two files.
    """
    if draft == "auto":
        return MODEL_FREE, None
    if isinstance(draft, str):
        draft = (draft,) if draft in MODEL_FREE else (*MODEL_FREE, draft)
    files = [one for one in draft if one not in MODEL_FREE]
    if len(files) > 1:
        raise InvalidArgument(f"only one draft model or head can draft: found {', '.join(files)}; leave one out")
    return tuple(name for name in MODEL_FREE if name in draft), files[0] if files else None
