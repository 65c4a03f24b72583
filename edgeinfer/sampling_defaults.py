"""Default sampling parameters of a request: the file's, those of a known model, or the general ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, cast

import numpy as np

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.models.gguf import ModelFile
from edgeinfer.sampling import SamplingOptions, SamplingParams

_KEY = "general.sampling."
# For SmolLM2-135M-Instruct its authors advise temperature 0.2 and top_p 0.9, and the code on its card has top_k 50.
# With these alone half of the answers end in a loop; docs/sampling.md has the effect of the penalty.
_SMOLLM2 = SamplingOptions(temperature=0.2, top_k=50, top_p=0.9, min_p=0.0, repeat_penalty=1.1)
_OF_MODELS: dict[tuple[str, str], SamplingOptions] = {("smollm2", "135m"): _SMOLLM2}  # by general.basename, size_label
_KEYS = {  # of the file, and the fields that they are
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "penalty_last_n",
    "penalty_repeat": "repeat_penalty",
}
_OFF = {"xtc_probability": 0, "mirostat": 0}  # of steps that do not exist here, with the values that switch them off
# What llama.cpp calls the steps of a chain, in the order of ours, and the fields that switch them off.
_STEPS: dict[str, SamplingOptions] = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
_OTHER_STEPS = {"top_n_sigma", "typ_p", "typical_p", "xtc", "infill", "adaptive_p"}  # they do nothing by default


def default_params(file: ModelFile) -> tuple[SamplingParams, list[str]]:
    """The parameters for requests that give none, and which of the file's are not used, with the reason.

    The file's are llama.cpp's keys general.sampling.*. For what is missing there, those of a known model apply, then
    the general defaults.
    """
    basename, size = (str(file.metadata.get(f"general.{key}", "")).lower() for key in ("basename", "size_label"))
    found, ignored = _of_file(file.metadata)
    return SamplingParams().changed(_OF_MODELS.get((basename, size), {})).changed(found), ignored


def _of_file(metadata: Mapping[str, Any]) -> tuple[SamplingOptions, list[str]]:
    """What the keys general.sampling.* say, and those that are not used, each with the reason."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for key, name in _KEYS.items():
        value = metadata.get(_KEY + key)
        if value is None:
            continue
        try:
            given: dict[str, Any] = {name: _read(name, value)}
            found[name] = getattr(SamplingParams(**given), name)
        except InvalidArgument as error:
            ignored.append(f"{_KEY}{key}: {error}")
    for key, off in _OFF.items():
        value = metadata.get(_KEY + key, off)
        if not isinstance(value, Real) or value != off:
            ignored.append(f"{_KEY}{key}: there is no such step: found {shown(value)}")
    sequence = metadata.get(f"{_KEY}sequence")
    if sequence is not None:
        try:
            found |= _steps_off(sequence)
        except InvalidArgument as error:
            ignored.append(f"{_KEY}sequence: {error}")
    return cast(SamplingOptions, found), ignored


def _read(name: str, value: object) -> object:
    """The value as its author wrote it: 0.7, not the float32 next to it; a whole number where one is wanted."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return value  # which is refused
    with np.errstate(over="ignore"):  # what no float32 holds is infinite, and refused
        number = value if isinstance(value, int) else float(str(np.float32(value)))
    if name in ("temperature", "top_k", "min_p") and -math.inf < number < 0:
        return 0  # as llama.cpp takes it: greedy, all, off
    if name == "top_p" and 1 < number < math.inf:
        return 1.0
    return int(number) if isinstance(getattr(SamplingParams(), name), int) and float(number).is_integer() else number


def _steps_off(sequence: object) -> dict[str, Any]:
    """The fields that switch off the steps which a file's chain lacks. Raises InvalidArgument for another chain."""
    names = sequence.split(";") if isinstance(sequence, str) else []
    if not names or not {*names} <= _STEPS.keys() | _OTHER_STEPS:
        raise InvalidArgument(f"it must be steps of llama.cpp with ; between them: found {shown(sequence)}")
    known = [name for name in names if name in _STEPS]
    if known != [name for name in _STEPS if name in known]:
        raise InvalidArgument(f"the order of steps is always {';'.join(_STEPS)}: found {shown(sequence)}")
    return {name: value for step, off in _STEPS.items() if step not in names for name, value in off.items()}
