"""Flags that commands share, and what they make of them: an engine, sampling parameters, a prompt."""

from __future__ import annotations

import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import click

from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ProgressBar, note
from edgeinfer.common.arguments import check_file_name
from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.common.settings import MAX_PARALLEL, CacheType, TernaryBits, options_of, variable_of
from edgeinfer.common.user_text import decoded
from edgeinfer.loading.options import BackendName, LoadKeywords, LoadOptions
from edgeinfer.speculation.draft_names import MODEL_FREE, OWN_BLOCK
from edgeinfer.template_values import REASONING

if TYPE_CHECKING:
    from edgeinfer.engine import Engine
    from edgeinfer.sampling import SamplingOptions

Command = TypeVar("Command", bound=Callable[..., Any])
_Texts = TypeVar("_Texts", str, "tuple[str, ...]", None)
_DRAFTERS = ("auto", "none", *MODEL_FREE, OWN_BLOCK)
_SIMULATED = "fpga-sim"  # only for `edgeinfer fpga simulate`
_BACKENDS = tuple(name for name in get_args(BackendName) if name != _SIMULATED)
_CACHE_TYPES = ("f16", "q8_0")  # those of CacheType that llama.cpp also has


class FileName(click.Path):
    """The type of options that name files: a Path, with ~ and ~user resolved, as no shell does after `--out=`."""

    def __init__(self, **checks: Any) -> None:
        super().__init__(path_type=Path, **checks)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The Path; a usage error where there is no such home folder or the name is empty."""
        try:
            value = check_file_name("the file", value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class OutputName(FileName):
    """The type of options that name an output.

    beside: endings of further files that are written with it.  keeps: an existing output is replaced only with
    --overwrite.
    """

    def __init__(self, *beside: str, keeps: bool = False, **checks: Any) -> None:
        super().__init__(**checks)
        self.beside, self.keeps = beside, keeps


class MayNameFile(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.5
    """The type of options whose text may name an input file.  name_in: returns that name, or None."""

    name = "text"

    def __init__(self, name_in: Callable[[str], str | None]) -> None:
        self.name_in = name_in

    @classmethod
    def but(cls, *words: str) -> MayNameFile:
        """For a text that is one of these words, or else a file."""
        return cls(lambda text: None if text in words else text)


class Choice(click.Choice):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.2
    """A choice of words.  elsewhere: for further words, a sentence on what to do instead."""

    def __init__(self, choices: Sequence[str], **elsewhere: str) -> None:
        super().__init__(choices)
        self._elsewhere = elsewhere

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word; a usage error where it is none of them."""
        if (hint := self._elsewhere.get(str(value))) is not None:
            self.fail(hint, param, ctx)
        return super().convert(value, param, ctx)


class _DrafterName(click.Choice):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.2
    """The type of --drafter: a word; files are named with -md."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word; a usage error where it is none of them."""
        if value not in self.choices:
            self.fail(
                f"{value!r} is not {', '.join(self.choices[:-1])} or {self.choices[-1]}; -md names a file", param, ctx
            )
        return value


class _CacheRam(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.5
    """The type of --cache-ram: a size with a unit. llama.cpp's numbers are MiB, those of other options here bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text, or None for 0; a usage error for a number without a unit."""
        text = str(value).strip()
        if text.lstrip("+-").isdigit():
            if int(text) == 0:
                return None
            self.fail(f"{text} has no unit: give --cache-ram {text.lstrip('+-')}MiB, or GiB", param, ctx)
        return text


class _CacheDisk(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.5
    """The type of --cache-disk: a size, or 0."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text, or 0."""
        return 0 if str(value).strip() == "0" else value


class _DraftMax(click.IntRange):
    """The type of --draft-max. One of its spellings used to name drafters."""

    name = "integer range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error where it is none."""
        if isinstance(value, str) and not value.lstrip("+-").isdigit():
            self.fail(
                f"{value!r} is no number of draft tokens. --drafter NAME chooses what drafts, -md FILE a draft model.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def long_name(option: click.Parameter) -> str:
    """The first name of an option with two dashes, for messages."""
    return next((name for name in option.opts if name.startswith("--")), option.opts[0])


def out_option(type: OutputName, **settings: Any) -> Callable[[Command], Command]:
    """-o, which names the output of a command."""
    return click.option(*("-o", "--out", "--output", "--output-file", "out"), type=type, **settings)


def variable_option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """A flag that an environment variable can set too: EDGEINFER_CTX_SIZE for --ctx-size."""
    return click.option(*names, envvar=variable_of(*names), show_envvar=True, **settings)


_ESCAPE = re.compile(rb"\\(?:([nrt'\"\\])|x([0-9A-Fa-f]{2}))")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}  # the others stand for themselves


def read_escapes(text: str) -> str:
    r"""The text with \n, \r, \t, \', \", \\ and \xHH (a byte of UTF-8) replaced by what they stand for.

    Other sequences with a backslash are unchanged, as in llama.cpp.
    """
    data = _ESCAPE.sub(
        lambda part: _ESCAPED.get(part[1], part[1]) if part[1] else bytes([int(part[2], 16)]),
        text.encode(errors="surrogatepass"),
    )
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError:  # of \xHH that are no UTF-8 together
        return data.decode(errors="replace")


def escaped_text(context: click.Context, parameter: click.Parameter, value: _Texts) -> _Texts:
    """Callback of flags whose values are texts. Reads escapes, unless --no-escape is given."""
    if not context.params.get("escape", True) or value is None:
        return value
    return read_escapes(value) if isinstance(value, str) else tuple(map(read_escapes, value))


escape_option = click.option(
    *("-e/ ", "--escape/--no-escape"),
    default=True,
    is_eager=True,  # the callbacks of others look at it
    envvar="EDGEINFER_ESCAPE",
    show_envvar=True,
    help=r"Read \n, \t, \r, \", \', \\ and \xHH in TEXT and in options that are texts.  [default: escape]",
)
stop_option = click.option(
    "--stop", multiple=True, callback=escaped_text, help=r'End before this text, such as "\n\n"; may be repeated.'
)


def load_option(field: str, **settings: Any) -> Callable[[Command], Command]:
    """The flag of an option of LoadOptions, as described there. settings: click's, such as the type."""
    default, about = options_of(LoadOptions)[field]
    if default is not None and not isinstance(default, bool) and "[default: " not in about.help:
        settings = {"default": default, "show_default": True} | settings
    return variable_option(*about.flags, field, **{"help": about.help, "metavar": about.metavar} | settings)


def load_keywords(flags: dict[str, Any]) -> LoadKeywords:
    """The flags about loading as keywords of `load`, without those that are None."""
    given = {name: flags[name] for name in options_of(LoadOptions) if flags.get(name) is not None}
    given |= {} if (cache_type := _cache_type_of(flags)) is None else {"cache_type": cache_type}
    if (file := flags.get("chat_template_file")) is not None:
        if "chat_template" in given:
            raise click.UsageError("--chat-template and --chat-template-file both give a template: leave one out")
        given["chat_template"] = file
    return cast("LoadKeywords", given | {"draft": draft_of(flags)})


def _cache_type_of(flags: dict[str, Any]) -> str | None:
    """The type that --cache-type, -ctk and -ctv name. Raises click.UsageError if they name two."""
    both, keys, values = (flags[name] for name in ("cache_type", "cache_type_k", "cache_type_v"))
    if keys is None and values is None:
        return None if both is None else str(both)
    found = {keys or both or "f16", values or both or "f16"} | ({both} if both else set())
    if len(found) > 1:
        named = {"--cache-type": both, "-ctk": keys or "f16 (default)", "-ctv": values or "f16 (default)"}
        told = ", ".join(f"{flag} {type}" for flag, type in named.items() if type)
        raise click.UsageError(f"keys and values of the KV cache have one type here: found {told}; give --cache-type")
    return str(found.pop())


def context_option(default: int) -> Callable[[Command], Command]:
    """-c of a command whose model answers prompts."""
    return click.option(
        *("-c", "--ctx-size", "--context", "context"),
        type=click.IntRange(32),
        default=default,
        show_default=True,
        help="Tokens of prompt and answer.",
    )


max_tokens_option = click.option(
    *("-n", "--max-tokens", "--predict", "--n-predict", "max_tokens"),
    type=click.IntRange(2),
    default=256,
    show_default=True,
    help="Most tokens of an answer.",
)
threads_option = load_option("n_threads", type=click.IntRange(1))
budget_option = load_option("budget")
draft_option = load_option("draft", type=_DrafterName(_DRAFTERS))
model_draft_option = variable_option(
    *("-md", "--model-draft", "--spec-draft-model"),
    type=FileName(),
    help="GGUF file, or a name of `edgeinfer models`, of a draft model or a draft head.",
)
_PLAN_OPTIONS = (  # of `profile` too
    load_option("n_ctx", type=click.IntRange(1)),
    load_option("cache_type", type=click.Choice(get_args(CacheType)), default=None, show_default=False),
    click.option(
        "-ctk", "--cache-type-k", type=click.Choice(_CACHE_TYPES), help="As --cache-type, with the same -ctv."
    ),
    click.option(
        "-ctv", "--cache-type-v", type=click.Choice(_CACHE_TYPES), help="As --cache-type, with the same -ctk."
    ),
    load_option("n_batch", type=click.IntRange(1)),
    load_option("parallel", type=click.IntRange(1, MAX_PARALLEL)),
    load_option("cache_ram", type=_CacheRam()),
)
_MODEL_OPTIONS = (
    variable_option(
        "-m",
        "--model",
        type=FileName(),
        help="GGUF file, or a name of `edgeinfer models`.  [default: SmolLM2-135M-Instruct]",
    ),
    *_PLAN_OPTIONS,
    load_option("cache_disk", type=_CacheDisk()),
    load_option("ternary_bits", type=click.Choice(["auto", *get_args(TernaryBits)])),
    load_option("expert_cache"),
    load_option("expert_device", hidden=True),  # experimental: only pages name it
    load_option("expert_device_bytes", default="auto", show_default=True, hidden=True),
    budget_option,
    load_option("verify", is_flag=True),
    threads_option,
    model_draft_option,
    draft_option,
    load_option("draft_device"),
    load_option("draft_max", type=_DraftMax(0)),
    load_option("draft_memory", type=FileName()),
    load_option("tbt", type=click.FloatRange(1, 1e6)),
)
backend_option = load_option(
    "backend", type=Choice(_BACKENDS, **{_SIMULATED: "`edgeinfer fpga simulate` runs a model on this backend."})
)
_TEMPLATE_OPTIONS = (
    load_option("chat_template"),
    variable_option(
        "--chat-template-file",
        type=FileName(exists=True, dir_okay=False),
        help="A file with such a chat template.",
    ),
    load_option("reasoning", type=click.Choice(REASONING)),
)
# The defaults are those of SamplingParams, repeated here because importing it would make `--help` slow.
_SAMPLING_OPTIONS = (
    escape_option,
    variable_option(
        "-n",
        "--predict",
        "--n-predict",
        type=click.IntRange(-1),
        default=-1,
        help="Most tokens to generate, -1: no limit.  [default: -1]",
    ),
    variable_option(
        "--temp",
        "--temperature",
        "temperature",
        type=click.FloatRange(0),
        help="Temperature; 0 takes the most likely token.  [default: the model's, or 0.8]",
    ),
    variable_option(
        "--top-k",
        type=click.IntRange(-1),
        help="Keep the k most likely tokens, 0 or -1: all.  [default: the model's, or 40]",
    ),
    variable_option(
        "--top-p",
        type=click.FloatRange(0, 1),
        help="Keep the most likely tokens up to probability p, 1: all.  [default: the model's, or 0.95]",
    ),
    variable_option(
        "--min-p",
        type=click.FloatRange(0, 1),
        help="Keep tokens at least p times as likely as the first.  [default: the model's, or 0.05]",
    ),
    variable_option(
        "--repeat-penalty", type=float, help="Penalty for repeated tokens, 1: off.  [default: the model's, or 1.0]"
    ),
    variable_option("--frequency-penalty", type=float, help="Penalty per repetition, 0: off.  [default: 0.0]"),
    variable_option("--presence-penalty", type=float, help="Penalty once per repeated token, 0: off.  [default: 0.0]"),
    variable_option(
        "--repeat-last-n",
        "penalty_last_n",
        type=click.IntRange(-1),
        help="Tokens that penalties look back, -1: all.  [default: the model's, or 64]",
    ),
    variable_option(
        "--dry-multiplier", type=click.FloatRange(0), help="Strength of the DRY penalty, 0: off.  [default: 0.0]"
    ),
    variable_option("--dry-base", type=click.FloatRange(1), help="DRY: growth per repeated token.  [default: 1.75]"),
    variable_option(
        "--dry-allowed-length", type=click.IntRange(0), help="DRY: repetition without penalty.  [default: 2]"
    ),
    variable_option(
        "--dry-penalty-last-n", type=click.IntRange(-1), help="DRY: tokens to look back, -1: all.  [default: -1]"
    ),
    variable_option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        callback=escaped_text,
        help='DRY: text that ends a repetition; may be repeated; "none": no text.  [default: new line, :, ", *]',
    ),
    variable_option(
        "-l",
        "--logit-bias",
        multiple=True,
        metavar="ID(+/-)BIAS",
        help="Change the logit of a token (15043+1, 15043-1) or ban it (15043-inf); may be repeated.",
    ),
    variable_option(
        "--loop-guard",
        type=click.IntRange(0),
        metavar="N",
        help="End an answer whose last N tokens (at least 64) only repeat themselves, 0: off.  [default: 512]",
    ),
    variable_option(
        "-s", "--seed", type=click.IntRange(-1), help="Random seed, -1: a new one each time.  [default: -1]"
    ),
)
_SAMPLING_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty"),
    *("penalty_last_n", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "loop_guard", "seed"),
)
# What /set changes in a chat, by the names that the flags have for a command.
SETTINGS = ("predict", "stop", *_SAMPLING_NAMES, "dry_sequence_breakers", "logit_bias")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace the output, if there is one.")
quiet_option = variable_option("-q", "--quiet", is_flag=True, help="Show no greeting and no figures.")
text_argument = click.argument("texts", metavar="[TEXT]", nargs=-1, callback=escaped_text)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")


def model_options(command: Command) -> Command:
    """Adds -m -c --cache-type --ternary-bits --expert-cache -t -md --drafter ...; see open_engine."""
    return _with(command, _MODEL_OPTIONS)


def plan_options(command: Command) -> Command:
    """Adds -c, --cache-type and the other options that a plan takes as `load` does; see load_keywords."""
    return _with(command, _PLAN_OPTIONS)


def template_options(command: Command) -> Command:
    """Adds --chat-template, --chat-template-file and --reasoning, for commands that answer chats."""
    return _with(command, _TEMPLATE_OPTIONS)


def sampling_options(command: Command) -> Command:
    """Adds -n --temp --top-k and so on; see sampling_given and max_tokens."""
    return _with(command, _SAMPLING_OPTIONS)


def _with(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def open_engine(flags: dict[str, Any]) -> Engine:
    """The engine by the flags of model_options. Warnings become notes, and a long load shows a bar."""
    from edgeinfer.cli.model_names import find_models
    from edgeinfer.loading.open import load

    check_stdout()
    flags = find_models(flags)
    with warnings_as_notes(), ProgressBar("loading") as bar:
        keywords = load_keywords(flags)
        keywords["progress"] = bar
        engine = load(flags["model"], **keywords)
    n_ctx_train = engine.session.spec.n_ctx_train
    if engine.n_ctx > n_ctx_train:
        note(f"the model was trained with {n_ctx_train} tokens of context; past them the text may lose its sense")
    return engine


def draft_of(flags: dict[str, Any]) -> str | list[str]:
    """The drafters that -md and --drafter name. Raises click.UsageError for a conflict."""
    draft, model = flags["draft"], flags["model_draft"]
    if model is None:
        return str(draft)
    if draft == "none":
        raise click.UsageError("-md names a draft model, but --drafter none switches drafting off: leave one out")
    file = str(model)
    if file in ("auto", "none", *MODEL_FREE):
        file = os.path.join(".", file)  # always a file, even if its name is that of a drafter
    return file if draft == "auto" else [draft, file]


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Warnings within become notes at the end, unless it ends with an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    for warning in caught:
        note(str(warning.message))


def sampling_given(flags: dict[str, Any]) -> SamplingOptions:
    """The sampling parameters by the flags of sampling_options. Raises InvalidArgument, click.UsageError."""
    from edgeinfer.sampling import SamplingParams

    given: dict[str, Any] = {name: flags[name] for name in _SAMPLING_NAMES if flags[name] is not None}
    if given.get("seed") == -1:
        del given["seed"]
    if breakers := flags["dry_sequence_breakers"]:
        given["dry_sequence_breakers"] = () if breakers == ("none",) else breakers
    if flags["logit_bias"]:
        given["logit_bias"] = dict(map(_bias, flags["logit_bias"]))
    SamplingParams(**given)  # refuses values out of range, before a model is loaded
    return cast("SamplingOptions", given)


def _bias(text: str) -> tuple[int, float]:
    """Token and bias of ID+BIAS or ID-BIAS. Raises click.UsageError."""
    found = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*|\.\d+|inf))", text)
    if found is None or found[2] == "+inf":
        raise click.UsageError(f"--logit-bias must be ID+BIAS or ID-BIAS (15043-1, 15043-inf): found {text:.80}")
    return int(found[1]), float(found[2])


def max_tokens(flags: dict[str, Any]) -> int | None:
    """Most tokens to generate, None without a limit."""
    return None if flags["predict"] == -1 else flags["predict"]


def text_or_prompt(texts: tuple[str, ...], prompt: str | None) -> str | None:
    """The text of text_argument, or of -p. Raises click.UsageError for several texts, or the name of a model file."""
    for text in texts:
        if text.endswith(".gguf"):
            raise click.UsageError(f"{text} looks like a model: name it with -m, or give a text that ends so with -p")
    if len(texts) > 1:
        raise click.UsageError(f"{len(texts)} texts are given: put one that has spaces in it in quotes")
    if texts and prompt is not None:
        raise click.UsageError("TEXT and -p both give a prompt: give one of them")
    return texts[0] if texts else prompt


def read_input(beside_prompt: bool) -> str | None:
    """The text on standard input, None if that is a terminal. Raises InvalidArgument if it is no UTF-8.

    beside_prompt: there is a prompt already. Then only a pipe or a file is read, not a service's /dev/null or terminal.
    """
    if sys.stdin.isatty() or (beside_prompt and not _is_pipe_or_file()):
        return None
    try:
        return decoded(sys.stdin.buffer.read(), "standard input")
    except OSError as error:
        raise EdgeInferError(f"standard input cannot be read: {error.strerror or error}") from error


def _is_pipe_or_file() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # no file at all, as in a test
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
