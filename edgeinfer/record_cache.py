"""What was measured on this machine for a model, kept on disk as small JSON files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgeinfer.common.files import cache_folder, write_whole
from edgeinfer.models.gguf import ModelFile


def record_key(file: ModelFile, *facts: object) -> str:
    """Name of a measurement: of the model and whatever else it depends on.

    The shapes and types of the tensors stand for the model: fine-tunes of one model share what was measured.
    """
    stored = (info for info in file.tensors.values() if not file.makes(info.name))
    tensors = sorted((info.name, info.shape, info.type.name) for info in stored)
    return record_name(tensors, facts)


def record_name(*facts: object) -> str:
    """Name of a measurement that depends on these facts, and on no model."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def record_folder(kind: str) -> Path | None:
    """Where measurements of one kind are kept, None where the user has no folder for caches."""
    folder = cache_folder()
    return None if folder is None else folder / kind


def read_record(folder: Path | None, key: str) -> Any:
    """What was kept, None if there is nothing that can be read."""
    if folder is None:
        return None
    try:
        return json.loads((folder / f"{key}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_record(folder: Path | None, key: str, record: Mapping[str, Any]) -> None:
    """Keep it, written atomically. Where nothing can be written, it is measured again the next time."""
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{key}.json", json.dumps(record).encode(), durable=False)
