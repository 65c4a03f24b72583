"""generation_config.json: what a model advises for sampling, and what ends its answers. What is no use is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import ModelFileError
from edgeinfer.exporters.checkpoint.folder import Folder
from edgeinfer.exporters.checkpoint.json_text import parsed

NAME = "generation_config.json"
_MOST = (1 << 31) - 1
_SAMPLING = {  # as llama.cpp calls them, with the least and the most
    "top_k": ("top_k", 0, _MOST),
    "top_p": ("top_p", 0.0, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "temperature": ("temp", 0.0, 1e6),
    "repetition_penalty": ("penalty_repeat", 1e-6, 1e6),
}


@dataclass
class Generation:
    """What the file says.

    sampling: by llama.cpp's words, temp for temperature and so on.  ends: ids of the tokens that end an answer.
    notes: a sentence for each value that is left out, with its key.
    """

    sampling: dict[str, int | float] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_generation(folder: Folder) -> Generation:
    """What the file of a folder says, nothing where there is none."""
    found = Generation()
    if NAME not in folder:
        return found
    try:
        values = parsed(folder.text(NAME), NAME, nan=True)
    except ModelFileError as error:
        found.notes.append(f"{str(error).removeprefix(f'{folder.path}/')}: nothing of it is used")
        return found
    _read_sampling(values, found)
    _read_ends(values, found)
    return found


def _read_sampling(values: Mapping[str, Any], found: Generation) -> None:
    for key, (ours, least, most) in _SAMPLING.items():
        value, whole = values.get(key), isinstance(least, int)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            found.notes.append(_left_out(key, value, f"a number in {least}..{most}"))
        elif whole and value != int(value):
            found.notes.append(_left_out(key, value, f"a whole number in {least}..{most}"))
        else:
            found.sampling[ours] = int(value) if whole else float(value)


def _read_ends(values: Mapping[str, Any], found: Generation) -> None:
    value = values.get("eos_token_id")
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(each, bool) or not isinstance(each, int) or each < 0:
            found.notes.append(_left_out("eos_token_id", each, "a token id, or a list of some"))
            if len(found.notes) > 8:  # of a list without end
                return
        else:
            found.ends.append(each)


def _left_out(key: str, value: object, wanted: str) -> str:
    return f"{NAME}: {key} must be {wanted}: found {shown(value)}, which is left out"
