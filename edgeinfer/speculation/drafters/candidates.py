"""Which tokens of a drafter's own logits are worth a node, and how sure of them it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgeinfer.backends.native import top_k
from edgeinfer.errors import NumericalError
from edgeinfer.types import Logits

# Kinds: class of the drafted token's probability, for greedy texts and for drawn ones; the same for second choices.
_N_CLASSES = 10
_DRAWN, _SECOND = _N_CLASSES, 2 * _N_CLASSES
_UNSURE = 0.8  # below this probability other choices are drafted too


def draft_candidates(logits: Logits, drawn: int | None, is_greedy: bool, n: int) -> list[tuple[int, float, int]]:
    """(row of logits, probability, kind) of the token drawn and, where that was no clear case, of the likeliest others.

    logits: (n_vocab,).  drawn: None where it was not; the likeliest is then the first.  n: most of all. Raises
    NumericalError for logits that are no numbers.
    """
    (best, p_best), *_ = found = top_k(logits, n)
    if math.isnan(p_best):
        raise NumericalError("a drafter's logits must be numbers: found others")
    if drawn is None and not is_greedy:
        return [(id, p, _SECOND + _DRAWN + class_of(p)) for id, p in (found if p_best < _UNSURE else found[:1])]
    drawn = best if drawn is None else drawn
    p = next((of_id for id, of_id in found if id == drawn), None)
    if p is None:
        p = p_best * math.exp(min(0.0, float(logits[drawn] - logits[best])))
    others = [(id, of_id) for id, of_id in found if id != drawn]
    return _of_kinds([(drawn, p), *others[: n - 1]], 0 if is_greedy else _DRAWN)


def greedy_candidates(found: Sequence[tuple[int, float]]) -> list[tuple[int, float, int]]:
    """The same for greedy texts, of the likeliest tokens and their probabilities, likeliest first."""
    return _of_kinds(found, 0)


def _of_kinds(found: Sequence[tuple[int, float]], bucket: int) -> list[tuple[int, float, int]]:
    """With their kinds: the first and, where that was no clear case, the others."""
    (first, p), *others = found
    rest = [(id, of_id, _SECOND + bucket + class_of(of_id)) for id, of_id in others] if p < _UNSURE else []
    return [(first, p, bucket + class_of(p)), *rest]


def class_of(p: float) -> int:
    """Class of a probability, 0.._N_CLASSES - 1."""
    return min(int(_N_CLASSES * p), _N_CLASSES - 1)
