"""The manifest of an export: what was read, what was written, and by what; the same input gives the same bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edgeinfer.common.files import file_sha256, write_whole
from edgeinfer.exporters.request import Plan, Request, Result

NAME = "manifest.json"  # in the folder of a package; beside a single file its name stands in front
_PATTERNS = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")  # what is read of a checkpoint


def manifest_path(out: Path) -> Path:
    """Where the manifest of an output lies."""
    return out / NAME if out.is_dir() else out.with_name(f"{out.name}.{NAME}")


def read_records(request: Request) -> Mapping[str, Any]:
    """What the manifest says of the files that an export reads, taken before it writes. Raises OSError."""
    read = {"imatrix": request.imatrix, "calibration": request.calibration, "draft": request.draft, **request.more}
    records = {name: record(path) for name, path in read.items() if isinstance(path, Path) and path.is_file()}
    return {"source": [record(path) for path in source_files(request.source)], **records}


def write_manifest(target: str, request: Request, plan: Plan, result: Result, read: Mapping[str, Any]) -> Path | None:
    """Write the manifest of an export, and give its path; None where the output is no file. Raises OSError.

    read: what read_records gave before.
    """
    if not all(path.is_file() for path in result.files):  # a pipe or a device
        return None
    path = manifest_path(request.out)
    content = manifest(target, request, plan, result, read)
    write_whole(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    return path


def manifest(target: str, request: Request, plan: Plan, result: Result, read: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the manifest says. Files have names without folders, so that it is the same wherever they lie."""
    content: dict[str, Any] = {
        "target": target,
        "files": [record(path, request.out) for path in result.files],
        "options": _options(request),
        "types": dict(sorted(Counter(tensor.written.name for tensor in plan.tensors).items())),
        "tensors": {tensor.name: tensor.written.name for tensor in plan.tensors},
        "planned": {"peak_bytes": plan.peak_bytes},
        "notes": list(plan.notes),
        "check": result.check,
        "tool": {"edgeinfer": tool_version()},
    }
    return {**content, **read, **result.facts}


def record(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Name, bytes and sha256 of a file. folder: that the name is relative to, where the file lies in it."""
    inside = folder is not None and path != folder and path.is_relative_to(folder)
    name = path.relative_to(folder).as_posix() if inside and folder is not None else path.name
    return {"name": name, "n_bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(path: Path) -> str:
    """Hash of a file's bytes, read some at a time, and once while the file stays as it is."""
    stat = path.stat()
    return _sha256(path.resolve(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _sha256(path: Path, n_bytes: int, changed: int) -> str:
    return file_sha256(path)


def source_files(source: Path) -> list[Path]:
    """The files of a source: the parts of a GGUF file, or those of a checkpoint's folder."""
    if source.is_dir():
        found = {path for pattern in _PATTERNS for path in source.glob(pattern) if path.is_file()}
        return sorted(path for path in found if not path.name.endswith(NAME))  # of exports into this folder
    from edgeinfer.models.gguf import ModelFile

    with ModelFile.open(source) as file:
        return list(file.paths)


def tool_version(name: str = "edgeinfer") -> str:
    """Version of an installed package, "unknown" where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _options(request: Request) -> dict[str, Any]:
    named: Iterable[tuple[str, Any]] = (
        ("type", request.type),
        ("imatrix", request.imatrix),
        ("size", request.size),
        ("fit", request.fit),
        ("cost", request.cost),
        ("n_ctx", request.n_ctx),
        ("draft", request.draft),
        *sorted(request.more.items()),
    )
    return {name: value.name if isinstance(value, Path) else value for name, value in named if value is not None}
