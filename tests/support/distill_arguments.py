"""Arguments of `edgeinfer distill` with the keys of its --config among them, as flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from edgeinfer.common.settings import options_of
from edgeinfer.training.recipe import Recipe


def with_config(arguments: Sequence[object], path: Path) -> list[str]:
    """The arguments, with --config for a file that is written here where keys are among them: --steps 2."""
    keys, rest = {}, []
    given = iter(map(str, arguments))
    for argument in given:
        name = argument.removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in options_of(Recipe):
            keys[name] = _value(name, next(given))
        else:
            rest.append(argument)
    if not keys:
        return rest
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items()))
    return [*rest, "--config", str(path)]


def _value(name: str, text: str) -> object:
    default = options_of(Recipe)[name][0]
    return text if default is None else type(default)(text)
