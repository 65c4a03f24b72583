"""What was measured on this machine for a model, kept on disk as small JSON files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.gguf import ModelFile


def key_of(file: ModelFile, *facts: object) -> str:
    """Name of a measurement: of the model and whatever else it depends on.

    The shapes and types of the tensors stand for the model: fine-tunes of one model share what was measured.
    """
    tensors = sorted((info.name, info.shape, info.type.name) for info in file.tensors.values())
    return hashlib.sha256(repr((tensors, facts)).encode()).hexdigest()[:32]


def folder_of(kind: str) -> Path | None:
    """Where measurements of one kind are kept, None where the user has no folder for caches."""
    import platformdirs

    with contextlib.suppress(RuntimeError, OSError):  # newer versions raise where there is no home folder
        return platformdirs.user_cache_path("edgeinfer") / kind
    return None


def read_record(kind: str, key: str) -> Any:
    """What was kept, None if there is nothing that can be read."""
    folder = folder_of(kind)
    if folder is None:
        return None
    try:
        return json.loads((folder / f"{key}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def keep_record(kind: str, key: str, record: Mapping[str, Any]) -> None:
    """Keep it, whole or not at all. Where nothing can be written, it is measured again the next time."""
    folder = folder_of(kind)
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(record, file)
            Path(name).replace(folder / f"{key}.json")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
