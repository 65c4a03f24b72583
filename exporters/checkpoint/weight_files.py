"""The safetensors files of a folder: one, or several with model.safetensors.index.json."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgeinfer.common.errors import ModelFileError, ModelNotFound, UnsupportedModel
from edgeinfer.exporters.checkpoint.adapters import refuse_unmerged
from edgeinfer.exporters.checkpoint.folder import Folder
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor, read_header
from edgeinfer.models.gguf_reader.mapping import map_file

MAX_INDEX_BYTES = 64 << 20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = r".*\.(bin|pt|pth|ckpt|pkl)"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def read_stored(folder: Folder) -> dict[str, StoredTensor]:
    """The tensors of a folder as they are stored. Raises ModelNotFound, ModelFileError, UnsupportedModel."""
    found = _read(folder)
    refuse_unmerged(folder, list(found))
    return found


def _read(folder: Folder) -> dict[str, StoredTensor]:
    if _SINGLE in folder:
        return _of_files(folder, [_SINGLE])
    if _INDEX in folder:
        return _of_index(folder)
    names = folder.names(r"(?!adapter_model).*\.safetensors")
    if not names:
        _refuse_pickle(folder)
        raise ModelNotFound(f"{folder.path}: needs config.json and .safetensors files: found {folder.shown()}")
    _check_numbers(folder, names)
    return _of_files(folder, names)


def _of_files(folder: Folder, names: Iterable[str], called_by: str = "") -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name in names:
        path = folder.file(name, called_by)
        try:
            file = map_file(path)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
        tensors = read_header(file)
        twice = next((each for each in tensors if each in found), None)
        if twice is not None:
            raise ModelFileError(f"{path}: tensor {twice:.80} is in {found[twice].file.path.name} too")
        found |= tensors
    return found


def _of_index(folder: Folder) -> dict[str, StoredTensor]:
    """The tensors of the files that the index names, which must be those that it lists."""
    where = folder.json(_INDEX, MAX_INDEX_BYTES).get("weight_map")
    path = folder.path / _INDEX
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ModelFileError(f"{path}: weight_map must be an object of file names: found {where!r:.80}")
    names = sorted(set(where.values()))
    if (other := next((name for name in names if not name.endswith(".safetensors")), None)) is not None:
        raise ModelFileError(f"{path}: must name .safetensors files: found {other!r:.80}")
    found = _of_files(folder, names, _INDEX)
    for name, file in where.items():
        if name not in found or found[name].file.path.name != file:
            place = f"in {found[name].file.path.name}" if name in found else "in none of the files"
            raise ModelFileError(f"{path}: tensor {name:.80} is to be in {file:.80}: it is {place}")
    if (more := next((name for name in found if name not in where), None)) is not None:
        raise ModelFileError(f"{path}: tensor {more:.80} of {found[more].file.path} must be in the index: it is not")
    return found


def _check_numbers(folder: Folder, names: list[str]) -> None:
    """Without an index: either one file or all of a numbered set."""
    numbered = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    sets = {(match[1], int(match[3])) for match in numbered}
    if len(names) > 1 and (len(numbered) < len(names) or len(sets) > 1):
        raise ModelFileError(
            f"{folder.path}: must have {_SINGLE}, or {_INDEX} that says which files belong together: found "
            f"{', '.join(names[:8])}"
        )
    for _, n_files in sets:
        missing = set(range(1, n_files + 1)) - {int(match[2]) for match in numbered} if n_files <= 99999 else {0}
        if missing:
            raise ModelFileError(
                f"{folder.path}: must have {n_files} .safetensors files: number {min(missing)} is missing"
            )


def _refuse_pickle(folder: Folder) -> None:
    pickled = folder.names(_PICKLED)
    if pickled:
        raise UnsupportedModel(
            f"{folder.path}: {pickled[0]} is a pickle, which runs code when it is read, and is not read here; save the "
            f"model as safetensors: transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
