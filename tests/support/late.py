"""Libraries that are imported when they are first used, so that --help of a script needs none of them."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """A library, or what it has by the name of `attribute`."""

    def __init__(self, library: str, attribute: str | None = None) -> None:
        self._library, self._attribute = library, attribute

    def _found(self) -> Any:
        module = importlib.import_module(self._library)
        return module if self._attribute is None else getattr(module, self._attribute)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._found()(*arguments, **options)
