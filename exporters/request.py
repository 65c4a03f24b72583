"""What `edgeinfer export` is asked for, what it plans, and what came of it: the same for every target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from edgeinfer.models.gguf import GGMLType, MetadataValue

Progress: TypeAlias = Callable[[float], None]  # called with the share of the bytes that is done
Told: TypeAlias = Callable[[str, float], None]  # called with what is done, such as "losses: 3 of 9", and its share


def untold(what: str, share: float) -> None:
    """A `Told` of nobody."""


@dataclass(frozen=True)
class Request:
    """The options of an export that several targets have.

    source: a folder of Hugging Face or a GGUF file.  out: a file, or the folder of a package.  type: "Q4_K_M" and its
    kin, a format such as "Q8_0", "auto", or None for the types of the source.  imatrix: a file, or "auto".  size: bytes
    of the weights that "auto" may take.  fit: instead, the bytes that the model may take when it runs.
    cost: the pass whose time counts for "auto", such as "verify:4".  draft: a model, a draft head, or "ngram".  n_ctx:
    None for the target's usual one.  resume: go on with what an export that was stopped left.  check: whether what was
    written is run.  more: options of one target, by name.  told: is told what a plan measures, while it does.
    """

    source: Path
    out: Path
    type: str | None = None
    imatrix: Path | str | None = None
    calibration: Path | None = None
    size: int | None = None
    fit: int | None = None
    cost: str | None = None
    draft: Path | str | None = None
    n_ctx: int | None = None
    resume: bool = False
    check: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)
    told: Told = field(default=untold, compare=False, repr=False)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it will be written."""

    name: str
    found: GGMLType
    written: GGMLType
    n_bytes: int


@dataclass(frozen=True)
class Plan:
    """What an export will write and take.

    files: with their bytes.  peak_bytes: most memory at once, the interpreter apart.  disk_bytes: most disk at once.
    notes: what the user should know, a sentence each.
    """

    tensors: Sequence[PlannedTensor]
    files: Mapping[Path, int]
    peak_bytes: int
    disk_bytes: int
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """What was written.

    files: whole, under their names.  check: what running it showed, a sentence; None where it was not run.  facts: for
    the manifest, and what the check needed (versions of runtimes), the same in each run.  check_bytes: most memory that
    the runtime had in the check, None where that is not known.
    """

    files: Sequence[Path]
    check: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    check_bytes: int | None = None


@dataclass(frozen=True)
class TypeChoice:
    """The type of each tensor that "auto" chose. Tensors that are not in it stay as `file_types` has them.

    notes: for the plan, a sentence each.  facts: for the manifest: predicted and measured losses, bytes, costs.
    keys: for the metadata of the file, `edgeinfer.export.*`.
    """

    types: Mapping[str, GGMLType]
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, MetadataValue] = field(default_factory=dict)


class ExportTarget(Protocol):
    """One kind of output. Both raise UnsupportedModel, InvalidArgument, ModelFileError, BudgetExceeded, OSError."""

    def plan(self, request: Request) -> Plan:
        """What write would do, from the headers of the source."""
        ...

    def write(self, request: Request, progress: Progress) -> Result:
        """Write all of it or nothing, and check it where the request says so."""
        ...
