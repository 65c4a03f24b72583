"""What a caller may say about loading a model, checked in one place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, cast, get_args

from edgeinfer.arguments import MAX_INT32, check_callback, check_choice, check_flag, check_integer, check_text, shown
from edgeinfer.backends.base import Progress
from edgeinfer.errors import InvalidArgument
from edgeinfer.memory.limit import parse_budget
from edgeinfer.offload.cache_size import parse
from edgeinfer.offload.tier_size import check_device, parse_bytes
from edgeinfer.speculation.cost import DEFAULT_DRAFT_MAX
from edgeinfer.speculation.draft_names import drafters_named
from edgeinfer.speculation.placement import check_name
from edgeinfer.types import CacheType, TernaryBits

BackendName: TypeAlias = Literal["auto", "native", "reference", "llama.cpp", "opencl", "onnx", "fpga-sim"]
TernaryChoice: TypeAlias = Literal["auto"] | TernaryBits
FileName: TypeAlias = str | os.PathLike[str]
Draft: TypeAlias = FileName | Sequence[FileName] | None

MAX_THREADS = 1024


class LoadKeywords(TypedDict, total=False):
    """The fields of LoadOptions as keyword arguments."""

    n_ctx: int | None
    n_threads: int | None
    backend: BackendName
    n_batch: int
    cache_type: CacheType
    ternary_bits: TernaryChoice
    expert_cache: str | int | None
    expert_device: str | None
    expert_device_bytes: str | int | None
    draft: Draft
    draft_max: int
    draft_device: str
    verify: bool
    fpga_folder: FileName | None
    budget: str | int | None
    progress: Progress | None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded. Raises InvalidArgument where a value has another type or is outside of its range.

    n_ctx: positions in the context, in tokens. None is what the model was trained with, at most 4096.
    n_threads: CPU threads, 1 to 1024. None is one for each physical core.
    backend: what runs the model. "auto" is native; with a RuntimeWarning it is llama.cpp for a model that native does
    not support, and the reference where native does not run.
    n_batch: prompt tokens in one forward pass. It changes memory and speed, and the text with llama.cpp only.
    cache_type: type of the numbers in the KV cache. Others than "f16" change the text: "q8_0" takes 56 % of its bytes,
    "k6v4" (native and reference), keys of 6 bits and values of 4, 33 %, with a loss that docs/memory.md has measured.
    ternary_bits: bits of memory for each weight of a ternary model with the native backend. The text is the same.
    "auto" is what `edgeinfer pack` wrote, otherwise the faster of the two as measured here.
    expert_cache: memory for the experts of a mixture-of-experts model with the native backend; others are read from
    disk when they are needed, with the same text. A size in bytes or as text ("3.5GiB", "800MB"), a share of all
    experts ("25%"), None for all in memory. "auto" is all where they fit into the available memory, otherwise the size
    that measured throughput leads to over several runs.
    expert_device: an OpenCL device, "gpu", "gpu:N" or "opencl:N", that computes experts that its memory holds, while
    the CPU computes the others. Logits are near those of the CPU, not equal to them, so a text may be another. A device
    that fails is left out from then on, with a RuntimeWarning. None is the CPU alone.
    expert_device_bytes: memory of that device for experts, as for expert_cache; None or "auto" is what it has.
    draft: which drafters propose tokens. Drafts change the speed and never the text; only the native backend verifies
    them. "auto" is the drafters without a model ("suffix", "recycling") and the draft head that this package has for
    the model, if any. A file, or a name as for `load`, adds a draft model, best with the same vocabulary, or a draft
    head to these. "none" or None is no drafter. A sequence is exactly the drafters that it names. A drafter that cannot
    be used is left out with a RuntimeWarning that says why.
    draft_max: most drafted tokens that one pass verifies; 0 is no drafting. Where the logits of so many would take more
    than 12 MiB, it is fewer.
    draft_device: where a draft model runs: "cpu", "gpu", "gpu:N", "opencl:N" or "onnx:N" (`edgeinfer devices` lists
    them). "auto" is a GPU where the model fits and is measured to be faster than the CPU. Where the device is missing
    or fails, the CPU drafts, with a RuntimeWarning that says why.
    verify: use packed weights beside the model (`edgeinfer pack`, native backend only) only if every byte of both files
    is as it was packed, which takes about 1 s for each GB. Otherwise sizes and samples are compared.
    fpga_folder: a folder of `edgeinfer export --to fpga`, made of this model, whose engine and weights the backend
    "fpga-sim" takes. None is a small engine with the weights of the model.
    budget: most memory that the process may take, everything in the ledger (`Engine.memory`) together. A size in bytes
    or as text ("2GiB"), or a share of what is free ("60%"). None or "auto" is what is free less a sixteenth of it, at
    least 32 MiB and at most 1 GiB; no budget goes above that. Where not all fits, there are, in this order and with a
    RuntimeWarning, smaller draft tables, no draft model or head, a smaller expert cache, and smaller batches; the text
    is the same. A model that does not fit then raises BudgetExceeded, which says what would.
    progress: called with the share of the weights that is loaded, 0..1.
    """

    n_ctx: int | None = None
    n_threads: int | None = None
    backend: BackendName = "auto"
    n_batch: int = 512
    cache_type: CacheType = "f16"
    ternary_bits: TernaryChoice = "auto"
    expert_cache: str | int | None = "auto"
    expert_device: str | None = None
    expert_device_bytes: str | int | None = None
    draft: Draft = "auto"
    draft_max: int = DEFAULT_DRAFT_MAX
    draft_device: str = "auto"
    verify: bool = False
    fpga_folder: FileName | None = None
    budget: str | int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        checked = {
            "n_ctx": None if self.n_ctx is None else check_integer("n_ctx", self.n_ctx, 1, MAX_INT32),
            "n_threads": None if self.n_threads is None else check_integer("n_threads", self.n_threads, 1, MAX_THREADS),
            "n_batch": check_integer("n_batch", self.n_batch, 1, MAX_INT32),
            "draft_max": check_integer("draft_max", self.draft_max, 0),
        }
        for name, value in checked.items():  # as Python's own integers
            object.__setattr__(self, name, value)
        drafters_named(self.drafter_names())
        check_choice("backend", self.backend, get_args(BackendName))
        check_choice("cache_type", self.cache_type, get_args(CacheType))
        if (n_bytes := parse(self.expert_cache).n_bytes) is not None and not isinstance(self.expert_cache, str):
            object.__setattr__(self, "expert_cache", n_bytes)
        if (n_bytes := parse_bytes(self.expert_device_bytes).n_bytes) and not isinstance(self.expert_device_bytes, str):
            object.__setattr__(self, "expert_device_bytes", n_bytes)
        if self.expert_device is not None:
            check_device(check_text("expert_device", self.expert_device))
        check_choice("ternary_bits", self.ternary_bits, ("auto", *get_args(TernaryBits)))
        check_name(check_text("draft_device", self.draft_device))
        check_flag("verify", self.verify)
        self._check_fpga_folder()
        if (n_bytes := parse_budget(self.budget).n_bytes) is not None and not isinstance(self.budget, str):
            object.__setattr__(self, "budget", n_bytes)
        check_callback("progress", self.progress)

    def _check_fpga_folder(self) -> None:
        if self.fpga_folder is None:
            return
        if not isinstance(self.fpga_folder, (str, os.PathLike)) or not os.fsdecode(self.fpga_folder):
            raise InvalidArgument(f"fpga_folder must be the name of a folder or None: found {shown(self.fpga_folder)}")
        if self.backend != "fpga-sim":
            raise InvalidArgument(f'fpga_folder is for backend="fpga-sim": found {self.backend!r}')

    def drafter_names(self) -> str | tuple[str, ...]:
        """The value of `draft` as text: "auto", "none" or one name, or a tuple of names. Raises InvalidArgument."""
        if self.draft is None:
            return "none"
        several = isinstance(self.draft, Sequence) and not isinstance(self.draft, (str, bytes))
        found = []
        for name in cast(Sequence[object], self.draft if several else [self.draft]):
            if (
                not isinstance(name, (str, os.PathLike))
                or not os.fsdecode(name)
                or several
                and name in ("auto", "none")
            ):
                raise InvalidArgument(
                    'draft must be "auto", "none", or one or several of "suffix", "recycling" and the name of a file: '
                    f"found {shown(name)}"
                )
            found.append(os.fsdecode(name))
        return tuple(found) if several else found[0]
