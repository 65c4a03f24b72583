"""What a caller may say about loading a model, described and checked in one place.

A new option is a field here, or of PlanOptions where plans depend on it; a line of LoadKeywords or PlanKeywords; and
one in edgeinfer.cli.options. `--help` reads this, so what takes long to import is imported by the checks that need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from edgeinfer.common.arguments import MAX_INT32, check_callback, check_flag, check_number, check_text, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.settings import (
    DEFAULT_DRAFT_MAX,
    DEFAULT_TBT_MS,
    PlanKeywords,
    PlanOptions,
    TernaryBits,
    documented,
    integer,
    one_of,
    option,
    options_of,
    or_none,
    room_of,
)
from edgeinfer.common.sizes import SizeRequest
from edgeinfer.template_values import REASONING, Reasoning

BackendName: TypeAlias = Literal["auto", "native", "reference", "llama.cpp", "opencl", "onnx", "fpga-sim"]
TernaryChoice: TypeAlias = Literal["auto"] | TernaryBits
FileName: TypeAlias = str | os.PathLike[str]
Draft: TypeAlias = FileName | Sequence[FileName] | None

MAX_THREADS = 1024


class LoadKeywords(PlanKeywords, total=False):
    """The fields of LoadOptions as keyword arguments."""

    n_ctx: int | None
    n_threads: int | None
    backend: BackendName
    chat_template: FileName | None
    reasoning: Reasoning
    ternary_bits: TernaryChoice
    cache_disk: str | int | None
    expert_cache: str | int | None
    expert_device: str | None
    expert_device_bytes: str | int | None
    draft: Draft
    draft_max: int
    draft_device: str
    draft_memory: FileName | None
    verify: bool
    fpga_folder: FileName | None
    budget: str | int | None
    tbt: float
    progress: Callable[[float], None] | None


# ---- checks ----------------------------------------------------------------------------------------------------------


def _size(parse: Callable[[object], SizeRequest], name: str, value: object) -> object:
    """The value of a size; a number as Python's own."""
    n_bytes = parse(value).n_bytes
    return value if n_bytes is None or isinstance(value, str) else n_bytes


def _cache_disk(name: str, value: object) -> object:
    return value if value == "auto" else room_of("the disk")(name, value)


def _expert_cache(name: str, value: object) -> object:
    from edgeinfer.offload.cache_size import parse

    return _size(parse, name, value)


def _expert_device_bytes(name: str, value: object) -> object:
    from edgeinfer.experimental.device_experts_size import parse_bytes

    return _size(parse_bytes, name, value)


def _budget(name: str, value: object) -> object:
    from edgeinfer.memory.limit import parse_budget

    return _size(parse_budget, name, value)


def _expert_device(name: str, value: object) -> object:
    from edgeinfer.experimental.device_experts_size import check_device

    check_device(check_text(name, value))
    return value


def _draft(name: str, value: object) -> object:
    from edgeinfer.speculation.draft_names import drafters_named

    drafters_named(_drafter_names(value))
    return value


def _draft_device(name: str, value: object) -> object:
    from edgeinfer.speculation.placement import check_name

    check_name(check_text(name, value))
    return value


def _file(name: str, value: object) -> object:
    if not isinstance(value, (str, os.PathLike)) or not os.fsdecode(value):
        raise InvalidArgument(f"{name} must be the name of a file or None: found {shown(value)}")
    return value


def _chat_template(name: str, value: object) -> object:
    if not isinstance(value, (str, os.PathLike)) or not os.fsdecode(value).strip():
        raise InvalidArgument(
            f"{name} must be Jinja, the name of a known template, or the Path of a file: found {shown(value)}"
        )
    return value


def _flag(name: str, value: object) -> object:
    check_flag(name, value)
    return value


def _folder(name: str, value: object) -> object:
    if not isinstance(value, (str, os.PathLike)) or not os.fsdecode(value):
        raise InvalidArgument(f"{name} must be the name of a folder or None: found {shown(value)}")
    return value


def _milliseconds(name: str, value: object) -> object:
    return check_number(name, value, 1, 1e6)


def _callback(name: str, value: object) -> object:
    check_callback(name, value)
    return value


def _drafter_names(draft: object) -> str | tuple[str, ...]:
    """See LoadOptions.drafter_names."""
    if draft is None:
        return "none"
    several = isinstance(draft, Sequence) and not isinstance(draft, (str, bytes))
    found = []
    for name in cast(Sequence[object], draft if several else [draft]):
        if not isinstance(name, (str, os.PathLike)) or not os.fsdecode(name) or several and name in ("auto", "none"):
            raise InvalidArgument(
                'draft must be "auto", "none", or one or several of "suffix", "answers", "recycling", "mtp" and the '
                f"name of a file: found {shown(name)}"
            )
        found.append(os.fsdecode(name))
    return tuple(found) if several else found[0]


# ---- options ---------------------------------------------------------------------------------------------------------


@documented
@dataclass(frozen=True, kw_only=True)
class LoadOptions(PlanOptions):
    """How a model is loaded. Raises InvalidArgument where a value has another type or is outside of its range."""

    n_ctx: int | None = option(
        None,
        "-c",
        "--ctx-size",
        check=or_none(integer(1, MAX_INT32)),
        help="Context size in tokens.  [default: as trained, at most 4096]",
        text="positions in the context, in tokens. None is what the model was trained with, at most 4096.",
    )
    n_threads: int | None = option(
        None,
        "-t",
        "--threads",
        check=or_none(integer(1, MAX_THREADS)),
        help="Number of threads.  [default: physical cores]",
        text="CPU threads, 1 to 1024. None is one for each physical core.",
    )
    backend: BackendName = option(
        "auto",
        "--backend",
        check=one_of(*get_args(BackendName)),
        help="What runs the model; auto: native, or llama.cpp for models that native does not run.",
        text='what runs the model. "auto" is native; with a RuntimeWarning it is llama.cpp for a model that native '
        "does not support, and the reference where native does not run.",
    )
    chat_template: FileName | None = option(
        None,
        "--chat-template",
        check=or_none(_chat_template),
        metavar="JINJA|NAME",
        help="Chat template in place of the file's: Jinja, or the name of a known one (chatml, llama3).",
        text="the chat template in place of the file's, for one that is broken or missing: Jinja, the name of one that "
        'llama.cpp has built in ("chatml", "llama3"), or the pathlib.Path of a file of at most 256 KiB with either. '
        "It runs in the same sandbox as the file's; formats of tool calls and marks of reasoning are those of the "
        "template that is used. A template that is broken raises TemplateError before anything is loaded.",
    )
    reasoning: Reasoning = option(
        "auto",
        "-rea",
        "--reasoning",
        check=one_of(*REASONING),
        help="Whether a model that can do both reasons before it answers: auto (as its template has it), on, off.",
        text="whether a model that can do both reasons before it answers: its template gets enable_thinking and "
        'thinking, true for "on" and false for "off", and with "off" a reasoning that the template opens all the same '
        'is ended at once. "auto" gives neither. chat_template_kwargs of a request go before it.',
    )
    ternary_bits: TernaryChoice = option(
        "auto",
        "--ternary-bits",
        check=one_of("auto", *get_args(TernaryBits)),
        help="Bits per weight of a ternary model in memory; the text is the same. auto: the faster one.",
        text="bits of memory for each weight of a ternary model with the native backend. The text is the same. "
        '"auto" is what `edgeinfer pack` wrote, otherwise the faster of the two as measured here.',
    )
    cache_disk: str | int | None = option(
        None,
        "--cache-disk",
        check=or_none(_cache_disk),
        metavar="SIZE",
        help="Disk space to keep contexts for later runs (2GiB); 0: none.  [default: none; in chat at most 4GiB]",
        text="disk space, in the user's cache folder, for what texts have in the KV cache, so that a later text that "
        'begins so need not read it again, in another process too: bytes, or a text such as "2GiB". The native '
        "backend does that, for models without recurrent layers; the text is the same. Whoever can read the folder can "
        'learn the texts; it is readable for the user only. None or 0 is nothing on disk. "auto" is 4 GiB or a quarter '
        "of the free space, and says nothing where contexts cannot be kept.",
    )
    expert_cache: str | int | None = option(
        "auto",
        "--expert-cache",
        check=_expert_cache,
        metavar="auto|SIZE|SHARE%",
        help="Memory for experts (3.5GiB, 25%); others are read from disk. auto: all, or the fastest size.",
        text="memory for the experts of a mixture-of-experts model with the native backend; others are read from disk "
        'when they are needed, with the same text. A size in bytes or as text ("3.5GiB", "800MB"), a share of all '
        'experts ("25%"), None for all in memory. "auto" is all where they fit into the available memory, otherwise '
        "the size that measured throughput leads to over several runs.",
    )
    expert_device: str | None = option(
        None,
        "--expert-device",
        check=or_none(_expert_device),
        metavar="NAME",
        help="Experimental: OpenCL device (gpu, gpu:N, opencl:N) for some experts; may change the text.",
        text='an OpenCL device, "gpu", "gpu:N" or "opencl:N", that computes experts that its memory holds, while the '
        "CPU computes the others. Logits are near those of the CPU, not equal to them, so a text may be another. A "
        "device that fails is left out from then on, with a RuntimeWarning. None is the CPU alone.",
    )
    expert_device_bytes: str | int | None = option(
        None,
        "--expert-device-bytes",
        check=_expert_device_bytes,
        metavar="auto|SIZE|SHARE%",
        help="Memory of that device for experts.",
        text='memory of that device for experts, as for expert_cache; None or "auto" is what it has.',
    )
    draft: Draft = option(
        "auto",
        "--drafter",
        check=_draft,
        help="What drafts, beside -md: auto, none, suffix, answers, recycling or mtp. Changes the speed, not the text.",
        text="which drafters propose tokens. Drafts change the speed and never the text; only the native backend "
        'verifies them. "auto" is the model-free drafters ("suffix", "answers", "recycling"), and the block '
        'of the model\'s own file that drafts, "mtp", where it has one. A file, or a name as for '
        "`load`, adds a draft model, best with the same vocabulary, or a draft head to these. "
        '"none" or None is no drafter. A sequence is exactly the drafters that it names. A drafter that cannot be used '
        "is left out with a RuntimeWarning that says why.",
    )
    draft_max: int = option(
        DEFAULT_DRAFT_MAX,
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        check=integer(0),
        metavar="N",
        help=f"Most draft tokens verified per step; 0: no drafts.  [default: {DEFAULT_DRAFT_MAX}]",
        text="most drafted tokens that one pass verifies; 0 is no drafting. Where the logits of so many would take "
        "more than 12 MiB, it is fewer.",
    )
    draft_device: str = option(
        "auto",
        "--draft-device",
        check=_draft_device,
        metavar="NAME",
        help="Device of a draft model or head: auto, cpu, gpu, gpu:N, opencl:N, onnx:N; see `edgeinfer devices`.",
        text='where a draft model runs: "cpu", "gpu", "gpu:N", "opencl:N" or "onnx:N" (`edgeinfer devices` lists '
        'them). "auto" is a GPU where the model fits and is measured to be faster than the CPU. Where the device is '
        "missing or fails, the CPU drafts, with a RuntimeWarning that says why.",
    )
    draft_memory: FileName | None = option(
        None,
        "--draft-memory",
        check=or_none(_file),
        help="Keep answers in this file, to draft later ones from, also in later runs.",
        text="a file that keeps what the model answered, from which later answers are drafted, also in later "
        "processes; without one they are forgotten with the engine. Whoever can read the file can read the answers. A "
        "damaged file, or one of another tokenizer, is left out with a RuntimeWarning.",
    )
    verify: bool = option(
        False,
        "--check-pack",
        check=_flag,
        help="Compare all bytes of MODEL.packed with the model first; takes about 1 s per GB.",
        text="use packed weights beside the model (`edgeinfer pack`, native backend only) only if every byte of both "
        "files is as it was packed, which takes about 1 s for each GB. Otherwise sizes and samples are compared.",
    )
    fpga_folder: FileName | None = option(
        None,
        check=or_none(_folder),
        text="a folder of `edgeinfer fpga export`, made of this model, whose engine and weights the backend "
        '"fpga-sim" takes. None is a small engine with the weights of the model.',
    )
    budget: str | int | None = option(
        None,
        "--budget",
        check=_budget,
        metavar="SIZE|SHARE%",
        help="Most memory to use: 2GiB, or 60% of what is free.  [default: what is free less 1/16]",
        text="most memory that the process may take, everything in the ledger (`Engine.memory`) together. A size in "
        'bytes or as text ("2GiB"), or a share of what is free ("60%"). None or "auto" is what is free less a '
        "sixteenth of it, at least 32 MiB and at most 1 GiB; no budget goes above that. Where not all fits, there are, "
        "in this order and with a RuntimeWarning, smaller draft tables, no draft model or head, a smaller expert "
        "cache, and smaller batches; the text is the same. A model that does not fit then raises BudgetExceeded, which "
        "says what would.",
    )
    tbt: float = option(
        DEFAULT_TBT_MS,
        "--tbt",
        check=_milliseconds,
        metavar="MS",
        help="Target of the time between two tokens of a text while a prompt of another one is read.  "
        f"[default: {DEFAULT_TBT_MS:g}]",
        text="milliseconds that a pass should take at most while texts run and a prompt of another one is read: the "
        "prompt goes in pieces of at least 32 tokens. More reads prompts sooner and lets running texts wait longer "
        "(TBT of Sarathi-Serve, Agrawal et al., arXiv:2403.02310).",
    )
    progress: Callable[[float], None] | None = option(
        None, check=_callback, text="called with the share of the weights that is loaded, 0..1."
    )

    def __post_init__(self) -> None:
        for name, (_, about) in options_of(type(self)).items():
            object.__setattr__(self, name, about.check(name, getattr(self, name)))
        if self.fpga_folder is not None and self.backend != "fpga-sim":
            raise InvalidArgument(f'fpga_folder is for backend="fpga-sim": found {self.backend!r}')

    def drafter_names(self) -> str | tuple[str, ...]:
        """The value of `draft` as text: "auto", "none" or one name, or a tuple of names. Raises InvalidArgument."""
        return _drafter_names(self.draft)
