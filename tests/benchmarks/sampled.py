"""How a benchmark samples: the parameters of sampling as flags, named as those of `edgeinfer chat` and llama.cpp."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace
from typing import Any

from edgeinfer.sampling import SamplingParams

FLAGS: dict[str, tuple[str, type]] = {
    "temperature": ("--temp", float),
    "top_k": ("--top-k", int),
    "top_p": ("--top-p", float),
    "min_p": ("--min-p", float),
    "repeat_penalty": ("--repeat-penalty", float),
    "frequency_penalty": ("--frequency-penalty", float),
    "presence_penalty": ("--presence-penalty", float),
    "penalty_last_n": ("--repeat-last-n", int),
    "dry_multiplier": ("--dry-multiplier", float),
    "dry_base": ("--dry-base", float),
    "dry_allowed_length": ("--dry-allowed-length", int),
    "dry_penalty_last_n": ("--dry-penalty-last-n", int),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --temp and so on, --logit-bias, and --default-chat, which the others change."""
    for name, (flag, kind) in FLAGS.items():
        parser.add_argument(flag, type=kind, dest=name)
    parser.add_argument(
        *("-l", "--logit-bias"),
        type=_bias,
        action="append",
        default=[],
        metavar="ID(+/-)BIAS",
        help="several times; -inf bans",
    )
    parser.add_argument("--default-chat", action="store_true", help="sample and ask as chat does for this model")


def sampling(arguments: argparse.Namespace, of_chat: SamplingParams) -> SamplingParams:
    """The parameters that the flags give. of_chat: the model's own, which --default-chat begins with.

    Without it, those that are not given are greedy, without penalties, with top_p 1 where a temperature is given.
    """
    params = of_chat if arguments.default_chat else SamplingParams(temperature=0.0, top_p=1.0)
    given: dict[str, Any] = {name: getattr(arguments, name) for name in FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.logit_bias:
        given["logit_bias"] = dict(arguments.logit_bias)
    return replace(params, **given)


def llama_cpp_flags(params: SamplingParams) -> list[str]:
    """The same parameters for llama.cpp's programs."""
    words = [word for name, (flag, _) in FLAGS.items() for word in (flag, str(getattr(params, name)))]
    for id, bias in params.biases:
        words += ["--logit-bias", f"{id}-inf" if bias == -math.inf else f"{id}{bias:+}"]
    return words


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*|\.\d+|inf))", text)
    if found is None or found[2] == "+inf":
        raise argparse.ArgumentTypeError(f"must be ID+BIAS or ID-BIAS (15043-1, 15043-inf): found {text!r:.80}")
    return int(found[1]), float(found[2])
