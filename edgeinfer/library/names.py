"""From what a caller names, a file, a model of this machine or one of the hub, to the file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from edgeinfer.common.arguments import check_file_name
from edgeinfer.common.errors import InvalidArgument, ModelFileError, ModelNotFound
from edgeinfer.library.gguf_names import is_gguf, stem_of
from edgeinfer.library.hub import DownloadProgress, fetch
from edgeinfer.library.local import LocalModel, local_models
from edgeinfer.library.references import PREFIX, is_reference, parse_reference, url_advice

_MOST_LISTED = 10
_FILES_ALONE = (f".{os.sep}", f"..{os.sep}", "./", "../", "~")
_HOW = "`edgeinfer models` lists those here, and -hf USER/REPO[:QUANT] fetches one from Hugging Face"


def find_model(
    name: str | os.PathLike[str],
    argument: str = "path",
    progress: DownloadProgress | None = None,
    *,
    may_be_folder: bool = False,
) -> Path:
    """The file that is named: a file, "hf:USER/REPO:QUANT" for one of the hub, or a name that `edgeinfer models` lists.

    A file that exists is always meant before a model of that name; so is what can be a file alone, such as ./NAME. Of
    the names of models, the whole name counts before the name of the file, and that before the beginning of one.
    argument: its name, for messages.  progress: of a download, see `fetch`.  may_be_folder: a folder counts as a file.
    Raises ModelNotFound, which says what there is; InvalidArgument for a URL and for a name that several models have;
    ModelFileError; DownloadError.
    """
    path, given = check_file_name(argument, name), os.fsdecode(name)
    exists = os.path.lexists(path)
    if path.is_absolute() or given.startswith(_FILES_ALONE) or exists and (may_be_folder or not path.is_dir()):
        return path
    if given.startswith(PREFIX) and not given.startswith(f"{PREFIX}/"):
        return fetch(parse_reference(given.removeprefix(PREFIX), PREFIX), progress)
    models = local_models().models
    found = _matching(given, models)
    if len(found) == 1:
        return _usable(found[0])
    if found:
        raise InvalidArgument(f"{given} may be several models, give more of the name or the file: {_listed(found)}")
    if (advice := url_advice(given)) is not None:
        raise InvalidArgument(advice)
    if exists or is_gguf(given) or os.sep in given and path.parent.is_dir():
        return path  # and opening it says what its folder has
    raise ModelNotFound(_unknown(given, models))


def _usable(model: LocalModel) -> Path:
    if model.problem is not None:
        raise ModelFileError(f"{model.name} ({model.origin}): {model.path}: {model.problem}")
    return model.path


def _matching(given: str, models: Sequence[LocalModel]) -> Sequence[LocalModel]:
    """The models that a name may mean."""
    wanted = given.casefold()

    def named(model: LocalModel) -> Sequence[str]:
        return [name.casefold() for name in model.names]

    def files(model: LocalModel) -> Sequence[str]:
        return [name.casefold() for name in (model.path.name, stem_of(model.path.name))]

    def starts(model: LocalModel) -> Sequence[str]:
        return [*named(model), *(name.rpartition("/")[2] for name in named(model)), *files(model)]

    for found in (
        [model for model in models if wanted in named(model)],
        [model for model in models if wanted in files(model)],
        [model for model in models if not is_gguf(given) and any(name.startswith(wanted) for name in starts(model))],
    ):
        if found:
            return found
    return []


def _listed(models: Sequence[LocalModel]) -> str:
    """Names with their files where names alone tell no difference."""
    names = [model.name for model in models]
    shown = [str(model.path) if names.count(model.name) > 1 else model.name for model in models[:_MOST_LISTED]]
    return ", ".join(shown) + (f" and {len(models) - _MOST_LISTED} more" if len(models) > _MOST_LISTED else "")


def _unknown(given: str, models: Sequence[LocalModel]) -> str:
    """What to say of a name that nothing has."""
    names: dict[str, str] = {}  # what may have been meant: the name
    for model in models:
        for name in model.names:
            names |= {name.rpartition("/")[2].casefold(): name, name.casefold(): name}
    near = difflib.get_close_matches(given.casefold(), names, n=3)
    message = f"{given}: no such file, and no model of that name is on this machine"
    if near:
        message += f"; near are {', '.join(dict.fromkeys(names[each] for each in near))}"
    elif models:
        message += f"; there {'is' if len(models) == 1 else 'are'} {_listed(models)}"
    if is_reference(given):
        return f"{message}. -hf {given} fetches it from Hugging Face"
    return f"{message}. {_HOW}"
