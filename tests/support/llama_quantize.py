"""llama.cpp's own quantisation, by ctypes: the types that it chooses, and the files that it writes. Needs llama_cpp."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_LINE = re.compile(r"\]\s+(\S+)\s+-\s+\[[^\]]*\], type =\s+(\w+), size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\w+)\))?\n")


def chosen_types(path: Path, number: int, imatrix: Mapping[str, np.ndarray] | None = None) -> dict[str, str]:
    """The type of each tensor, as GGUF names it, that llama.cpp would write for a file type, by its number."""
    log = _run(path, Path("unused"), number, imatrix, dry_run=True)
    return {name: (new or old).upper() for name, old, new in _LINE.findall(log)}


def quantized(path: Path, out: Path, number: int, imatrix: Mapping[str, np.ndarray] | None = None) -> Path:
    """Let llama.cpp write a file, and give its path."""
    _run(path, out, number, imatrix, dry_run=False)
    return out


def _run(path: Path, out: Path, number: int, imatrix: Mapping[str, np.ndarray] | None, dry_run: bool) -> str:
    from llama_cpp import llama_cpp as lib

    parts: list[bytes] = []
    callback = lib.llama_log_callback(lambda level, text, data: parts.append(text))
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.dry_run, params.nthread = number, True, dry_run, 1
    entries = _entries(lib, imatrix or {})
    if imatrix is not None:
        params.imatrix = entries
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        failed = lib.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params))
    finally:
        silent = _silent(lib)
        lib.llama_log_set(silent, ctypes.c_void_p(0))
    log = b"".join(parts).decode()
    if failed:
        raise RuntimeError(log)
    return log


_KEPT: list[Any] = []  # callbacks that llama.cpp may still call


def _silent(lib: Any) -> Any:
    if not _KEPT:
        _KEPT.append(lib.llama_log_callback(lambda level, text, data: None))
    return _KEPT[0]


def _entries(lib: Any, imatrix: Mapping[str, np.ndarray]) -> Any:
    entries = (lib.llama_model_imatrix_data * (len(imatrix) + 1))()
    for entry, (name, values) in zip(entries, imatrix.items(), strict=False):
        data = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        entry.name, entry.size = name.encode(), data.size
        entry.data = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.kept = data  # for as long as the entries are there
    return entries
