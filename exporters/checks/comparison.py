"""The check of a written model: the same text as its source, or how far its probabilities are from the source's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer.common.errors import BudgetExceeded, ModelFileError, UnsupportedModel
from edgeinfer.exporters.calibration.running import Logits, greedy_tokens, logits_of, native_model
from edgeinfer.exporters.calibration.texts import check_tokens
from edgeinfer.exporters.divergence import distance
from edgeinfer.exporters.source import Source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models.gguf import ModelFile

N_GREEDY = 32
N_TEXT = 192  # tokens of the text behind whose each the two models are compared
_ENGINE = "the native engine"


@dataclass(frozen=True)
class Checked:
    """What a check showed.  sentence: for the user.  facts: for the manifest."""

    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def compare(source: Source, written: Path, is_lossless: bool) -> Checked:
    """Run a written file against its source.

    Raises NumericalError where the source or the file gives no numbers; ModelFileError where it is another model, which
    knows less of the source's text than one that knows nothing; UnsupportedModel and BudgetExceeded of running the
    models become words.
    """
    try:
        with model_file_of(source) as file, ModelFile.open(written) as other:
            return _same_text(file, other) if is_lossless else _distance_in_words(file, other)
    except (UnsupportedModel, BudgetExceeded) as error:
        return Checked(f"not run: {error}", {"checked": False})


def _same_text(source: ModelFile, written: ModelFile) -> Checked:
    tokens = check_tokens(source)[: N_TEXT - N_GREEDY]
    expected, found = (_greedy(file, tokens) for file in (source, written))
    n_equal = next((n for n, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), N_GREEDY)
    sentence = f"{n_equal} of {N_GREEDY} greedy tokens equal the source in {_ENGINE}"
    return Checked(sentence, {"checked": True, "greedy_tokens": N_GREEDY, "greedy_tokens_equal": n_equal})


def _greedy(file: ModelFile, tokens: list[int]) -> list[int]:
    with native_model(file, len(tokens) + N_GREEDY) as model:
        return greedy_tokens(model, [tokens], N_GREEDY)[0]


def _distance_in_words(source: ModelFile, written: ModelFile) -> Checked:
    tokens = check_tokens(source)[:N_TEXT]
    expected, found = (_logits(file, tokens) for file in (source, written))
    apart = distance(expected, found)
    if apart.divergence > (most := math.log(found.shape[-1])):
        raise ModelFileError(
            f"{written.path}: is another model than its source: KL {apart.divergence:.4f} nats a token, and one that "
            f"takes all {found.shape[-1]} tokens for equally likely has {most:.1f} at most; nothing was written"
        )
    facts = {"checked": True, "kl": round(apart.divergence, 6), "top_1_agreement": round(apart.agreement, 6)}
    return Checked(f"{apart.in_words(len(expected))} in {_ENGINE}", facts)


def _logits(file: ModelFile, tokens: list[int]) -> Logits:
    with native_model(file, len(tokens)) as model:
        return logits_of(model, tokens)
