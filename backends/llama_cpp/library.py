"""The library llama_cpp; no other file imports it, and no process but that of server.py opens it."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from edgeinfer.backends.llama_cpp.log import listen
from edgeinfer.common.errors import BackendUnavailable
from edgeinfer.common.signal_handlers import is_from_handler

VERSION = "0.3.36"  # of llama-cpp-python, as in pyproject.toml
LIBRARY_VERSION = b"0.5.0-dev"  # of the llama.cpp in it


_FIELDS = {
    "llama_batch": "n_tokens token embd pos n_seq_id seq_id logits",
    "llama_model_params": "devices n_gpu_layers load_mode progress_callback no_alloc use_extra_bufts",
    "llama_context_params": (
        "n_ctx n_batch n_ubatch n_seq_max n_outputs_max n_threads n_threads_batch abort_callback abort_callback_data "
        "offload_kqv op_offload swa_full kv_unified"
    ),
}


def _check_layouts(library: Any) -> None:
    """Raises BackendUnavailable if structures could lie otherwise in memory than this backend and llama_cpp assume.

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
        if is_from_handler(error):
            raise
        raise BackendUnavailable(f"llama-cpp-python cannot be loaded: {error}; install it anew") from error
    _check_layouts(library)
    listen(library)
    library.llama_backend_init()
    return library
