"""Checks of arguments of public functions.

Each check returns the value as Python's own type, so numpy's numbers are accepted, or raises InvalidArgument. Below
them: how values and bytes are written in messages.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.files import expanded

MAX_INT32 = (1 << 31) - 1


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """The value as an int in least..most."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]  # what is none raises TypeError
    except TypeError:
        found = least - 1
    if isinstance(value, bool) or found < least or (most is not None and found > most):
        wanted = f"of at least {least}" if most is None else f"in {least}..{most}"
        raise InvalidArgument(f"{name} must be an integer {wanted}: found {shown(value)}")
    return found


def check_number(name: str, value: object, least: float, most: float) -> float:
    """The value as a float in least..most; NaN is none."""
    found = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # of an integer that no float holds
            found = float(value)
    if not least <= found <= most:
        raise InvalidArgument(f"{name} must be a number in {least:g}..{most:g}: found {shown(value)}")
    return found


def check_text(name: str, value: object) -> str:
    """The value, a str."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a text (str): found {shown(value)}")
    return value


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """The value, one of these names."""
    if check_text(name, value) not in choices:
        *others, last = choices
        raise InvalidArgument(f"{name} must be {', '.join(others)} or {last}: found {value!r:.80}")
    return str(value)


def check_file_name(name: str, value: object) -> Path:
    """The file that a caller names, not empty; ~ and ~user are home folders, and ./~ is a file of that name."""
    if not isinstance(value, (str, os.PathLike)) or not os.fsdecode(value):
        raise InvalidArgument(f"{name} must be the name of a file: found {shown(value)}")
    given = os.fsdecode(value)
    if "\0" in given:
        raise InvalidArgument(f"{name} must be the name of a file, which has no null character: found {shown(given)}")
    try:
        return expanded(given)
    except OSError as error:
        raise InvalidArgument(f"{name} {given}: there is no working directory: {error.strerror}") from None
    except LookupError as error:
        raise InvalidArgument(f"{name} {given}: {error}; a file that is called so is ./{given}") from None


def check_flag(name: str, value: object) -> None:
    """Checks that the value is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be True or False: found {shown(value)}")


def check_callback(name: str, value: object) -> None:
    """Checks that the value is None or can be called."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name} must be a function or None: found {shown(value)}")


def shown(value: object) -> str:
    """A value in an error message, short."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no integers of thousands of digits
        return f"{type(value).__name__} with very many digits"


def human_bytes(n_bytes: int) -> str:
    """Bytes in a unit that leaves one to three digits before the point: "812 B", "3.2 GiB"."""
    value, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
