"""What a list of models says of each: what it is, what runs it and the memory that it takes, from its header alone."""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.common.errors import BackendUnavailable, EdgeInferError, ModelFileError, UnsupportedModel
from edgeinfer.exporters.gguf.file_types import name_of_file_type
from edgeinfer.loading.options import LoadOptions
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.profiler.planner import Planner

# What `profile` takes, but for ternary models: those that are measured to choose their bits take no more than this.
_OPTIONS = LoadOptions(backend="native", ternary_bits="2")
_NOT_MODELS = {"mmproj": "a projector of images", "adapter": "an adapter", "imatrix": "an importance matrix"}
_PROJECTOR = "clip"  # general.architecture of projectors, which older files have without a type


@dataclass(frozen=True)
class Summary:
    """What the header of a model says.

    architecture, quantisation: "-" where the file does not say.  kind: "model", "draft head", or what else it is.
    runs_on: "native", "llama.cpp" where native does not run it, or None.  reason: why native does not.
    n_ctx, peak_bytes: the context that it would be loaded with, and the most memory of the process then; None where
    only loading it would tell.
    """

    architecture: str
    quantisation: str
    kind: str
    n_bytes: int
    runs_on: str | None = None
    reason: str | None = None
    n_ctx: int | None = None
    peak_bytes: int | None = None


def summarise(path: Path) -> Summary:
    """The summary of a model. Raises ModelFileError and what derives from it for a file that cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with ModelFile.open(path) as file:
            return _summary(file)


def _summary(file: ModelFile) -> Summary:
    architecture = file.metadata.get("general.architecture")
    named = architecture if isinstance(architecture, str) else "-"
    about = named, _quantisation(file), _kind(file), file.n_bytes
    if about[2] != "model":
        return Summary(*about)
    try:
        with closing(Planner(file, _OPTIONS)) as planner:
            wanted = planner.wanted
            return Summary(*about, "native", None, wanted.n_ctx, planner.planned(wanted).ledger.peak)
    except UnsupportedModel as error:
        has_llama_cpp = importlib.util.find_spec("llama_cpp") is not None
        return Summary(*about, "llama.cpp" if has_llama_cpp else None, _without_path(error, file))
    except BackendUnavailable as error:
        return Summary(*about, None, str(error))
    except ModelFileError:
        raise
    except EdgeInferError as error:
        return Summary(*about, None, _without_path(error, file))


def _kind(file: ModelFile) -> str:
    if is_draft_head(file):
        return "draft head"
    if file.metadata.get("general.architecture") == _PROJECTOR:
        return _NOT_MODELS["mmproj"]
    return _NOT_MODELS.get(str(file.metadata.get("general.type")), "model")


def _quantisation(file: ModelFile) -> str:
    """The file's own word, else the type that most bytes have."""
    number = file.metadata.get("general.file_type")
    named = name_of_file_type(number) if isinstance(number, int) else None
    if named is not None:
        return named
    n_bytes: Counter[str] = Counter()
    for info in file.tensors.values():
        n_bytes[info.type.name] += info.n_bytes
    return n_bytes.most_common(1)[0][0] if n_bytes else "-"


def _without_path(error: EdgeInferError, file: ModelFile) -> str:
    return str(error).removeprefix(f"{file.path}: ")
