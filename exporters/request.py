"""What `edgeinfer export` is asked for, what it plans, and what came of it: the same for every target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from edgeinfer.models.gguf import GGMLType, MetadataValue

Progress: TypeAlias = Callable[[float], None]  # called with the share of the bytes that is done
StepProgress: TypeAlias = Callable[[str, float], None]  # called with what is done, "losses: 3 of 9", and its share


def no_progress(what: str, share: float) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class Request:
    """The options of an export that several targets have."""

    source: Path  # a folder of Hugging Face or a GGUF file
    out: Path  # a file, or the folder of a package
    # "Q4_K_M" and its kin, a format such as "Q8_0", "auto", or None for the types of the source
    type: str | None = None
    imatrix: Path | str | None = None  # a file, or "auto"
    calibration: Path | None = None
    size: int | None = None  # bytes of the weights that "auto" may take
    fit: int | None = None  # instead, the bytes that the model may take when it runs
    cost: str | None = None  # of "auto": bound the time of a forward pass too, such as "verify:4" of one of 4 tokens
    draft: Path | str | None = None  # a model, a draft head, or "ngram"
    n_ctx: int | None = None  # None for the target's usual one
    resume: bool = False  # resume an export that was stopped
    check: bool = True  # whether what was written is run
    more: Mapping[str, Any] = field(default_factory=dict)  # options of one target, by name
    # called with what a plan measures, while it does
    report: StepProgress = field(default=no_progress, compare=False, repr=False)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it will be written."""

    name: str
    found: GGMLType
    written: GGMLType
    n_bytes: int


@dataclass(frozen=True)
class Plan:
    """What an export will write and take."""

    tensors: Sequence[PlannedTensor]
    files: Mapping[Path, int]  # with their bytes
    peak_bytes: int  # most memory at once, the interpreter apart
    disk_bytes: int  # most disk at once
    notes: Sequence[str] = ()  # what the user should know, a sentence each


@dataclass(frozen=True)
class Result:
    """What was written."""

    files: Sequence[Path]  # whole, under their names
    check: str | None  # what running it showed, a sentence; None where it was not run
    # for the manifest, and what the check needed (versions of runtimes), the same in each run
    facts: Mapping[str, Any] = field(default_factory=dict)
    check_bytes: int | None = None  # most memory that the runtime had in the check, None where that is not known


@dataclass(frozen=True)
class TypeChoice:
    """The type of each tensor that "auto" chose. Tensors that are not in it stay as `file_types` has them."""

    types: Mapping[str, GGMLType]
    notes: Sequence[str] = ()  # for the plan, a sentence each
    # for the manifest: predicted and measured losses, bytes, costs
    facts: Mapping[str, Any] = field(default_factory=dict)
    # for the metadata of the file, `edgeinfer.export.*`
    keys: Mapping[str, MetadataValue] = field(default_factory=dict)


class ExportTarget(Protocol):
    """One kind of output. Both raise UnsupportedModel, InvalidArgument, ModelFileError, BudgetExceeded, OSError."""

    def plan(self, request: Request) -> Plan:
        """What write would do, from the headers of the source."""
        ...

    def write(self, request: Request, progress: Progress) -> Result:
        """Write all of it or nothing, and check it where the request says so."""
        ...
