"""Models of the Hugging Face Hub: which file is meant, and its download into the cache that all programs share.

The layout of the cache is that of huggingface_hub, which lists, authenticates and links. It throws away what there is
of a broken download, so the bytes of files are fetched here, into `blobs/SHA256.incomplete`, and go on from there.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from edgeinfer.common.arguments import human_bytes, shown
from edgeinfer.common.errors import DownloadError, EdgeInferError, ModelNotFound, warn
from edgeinfer.common.files import file_sha256
from edgeinfer.library.gguf_names import has_quant, missing_parts, models_among, quant_of
from edgeinfer.library.references import HubReference

DownloadProgress: TypeAlias = Callable[[str, float], None]  # what is done, and the share of it that is, 0..1

_DEFAULT_QUANTS = ("Q4_K_M",)
_MOST_LISTED = 20
_MOST_PLAIN_BYTES = 50 * 1000**3  # of a file over plain HTTP; the hub has larger ones in pieces of its own
_MOST_VAIN = 5  # tries that brought nothing, before a download is given up
_PAUSE_SECONDS = 1.0  # before each
_PARTIAL_CONTENT = 206
_COMMIT, _SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class _HubFile:
    """A file of a repository.  sha256: None of files that are stored without one, which are small."""

    name: str
    n_bytes: int
    sha256: str | None


class _Unreachable(Exception):
    """The hub does not answer; the message says why."""


def fetch(wanted: HubReference, progress: DownloadProgress | None = None) -> Path:
    """The first file of a model of the hub, downloaded into its cache where it is not there.

    The quantisation is Q4_K_M where none is asked for, else the first file's. All parts of a split model are fetched.
    Without a connection, or with HF_HUB_OFFLINE, it is what the cache has.
    progress: None shows a bar, as huggingface_hub does.
    Raises ModelNotFound for a repository, quantisation or file that is not there, DownloadError; with a RuntimeWarning
    where another file than the one asked for might have been meant.
    """
    from huggingface_hub import constants

    if str(cache_folder()).startswith("~"):
        raise DownloadError(f"{wanted}: there is no place for it: this user has no home folder, set HF_HOME")
    if constants.HF_HUB_OFFLINE:
        return _from_cache(wanted, "HF_HUB_OFFLINE is set")
    try:
        commit, files = _listing(wanted.repo)
    except _Unreachable as error:
        path = _from_cache(wanted, str(error))
        warn(f"{error}: using {path.name}, which is in the cache")
        return path
    chosen = [files[name] for name in choose(wanted, list(files))]
    try:
        with _explained(wanted.repo):
            return _Download(wanted.repo, commit, chosen, progress).run()
    except _Unreachable as error:
        raise DownloadError(
            f"{wanted}: {error}; what there is of it is kept, the same command goes on with it"
        ) from error


def cache_folder() -> Path:
    """Folder of the hub's cache; it need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def choose(wanted: HubReference, names: Sequence[str], where: str = "it") -> Sequence[str]:
    """The files of the model that is meant, of the names in a repository. Raises ModelNotFound.

    where: what has these files, for messages.
    """
    models = models_among(names)
    if wanted.file is not None:
        found = next((files for files in models.values() if wanted.file in files), None)
        found = [wanted.file] if found is None and wanted.file in names else found
        if found is None:
            raise ModelNotFound(f"{wanted.repo} has no file {wanted.file}: {where} has {_listed(list(models))}")
    elif not models:
        raise ModelNotFound(_no_gguf(wanted.repo, names, where))
    else:
        found = models[_first_of(wanted, models, where)]
    if missing := missing_parts(found):
        parts = ", ".join(map(str, missing[:_MOST_LISTED]))
        raise ModelNotFound(f"{wanted.repo}: {where} has {len(found)} parts of {found[0]}, and lacks part {parts}")
    return found


def _first_of(wanted: HubReference, models: dict[str, Sequence[str]], where: str) -> str:
    """The model with the quantisation that is wanted, by its first file."""
    quants = sorted({quant for name in models if (quant := quant_of(name)) is not None})
    if wanted.quant is None:
        matching = [name for quant in _DEFAULT_QUANTS for name in models if has_quant(name, quant)]
        if not matching and len(models) > 1:
            first = next(iter(models))
            warn(f"{wanted.repo} has no {_DEFAULT_QUANTS[0]}: taking {first}; {where} has {_choices(models, quants)}")
            return first
    else:
        matching = [name for name in models if has_quant(name, wanted.quant)]
        if not matching:
            choices = _choices(models, quants)
            raise ModelNotFound(f"{wanted.repo} has no quantisation {wanted.quant}: {where} has {choices}")
    quant = (wanted.quant or _DEFAULT_QUANTS[0]).upper()
    matching.sort(key=lambda name: quant_of(name) != quant)  # Q4_K_XL before UD-Q4_K_XL
    if [quant_of(name) for name in matching[:2]] == [quant, quant]:
        others = ", ".join(matching[1:_MOST_LISTED])
        warn(f"{wanted.repo} has several files of {quant}: taking {matching[0]}; -hff FILE takes another: {others}")
    return matching[0] if matching else next(iter(models))


def _choices(models: dict[str, Sequence[str]], quants: Sequence[str]) -> str:
    """What to choose from: quantisations, or files where their names tell none."""
    return ", ".join(quants) if len(quants) >= len(models) else _listed(list(models))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more if names else "no GGUF files of models"


def _no_gguf(repo: str, names: Sequence[str], where: str) -> str:
    message = f"{repo} has no GGUF files of models: {where} has {_listed(names) if names else 'no files'}"
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        message += (
            f"; look for a repository called {repo.rpartition('/')[2]}-GGUF, or download the folder "
            f"(hf download {repo} --local-dir FOLDER) and convert it: edgeinfer export FOLDER --to gguf -o FILE"
        )
    return message


def _listing(repo: str) -> tuple[str, dict[str, _HubFile]]:
    """Commit and files of a repository by name. Raises _Unreachable, ModelNotFound, DownloadError."""
    from huggingface_hub import HfApi, constants

    with _explained(repo):
        info = HfApi().model_info(repo, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise DownloadError(f"{repo}: the hub must name the commit of the files, it said {commit!r:.80}")
    found = {}
    for each in info.siblings or ():
        name, sha256 = each.rfilename, None if each.lfs is None else each.lfs.sha256
        # Both become parts of paths in the cache.
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\\" in name or "\0" in name:
            raise DownloadError(f"{repo} has a file that no repository can have: {shown(name)}")
        if sha256 is not None and not _SHA256.fullmatch(sha256):
            raise DownloadError(f"{repo}: the hub must give the SHA-256 of {name}, it gave {shown(sha256)}")
        found[name] = _HubFile(name, each.size or 0, sha256)
    return commit, found


# ---- Without a connection --------------------------------------------------------------------------------------------


def snapshots(repo_folder: Path) -> Sequence[Path]:
    """Folders with the files of a repository in the cache, that of the main branch first. Raises OSError."""
    folders = sorted(path for path in (repo_folder / "snapshots").iterdir() if path.is_dir())
    main = None
    with suppress(OSError, UnicodeDecodeError):
        main = (repo_folder / "refs" / "main").read_text()
    return sorted(folders, key=lambda path: path.name != main)


def _from_cache(wanted: HubReference, why: str) -> Path:
    """The model as the cache has it. why: there is no more. Raises ModelNotFound, DownloadError."""
    folder = cache_folder() / f"models--{wanted.repo.replace('/', '--')}"
    try:
        found = snapshots(folder)
    except OSError:
        found = []
    refused = None
    for snapshot in found:
        names = sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
        try:
            return snapshot / choose(wanted, names, "the cache")[0]
        except ModelNotFound as error:
            refused = refused or error
    if refused is not None:
        raise ModelNotFound(f"{refused}; {why}")
    raise DownloadError(
        f"{wanted} cannot be downloaded: {why}, and nothing of it is in the cache {cache_folder()}; "
        "`edgeinfer models` lists the models on this machine"
    )


# ---- Downloading -----------------------------------------------------------------------------------------------------


class _Download:
    """The download of the files of one model, of one commit."""

    def __init__(self, repo: str, commit: str, files: Sequence[_HubFile], progress: DownloadProgress | None) -> None:
        self._repo, self._commit, self._files, self._progress = repo, commit, files, progress
        self._folder = cache_folder() / f"models--{repo.replace('/', '--')}"
        self._total = sum(file.n_bytes for file in files)
        self._before = 0  # bytes of the files that are done

    def run(self) -> Path:
        """The first file. Raises DownloadError, OSError, and what huggingface_hub raises."""
        missing = [file for file in self._files if not self._is_there(file)]
        self._check_room(missing)
        self._before = self._total - sum(file.n_bytes for file in missing)
        with nullcontext(self._progress) if self._progress or not missing else _bar(self._total) as self._progress:
            for file in missing:
                self._get(file)
                self._before += file.n_bytes
        reference = self._folder / "refs" / "main"
        with suppress(OSError):  # it serves those that come later without a connection
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self._commit)
        return self._place(self._files[0])

    def _place(self, file: _HubFile) -> Path:
        return self._folder / "snapshots" / self._commit / file.name

    def _blob(self, file: _HubFile) -> Path:
        return self._folder / "blobs" / str(file.sha256)

    def _part(self, file: _HubFile) -> Path:
        """What there is of a file; programs with older versions of huggingface_hub have it there too."""
        return self._folder / "blobs" / f"{file.sha256}.incomplete"

    def _is_there(self, file: _HubFile) -> bool:
        """Whether the cache has a file; one of another size is removed."""
        for path in (self._place(file), self._blob(file)):
            with suppress(OSError):
                if path.stat().st_size == file.n_bytes:
                    if path == self._place(file):
                        return True
                elif file.sha256 is not None:
                    self._remove(file)
        return False

    def _remove(self, file: _HubFile) -> None:
        """Take a damaged file out of the cache."""
        for path in (self._place(file), self._blob(file)):
            path.unlink(missing_ok=True)

    def _check_room(self, files: Sequence[_HubFile]) -> None:
        """Raises DownloadError where the disk has too little room for what is missing of files."""
        needed = sum(file.n_bytes - _size(self._part(file)) for file in files if not self._blob(file).exists())
        folder = next(path for path in (self._folder, *self._folder.parents) if path.is_dir())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise DownloadError(
                f"{self._repo} needs {human_bytes(needed)} more on disk, free are {human_bytes(free)} in {folder}: "
                f"{human_bytes(needed - free)} are missing; take a smaller quantisation, or another place with HF_HOME"
            )

    def _get(self, file: _HubFile) -> None:
        """Bring a file into the cache."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import WeakFileLock

        if file.sha256 is not None and file.n_bytes <= _MOST_PLAIN_BYTES:
            lock = cache_folder() / ".locks" / self._folder.name / f"{file.sha256}.lock"  # as huggingface_hub has it
            for folder in (lock.parent, self._blob(file).parent):
                folder.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):
                if not self._blob(file).exists():
                    self._get_bytes(file)
        hf_hub_download(self._repo, file.name, revision=self._commit)  # links what is there
        if file.sha256 is not None and file.n_bytes > _MOST_PLAIN_BYTES:
            self._check(file, self._place(file))

    def _get_bytes(self, file: _HubFile) -> None:
        """Fetch what is missing of a file, and compare all of it with its hash."""
        part = self._part(file)
        if _size(part) > file.n_bytes:
            part.unlink()
        part.touch()
        n_vain = 0
        while (start := _size(part)) < file.n_bytes:
            try:
                with _explained(self._repo):
                    self._stream(file, part, start)
                problem = f"the file ends at byte {_size(part)} of {file.n_bytes}"
            except _Unreachable as error:
                problem = str(error)
            n_vain = 0 if _size(part) > start else n_vain + 1
            if n_vain > _MOST_VAIN:
                raise _Unreachable(problem)
            if _size(part) < file.n_bytes:
                time.sleep(_PAUSE_SECONDS)
        self._check(file, part)
        part.replace(self._blob(file))

    def _stream(self, file: _HubFile, part: Path, start: int) -> None:
        """Add to a file what the hub sends from a byte on, until it is whole or the answer ends."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self._repo, file.name, revision=self._commit)
        headers = build_hf_headers() | {"accept-encoding": "identity", "range": f"bytes={start}-"}
        how = {"headers": headers, "follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        with get_session().stream("GET", url, **how) as response, part.open("r+b") as target:
            hf_raise_for_status(response)
            n_bytes = start if response.status_code == _PARTIAL_CONTENT else 0  # what was asked for, or all of it
            target.truncate(n_bytes)
            target.seek(n_bytes)
            for piece in response.iter_bytes():
                target.write(piece)
                n_bytes += len(piece)
                self._report(file, n_bytes)
                if n_bytes > file.n_bytes:
                    return

    def _check(self, file: _HubFile, path: Path) -> None:
        """Raises DownloadError, and removes the file, where its bytes are not those that the hub has."""
        self._report(file, file.n_bytes, "checking")
        if (found := file_sha256(path)) != file.sha256:
            path.unlink(missing_ok=True)
            self._remove(file)
            raise DownloadError(
                f"{self._repo}: {file.name} is damaged, its SHA-256 must be {file.sha256}: found {found}; it was "
                "removed, try again"
            )

    def _report(self, file: _HubFile, n_bytes: int, what: str = "downloading") -> None:
        if self._progress is not None:
            done = self._before + n_bytes
            name = file.name.rpartition("/")[2]
            size = f"{human_bytes(done)} of {human_bytes(self._total)}"
            self._progress(f"{what} {name}: {size}", done / max(self._total, 1))


@contextmanager
def _bar(n_bytes: int) -> Iterator[DownloadProgress]:
    """A bar as huggingface_hub has them, which HF_HUB_DISABLE_PROGRESS_BARS switches off."""
    from huggingface_hub.utils import tqdm

    with tqdm(total=n_bytes, unit="B", unit_scale=True) as bar:

        def show(what: str, share: float) -> None:
            bar.set_description(what.partition(":")[0], refresh=False)
            bar.update(round(share * n_bytes) - bar.n)

        yield show


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# ---- Errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Within, errors of the hub and the network become those of this package, or _Unreachable."""
    try:
        yield
    except (EdgeInferError, _Unreachable):
        raise
    except Exception as error:
        raise _error_for(repo, error) from error


def _error_for(repo: str, error: Exception) -> Exception:
    from huggingface_hub import constants, errors, get_token

    place = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, errors.GatedRepoError):
        todo = "the one in use has no access" if get_token() else "set HF_TOKEN or run hf auth login"
        return DownloadError(f"{repo} is gated: accept its terms at {place}, then use a token of that account; {todo}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return _not_found(repo)
    if isinstance(error, errors.HfHubHTTPError):
        return _http_error(repo, error)
    if isinstance(error, (errors.HFValidationError, errors.FileMetadataError)):
        return DownloadError(f"{repo}: {error}")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return DownloadError(f"{repo}: {error.filename or cache_folder()}: {error.strerror}")
    # The HTTP library, and with it the class of what goes wrong, depends on the version of huggingface_hub.
    if isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore", "requests")):
        return _Unreachable(f"{constants.ENDPOINT} cannot be reached: {str(error) or type(error).__name__:.200}")
    return error


def _not_found(repo: str) -> ModelNotFound:
    from huggingface_hub import constants

    return ModelNotFound(
        f"{constants.ENDPOINT}/{repo}: there is no such repository, or it is private; for a private one set HF_TOKEN "
        "or run hf auth login"
    )


def _http_error(repo: str, error: Any) -> Exception:
    """For another answer that is an error."""
    from huggingface_hub import constants, get_token

    status = error.response.status_code
    if status == 404 or status == 401 and get_token() is None:
        return _not_found(repo)
    if status == 401:
        return DownloadError(f"{repo}: {constants.ENDPOINT} refuses the token: check HF_TOKEN or run hf auth login")
    if status == 429 or status >= 500:
        return _Unreachable(f"{constants.ENDPOINT} answers with status {status}")
    return DownloadError(f"{repo}: {constants.ENDPOINT} answers with status {status}: {error.server_message or ''}")
