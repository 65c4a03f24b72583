"""How a model is to be loaded: options of a caller that plans depend on, and the settings that a plan is made for.

Each option is described once, beside its field: its default, its check, and what the command line says of it. This
imports so little that `--help` can read it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from edgeinfer.common.arguments import MAX_INT32, check_choice, check_integer, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.sizes import parse_size

CacheType: TypeAlias = Literal["f16", "q8_0", "k6v4"]
"""Numbers of the KV cache. f16: half floats.  q8_0: 8-bit codes with one scale for each 32, 56 % of the bytes.

k6v4: keys of 6 bits and values of 4, Hadamard transformed, with one scale for each, 33 % of the bytes."""
TernaryBits: TypeAlias = Literal["2", "1.6"]
"""Bits of memory for each weight of a ternary matrix: four weights a byte, or five."""
Check: TypeAlias = Callable[[str, object], object]  # of a name and a value; gives the value to keep
_Class = TypeVar("_Class", bound=type)
_KEY, _WIDTH = "option", 120
MAX_PARALLEL, DEFAULT_PARALLEL = 64, 4
DEFAULT_TBT_MS = 100.0  # target of the time between two tokens of a text (Sarathi-Serve, arXiv:2403.02310)
DEFAULT_DRAFT_MAX = 31  # draft tokens of a pass, by default and at most: no cost of more is measured


@dataclass(frozen=True)
class About:
    """What is said of an option beside its field."""

    # its names on the command line, which `help` and `metavar` are for; none where only Python has it
    flags: tuple[str, ...]
    check: Check  # of a value, which Python or the command line gives
    help: str
    text: str  # for the docstring
    metavar: str | None = None


def option(default: object, *flags: str, check: Check, text: str, help: str = "", metavar: str | None = None) -> Any:
    """A field of a dataclass that is an option; see About."""
    return field(default=default, metadata={_KEY: About(flags, check, help, text, metavar)})


def options_of(of: type) -> dict[str, tuple[Any, About]]:
    """Default and description of each option of a dataclass, by name."""
    return {each.name: (each.default, each.metadata[_KEY]) for each in fields(of) if _KEY in each.metadata}


def variable_of(*flags: str) -> str:
    """The variable of the environment that stands for a flag: EDGEINFER_CTX_SIZE for --ctx-size."""
    flag = next(name for name in flags if name.startswith("--"))
    return f"EDGEINFER{flag[1:].replace('-', '_').upper()}"


def documented(of: _Class) -> _Class:
    """The class, whose docstring has the text of each of its options."""
    texts = (f"{name}: {about.text}" for name, (_, about) in options_of(of).items())
    of.__doc__ = "\n".join(
        (of.__doc__ or "", "", *(textwrap.fill(text, _WIDTH, break_on_hyphens=False) for text in texts))
    )
    return of


def one_of(*choices: str) -> Check:
    """A check that the value is one of these texts."""
    return lambda name, value: check_choice(name, value, choices)


def or_none(check: Check) -> Check:
    """A check that lets None through."""
    return lambda name, value: None if value is None else check(name, value)


def integer(least: int, most: int | None = None) -> Check:
    """A check that the value is an integer in least..most; it becomes Python's own."""
    return lambda name, value: check_integer(name, value, least, most)


def room_of(what: str) -> Check:
    """A check that the value is a size, of "the memory" or "the disk"; a number becomes Python's own. 0 is none."""

    def check(name: str, value: object) -> object:
        n_bytes = 0 if value == 0 and not isinstance(value, bool) else parse_size(value, name, what).n_bytes
        if n_bytes is None:
            raise InvalidArgument(f'{name} must be bytes, a size such as "2GiB", or None: found {shown(value)}')
        return value if isinstance(value, str) else n_bytes

    return check


class PlanKeywords(TypedDict, total=False):
    """The fields of PlanOptions as keyword arguments."""

    n_batch: int
    cache_type: CacheType
    parallel: int | None
    cache_ram: str | int | None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options that plans and backends are given as they are. A field here is one of LoadOptions and of LoadSettings."""

    n_batch: int = option(
        512,
        "-ub",
        "--ubatch-size",
        check=integer(1, MAX_INT32),
        metavar="N",
        help="Prompt tokens in one forward pass. Fewer use less memory and are slower.",
        text="prompt tokens in one forward pass. It changes memory and speed, and the text with llama.cpp only.",
    )
    cache_type: CacheType = option(
        "f16",
        "--cache-type",
        check=one_of(*get_args(CacheType)),
        help="Type of the KV cache, keys and values. q8_0 takes 56 % of f16 and k6v4 33 %; both change the text.  "
        "[default: f16]",
        text='type of the numbers in the KV cache. Others than "f16" change the text: "q8_0" takes 56 % of its bytes, '
        '"k6v4" (native and reference), keys of 6 bits and values of 4, 33 %, with a loss that docs/memory.md has '
        "measured.",
    )
    parallel: int | None = option(
        None,
        "-np",
        "--parallel",
        check=or_none(integer(1, MAX_PARALLEL)),
        metavar="N",
        help=f"Most texts that run at once.  [default: {DEFAULT_PARALLEL}]",
        text="most texts that run at once, 1 to 64, which share the positions of the context. Only the native backend "
        f"runs more than one. None is {DEFAULT_PARALLEL} where the budget has room for them.",
    )
    cache_ram: str | int | None = option(
        None,
        "-cram",
        "--cache-ram",
        check=or_none(room_of("the memory")),
        metavar="SIZE",
        help="Memory to keep what finished texts have in the KV cache (2GiB).  [default: what no text needs]",
        text="memory for what finished texts leave in the KV cache beyond what running ones need, so that later texts "
        'that begin so need not read it again: bytes, or a text such as "2GiB". None is nothing beyond.',
    )


@dataclass(frozen=True)
class LoadSettings(PlanOptions):
    """All that the plan of a load depends on, beside the model, as keywords of `load` with their values."""

    n_ctx: int  # positions in the KV cache
    _: KW_ONLY
    n_threads: int = 1  # of the CPU
    # bytes of the cache of experts that are read from disk when they are needed, None where all are in memory; it
    # changes no bit either
    expert_cache: int | None = None
    # "auto", "none", or what LoadOptions.drafter_names gives; no backend looks at it
    draft: str | tuple[str, ...] = "none"

    @classmethod
    def of(cls, options: PlanOptions, n_ctx: int, **others: Any) -> LoadSettings:
        """Those that options ask for.  others: further fields, and what is not as in the options."""
        given = {each.name: getattr(options, each.name) for each in fields(PlanOptions)}
        return cls(n_ctx, **given | others)

    @property
    def n_texts(self) -> int:
        """Most texts that run at once."""
        return self.parallel or 1

    @property
    def cache_ram_bytes(self) -> int:
        """The memory for what finished texts leave; 0 for none."""
        return (0 if not self.cache_ram else parse_size(self.cache_ram, "cache_ram", "the memory").n_bytes) or 0

    @property
    def of_model(self) -> LoadSettings:
        """What a backend is given: the same without drafters."""
        given = {each.name: getattr(self, each.name) for each in fields(LoadSettings)}
        return LoadSettings(**given | {"draft": "none"})

    def with_batch(self, most: int | None = None) -> LoadSettings:
        """The same with a batch that is no larger than the context, and than `most`."""
        n_batch = min(self.n_batch, self.n_ctx)
        return replace(self, n_batch=n_batch if most is None else min(n_batch, most))
