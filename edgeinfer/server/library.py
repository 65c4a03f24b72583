"""The libraries starlette and uvicorn; no other file imports them."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from edgeinfer.common.errors import BackendUnavailable


@functools.cache
def open_uvicorn() -> ModuleType:
    """The module uvicorn. Raises BackendUnavailable if it is missing."""
    try:
        return importlib.import_module("uvicorn")
    except ImportError as error:
        raise _missing(error) from error


@functools.cache
def open_protocol() -> ModuleType:
    """uvicorn's module of HTTP/1.1. Raises BackendUnavailable if it is missing."""
    try:
        return importlib.import_module("uvicorn.protocols.http.h11_impl")
    except ImportError as error:
        raise _missing(error) from error


@functools.cache
def open_routing() -> ModuleType:
    """starlette's module of routes. Raises BackendUnavailable if it is missing."""
    try:
        return importlib.import_module("starlette.routing")
    except ImportError as error:
        raise _missing(error) from error


def _missing(error: ImportError) -> BackendUnavailable:
    return BackendUnavailable(
        f"the server needs the packages starlette and uvicorn ({error}): pip install 'edgeinfer[server]'"
    )
