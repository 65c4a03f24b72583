"""The packages of LiteRT: the schemas of their files and the runtime. No other file imports them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from edgeinfer.common.errors import BackendUnavailable

_PACKAGES = ("ai-edge-litert", "litert-lm-builder", "litert-lm-api")


@functools.cache
def open_schema() -> Any:
    """The schema of TFLite files, a class a table. Raises BackendUnavailable if its package is missing."""
    with _imports_explained():
        return importlib.import_module("ai_edge_litert.schema_py_generated")


@functools.cache
def open_header_schema() -> Any:
    """The schema of the header of .litertlm files. Raises BackendUnavailable as above."""
    with _imports_explained():
        return importlib.import_module("litert_lm_builder.litertlm_header_schema_py_generated")


@functools.cache
def open_messages() -> tuple[Any, Any]:
    """The protocol buffers LlmMetadata and ExecutorMetadata, as modules. Raises BackendUnavailable as above."""
    with _imports_explained():
        language = importlib.import_module("litert_lm_builder.runtime.proto.llm_metadata_pb2")
        return language, importlib.import_module("litert_lm_builder.runtime.proto.executor_metadata_pb2")


@functools.cache
def open_flatbuffers() -> Any:
    """The package flatbuffers, which packs tables of a schema. Raises BackendUnavailable as above."""
    with _imports_explained():
        return importlib.import_module("flatbuffers")


@functools.cache
def open_runtime() -> Any:
    """The runtime LiteRT-LM, quiet but for errors. Raises BackendUnavailable as above."""
    with _imports_explained():
        runtime = importlib.import_module("litert_lm")
    runtime.set_min_log_severity(runtime.LogSeverity.ERROR)
    return runtime


def versions() -> dict[str, str]:
    """Version of each package that is installed, by its name."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def _imports_explained() -> Iterator[None]:
    try:
        yield
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            f"files for LiteRT-LM need the packages {', '.join(_PACKAGES)} ({error}): pip install 'edgeinfer[litert]'"
        ) from error
