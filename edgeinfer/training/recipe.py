"""How a draft head is trained, beside the command line: the keys of `edgeinfer distill --config FILE.toml`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from edgeinfer.common.arguments import check_choice, check_number, check_text
from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.common.settings import Check, documented, integer, one_of, option, options_of

OptimizerName = Literal["muon", "adamw"]
AuthorName = Literal["auto", "native", "torch"]
HeadType = Literal["f16", "q8_0", "q4_0"]
_MOST = 1e9  # of numbers without a bound of their own
_LEAST = 1e-12  # of numbers above zero


def _number(least: float, most: float = _MOST) -> Check:
    return lambda name, value: check_number(name, value, least, most)


def _type(name: str, value: object) -> object:
    return None if value is None else check_choice(name, value, get_args(HeadType))


_SHARE = _number(0, 1)


@documented
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How answers are made and a head is trained. Raises InvalidArgument where a value is of another type or range."""

    answers: int = option(1, check=integer(1), text="answers per prompt; second ones are made after all first ones.")
    greedy_share: float = option(0.6, check=_SHARE, text="share of first answers that are greedy.")
    temperature: float = option(0.8, check=_number(_LEAST), text="of sampled answers.")
    chat_share: float = option(
        0.5,
        check=_SHARE,
        text="share of sampled answers that are sampled as `edgeinfer chat` does for this model, penalties included.",
    )
    n_held: int = option(48, check=integer(1), text="most prompts for evaluation.")
    author: AuthorName = option(
        "auto", check=one_of(*get_args(AuthorName)), text="engine that generates the answers: auto, native or torch."
    )
    draft_vocab: int = option(8192, check=integer(2), text="tokens that the head can draft.")
    blocks: int = option(1, check=integer(0), text="decoder blocks after the gate.")
    taps: str = option(
        "none",
        check=check_text,
        text='layers that feed the head, such as "2,15,29"; "auto": early, middle and last; "none": only the last row.',
    )
    gate_type: HeadType | None = option(
        None, check=_type, text="type of gate and attention, which lose more from few bits; by default that of --type."
    )
    rounds: int = option(0, check=integer(0), text="further epochs that also draft from all positions of the answers.")
    steps: int = option(3, check=integer(1, 8), text="own drafts per position.")
    steps_from: float = option(
        0.0,
        check=_SHARE,
        text="share of the training with one step instead of `steps`; one takes a third of the time of three.",
    )
    rounded_from: float = option(
        0.6, check=_SHARE, text="share of the training after which weights are rounded to --type in each pass."
    )
    batch_tokens: int = option(4096, check=integer(1), text="positions per batch.")
    optimizer: OptimizerName = option(
        "muon", check=one_of(*get_args(OptimizerName)), text="for matrices: muon or adamw; norms use AdamW."
    )
    learning_rate: float = option(1e-3, check=_number(_LEAST), text="largest learning rate.")
    warm_up: float = option(0.05, check=_SHARE, text="share of the training for warm-up.")
    feature_weight: float = option(1.0, check=_number(0), text="weight of the feature loss.")
    token_weight: float = option(1.0, check=_number(0), text="weight of the cross-entropy.")
    decay: float = option(0.8, check=_SHARE, text="factor on the loss per further step.")
    noise: float = option(0.1, check=_number(0), text="noise on features, in their units.")
    evaluate_every: int = option(100, check=integer(1), text="batches between checkpoints.")

    def __post_init__(self) -> None:
        for name, (_, about) in options_of(type(self)).items():
            object.__setattr__(self, name, about.check(name, getattr(self, name)))


def read_recipe(path: Path | None, elsewhere: Mapping[str, str]) -> Recipe:
    """The recipe of a TOML file, or the defaults for None.  elsewhere: flags by names that are no keys, for messages.

    Raises InvalidArgument for unknown keys and wrong values, EdgeInferError where the file cannot be read.
    """
    if path is None:
        return Recipe()
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EdgeInferError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: must be TOML, a line NAME = VALUE for each key: {error}") from error
    for name in found:
        if name not in options_of(Recipe):
            raise InvalidArgument(f"{path}: there is no key {name!r}: {_hint(name, elsewhere)}")
    try:
        return Recipe(**found)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None


def _hint(name: str, elsewhere: Mapping[str, str]) -> str:
    if name in elsewhere:
        return f"it is an option of the command line, {elsewhere[name]}"
    keys = list(options_of(Recipe))
    near = difflib.get_close_matches(name, keys, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
