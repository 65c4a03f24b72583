"""The library llama_cpp, its log, and what it says of failures. No other file imports it."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from edgeinfer.errors import BackendUnavailable, BudgetExceeded, UnsupportedModel

VERSION = "0.3.36"  # of llama-cpp-python, as in pyproject.toml
LIBRARY_VERSION = b"0.5.0-dev"  # of the llama.cpp in it

_logger = logging.getLogger(__package__)
_logger.addHandler(logging.NullHandler())

_DEBUG, _ERROR = 1, 4  # enum ggml_log_level


class Log(threading.local):
    """Takes what llama.cpp logs; each thread sees its own lines."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] | None = None

    @contextmanager
    def record(self) -> Iterator[list[tuple[int, str]]]:
        """Lines (level, text) that this thread has logged meanwhile, but for DEBUG."""
        lines: list[tuple[int, str]] = []
        self._lines = lines
        try:
            yield lines
        finally:
            self._lines = None

    def receive(self, level: int, text: bytes, _: object) -> None:
        """A ggml_log_callback."""
        line = text.decode(errors="replace").rstrip()
        _logger.debug("%s", line)
        if self._lines is not None and level > _DEBUG:
            self._lines.append((level, line))


log = Log()
_callbacks: list[Any] = []  # llama.cpp calls them for as long as the process lives


def quote(lines: list[tuple[int, str]]) -> str:
    """What llama.cpp gave as the reason of a failure."""
    errors = [line for level, line in lines if level == _ERROR and not line.endswith(": failed to load model")]
    return errors[-1] if errors else "it gives no reason"


def refuse(path: Path, lines: list[tuple[int, str]]) -> NoReturn:
    """Raise what llama.cpp's reason for not loading a model means: BudgetExceeded, else UnsupportedModel."""
    reason = quote(lines)
    if "alloc" in reason:
        raise BudgetExceeded(f"{path}: llama.cpp found too little memory: {reason}")
    raise UnsupportedModel(f"{path}: llama.cpp cannot load this model: {reason}")


def mebibytes(line: tuple[int, str], what: str) -> int:
    """Bytes of "what = 1.25 MiB" in a line of the log, 0 if it does not say that."""
    match = re.search(what + r" = +([0-9.]+) MiB", line[1])
    return round(float(match[1]) * 2**20) if match else 0


_FIELDS = {
    "llama_batch": "n_tokens token embd pos n_seq_id seq_id logits",
    "llama_model_params": "devices n_gpu_layers load_mode progress_callback no_alloc",
    "llama_context_params": (
        "n_ctx n_batch n_ubatch n_seq_max n_outputs_max n_threads n_threads_batch abort_callback abort_callback_data "
        "offload_kqv op_offload swa_full kv_unified"
    ),
}


def _check_layouts(library: Any) -> None:
    """Raises BackendUnavailable if structures could lie otherwise in memory than this file and llama_cpp assume.

    llama_cpp describes the structures of the library that it comes with; it is another library, or lacks a field.
    """
    found = getattr(library, "__version__", "of no version")
    lacking = [
        f"{structure}.{name}"
        for structure, names in _FIELDS.items()
        for name in names.split()
        if not hasattr(getattr(library, structure, None), name)
    ]
    if lacking:
        raise BackendUnavailable(
            f"the llama.cpp backend wants llama-cpp-python {VERSION}; found {found}, which lacks {', '.join(lacking)}: "
            "pip install 'edgeinfer[llama]'"
        )
    elsewhere = os.environ.get("LLAMA_CPP_LIB_PATH")
    if elsewhere is not None and library.llama_version() != LIBRARY_VERSION:
        raise BackendUnavailable(
            f"LLAMA_CPP_LIB_PATH={elsewhere} has llama.cpp {library.llama_version().decode()}; llama-cpp-python "
            f"{VERSION} wants {LIBRARY_VERSION.decode()}: unset it"
        )


@functools.cache
def open_library() -> Any:
    """The module llama_cpp, ready for use. Raises BackendUnavailable if it is missing, broken or another version."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # where llama.cpp ends the process, it would start a debugger first
    try:
        library = importlib.import_module("llama_cpp")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"the llama.cpp backend needs llama-cpp-python ({error}): pip install 'edgeinfer[llama]'"
        ) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendUnavailable(f"llama-cpp-python cannot be loaded: {error}; install it anew") from error
    _check_layouts(library)
    _callbacks.append(library.llama_log_callback(log.receive))
    library.llama_log_set(_callbacks[-1], None)
    library.llama_backend_init()
    return library
