"""The check of a written model: the same text as its source, or how far its probabilities are from the source's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import BudgetExceeded, ModelFileError, UnsupportedModel
from edgeinfer.exporters.calibration.running import Logits, greedy_tokens, logits_of, native_model
from edgeinfer.exporters.calibration.texts import check_tokens
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


@dataclass(frozen=True)
class Distance:
    """Of two models on a text.

    kl: mean of KL(source || written) over tokens, in nats.  agreement: share of tokens behind which the most likely
    token is the same.
    """

    kl: float
    agreement: float
    n_tokens: int


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


def distance(source: Logits, written: Logits) -> Distance:
    """How far two models are apart.  source, written: (n, n_vocab) their logits behind the same tokens."""
    kl, same = 0.0, 0
    for p_logits, q_logits in zip(source, written, strict=True):
        log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
        kl += float(np.exp(log_p) @ (log_p - log_q))
        same += int(p_logits.argmax() == q_logits.argmax())
    return Distance(kl / len(source), same / len(source), len(source))


def _log_softmax(logits: Logits) -> np.ndarray[Any, np.dtype[np.float64]]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


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
    if apart.kl > (most := math.log(found.shape[-1])):
        raise ModelFileError(
            f"{written.path}: is another model than its source: KL {apart.kl:.4f} nats a token, and one that takes all "
            f"{found.shape[-1]} tokens for equally likely has {most:.1f} at most; nothing was written"
        )
    sentence = (
        f"KL {apart.kl:.4f} nats a token against the source, {apart.agreement:.1%} the same most likely token, over "
        f"{apart.n_tokens} tokens in {_ENGINE}"
    )
    return Checked(sentence, {"checked": True, "kl": round(apart.kl, 6), "top_1_agreement": round(apart.agreement, 6)})


def _logits(file: ModelFile, tokens: list[int]) -> Logits:
    with native_model(file, len(tokens)) as model:
        return logits_of(model, tokens)
