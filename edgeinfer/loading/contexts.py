"""Contexts on disk for a model that is loaded."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgeinfer.backends.base import SegmentedSession, Session
from edgeinfer.common.errors import warn
from edgeinfer.common.file_identity import identity_of
from edgeinfer.common.sizes import parse_size
from edgeinfer.context_cache.cache import ContextCache, contexts_folder
from edgeinfer.context_cache.folder import SizedFolder
from edgeinfer.context_cache.model_content import ModelContent
from edgeinfer.loading.backend_choice import PlannedModel
from edgeinfer.loading.options import LoadOptions
from edgeinfer.models.gguf import ModelFile

_AUTO_BYTES = 4 << 30
_AUTO_SHARE = 4  # of the free space, one of so many parts at most


def open_contexts(
    file: ModelFile, planned: PlannedModel, options: LoadOptions, session: Session
) -> ContextCache | None:
    """What keeps contexts on disk, None where nothing is to be kept or, with a RuntimeWarning, can be."""
    if not options.cache_disk:
        return None
    path, reason = contexts_folder(), _obstacle(planned, options, session)
    if path is None:
        reason = "this user has no home folder, set HOME or XDG_CACHE_HOME"
    elif reason is None:
        try:
            folder = SizedFolder(path, _most_bytes(options.cache_disk, path))
            folder.check()
            name = str(file.metadata.get("general.name") or file.path.stem)
            facts = _version(), _packed_identity(file)
            return ContextCache(folder, ModelContent(file), name, planned.plan.cache_type, facts)
        except (OSError, EOFError) as error:
            reason = f"{path}: {getattr(error, 'strerror', None) or error}"
    if options.cache_disk != "auto":
        warn(f"contexts are not kept on disk: {reason}")
    return None


def _most_bytes(requested: str | int, path: Path) -> int:
    """Bytes of all contexts on disk. Raises OSError."""
    n_bytes = parse_size(requested, "cache_disk", "the disk").n_bytes
    if n_bytes is not None:
        return n_bytes
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    kept = sum(file.n_bytes for file in SizedFolder(path, 0).files())
    return min(_AUTO_BYTES, (shutil.disk_usage(there).free + kept) // _AUTO_SHARE)


def _obstacle(planned: PlannedModel, options: LoadOptions, session: Session) -> str | None:
    """Why what a session holds cannot be kept."""
    if options.expert_device is not None:
        return "with a device for experts the text may be another each time"
    if planned.backend.name != "native" or not isinstance(session, SegmentedSession):
        return f"the {planned.backend.name} backend cannot do that"
    if session.segments is None:
        return "the model has recurrent layers, whose states are not kept"
    return None


def _packed_identity(file: ModelFile) -> tuple[int, ...] | None:
    """Of the packed weights that are used instead of the file's, whose bytes nobody compares; None without any."""
    from edgeinfer.backends.native.packing.packed import packed_path

    try:
        return tuple(identity_of(packed_path(file.paths[0]).stat()))
    except FileNotFoundError:
        return None


def _version() -> str:
    try:
        return version("edgeinfer")
    except PackageNotFoundError:
        return "unknown"
