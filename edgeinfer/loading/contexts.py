"""Contexts on disk for a model that is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from edgeinfer.backends.base import SegmentedSession, Session
from edgeinfer.common.errors import warn
from edgeinfer.common.sizes import parse_size
from edgeinfer.context_cache.cache import ContextCache, contexts_folder
from edgeinfer.context_cache.folder import SizedFolder
from edgeinfer.context_cache.model_content import ModelContent
from edgeinfer.loading.backend_choice import PlannedModel
from edgeinfer.loading.options import LoadOptions
from edgeinfer.models.gguf import ModelFile


def open_contexts(
    file: ModelFile, planned: PlannedModel, options: LoadOptions, session: Session
) -> ContextCache | None:
    """What keeps contexts on disk, None where nothing is to be kept or, with a RuntimeWarning, can be."""
    n_bytes = parse_size(options.cache_disk, "cache_disk", "the disk").n_bytes if options.cache_disk else None
    if n_bytes is None:
        return None
    if (reason := _obstacle(planned, options, session)) is None:
        path = contexts_folder()
        if path is None:
            reason = "this user has no home folder, set HOME or XDG_CACHE_HOME"
        else:
            folder = SizedFolder(path, n_bytes)
            try:
                folder.check()
                name = str(file.metadata.get("general.name") or file.path.stem)
                return ContextCache(folder, ModelContent(file), name, planned.plan.cache_type, _version())
            except (OSError, EOFError) as error:
                reason = f"{path}: {getattr(error, 'strerror', None) or error}"
    warn(f"contexts are not kept on disk: {reason}")
    return None


def _obstacle(planned: PlannedModel, options: LoadOptions, session: Session) -> str | None:
    """Why what a session holds cannot be kept."""
    if options.expert_device is not None:
        return "with a device for experts the text may be another each time"
    if planned.backend.name != "native" or not isinstance(session, SegmentedSession):
        return f"the {planned.backend.name} backend cannot do that"
    if session.segments is None:
        return "the model has recurrent layers, whose states are not kept"
    return None


def _version() -> str:
    try:
        return version("edgeinfer")
    except PackageNotFoundError:
        return "unknown"
