"""Draft candidates: which tokens of a draft model's logits become nodes, and their buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgeinfer.backends.native import top_k
from edgeinfer.common.errors import NumericalError
from edgeinfer.common.types import Logits

# Buckets: the class of the draft model's probability, for greedy requests and for sampled ones; the same for second
# candidates.
_N_CLASSES = 10
_SAMPLED, _SECOND = _N_CLASSES, 2 * _N_CLASSES
_UNSURE = 0.8  # below this probability of the first candidate others become nodes too


def draft_candidates(logits: Logits, drawn: int | None, is_greedy: bool, n: int) -> list[tuple[int, float, int]]:
    """(index in logits, probability, bucket) of the sampled token, and of the most probable others if it is unsure.

    logits: (n_vocab,).  drawn: None where no token was sampled; the most probable one is then the first.  n: most
    candidates. Raises NumericalError for logits that are not finite.
    """
    (best, p_best), *_ = found = top_k(logits, n)
    if math.isnan(p_best):
        raise NumericalError("a drafter's logits must be numbers: found others")
    if drawn is None and not is_greedy:
        return [(id, p, _SECOND + _SAMPLED + class_of(p)) for id, p in (found if p_best < _UNSURE else found[:1])]
    drawn = best if drawn is None else drawn
    p = next((of_id for id, of_id in found if id == drawn), None)
    if p is None:
        p = p_best * math.exp(min(0.0, float(logits[drawn] - logits[best])))
    others = [(id, of_id) for id, of_id in found if id != drawn]
    return _with_buckets([(drawn, p), *others[: n - 1]], 0 if is_greedy else _SAMPLED)


def greedy_candidates(found: Sequence[tuple[int, float]]) -> list[tuple[int, float, int]]:
    """The same for greedy requests, from the top-k tokens and their probabilities, most probable first."""
    return _with_buckets(found, 0)


def _with_buckets(found: Sequence[tuple[int, float]], bucket: int) -> list[tuple[int, float, int]]:
    """The first candidate and, if it is unsure, the others, each with its bucket."""
    (first, p), *others = found
    rest = [(id, of_id, _SECOND + bucket + class_of(of_id)) for id, of_id in others] if p < _UNSURE else []
    return [(first, p, bucket + class_of(p)), *rest]


def class_of(p: float) -> int:
    """Class of a probability, 0.._N_CLASSES - 1."""
    return min(int(_N_CLASSES * p), _N_CLASSES - 1)
