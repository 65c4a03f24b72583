"""Predicts how the target will choose among candidates whose logits are known from an earlier pass.

The target's token is drawn with noise that follows from the seed, the place in the text and the token alone
(edgeinfer.sampling), after penalties that follow from the text. So a drafter that has candidates with their logits can
draw among them as the target will (STAND, arXiv:2506.04708), and the next best are the second choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from edgeinfer import _sampler
from edgeinfer.sampling import SamplingParams, stream_key
from edgeinfer.speculation.drafters.base import Context

_TINY = 1e-30
_BAN = -20.0  # a bias below which no token is likely enough for a draft


def foresight_of(context: Context) -> Foresight | None:
    """The foresight of a request whose choice depends on more than the logits; else None."""
    if context.params is None or context.is_plain:
        return None
    return Foresight(context.params, context.tokens)


class Foresight:
    """Predicts choices after one text. tokens: the text so far.

    It applies bias, repeat, frequency and presence penalties, top_p, min_p and temperature, but not DRY. The tokens of
    a draft path are added to the recent ones, and none of these is dropped for them.
    """

    def __init__(self, params: SamplingParams, tokens: Sequence[int]) -> None:
        self._params = params
        self._n_tokens = len(tokens)
        self._tokens = tokens
        self._biases = dict(params.biases)

    @cached_property
    def _recent(self) -> Counter[int]:
        """The tokens that penalties look at."""
        params, tokens = self._params, self._tokens
        last = params.penalty_last_n if params.has_penalties else 0
        return Counter(tokens if last < 0 else tokens[-last:] if last else ())

    def ranked(
        self, candidates: Sequence[tuple[int, float]], total: float, path: Sequence[int]
    ) -> list[tuple[int, float]]:
        """(id, probability) of candidates that may be chosen, first the one that the target will choose.

        candidates: ids and logits.  total: log of the sum of the exponentials of all logits.  path: draft tokens after
        the text. Probabilities are a softmax: of the scores with noise, over the candidates, in a sampled request; of
        the logits, over the whole vocabulary, in a greedy one.
        """
        params = self._params
        before = math.fsum(math.exp(logit - total) for _, logit in candidates)
        if params.changes_logits:
            changed = ((id, self._changed(id, logit, path)) for id, logit in candidates)
            candidates = [(id, logit) for id, logit in changed if logit > -math.inf]  # a bias may ban it
        if not candidates:
            return []
        weights = [math.exp(min(logit - total, 0.0)) for _, logit in candidates]
        whole = max(math.fsum(weights) + max(1.0 - before, 0.0), _TINY)
        shares = [weight / whole for weight in weights]
        if params.is_greedy:
            best = sorted(zip(candidates, shares, strict=True), key=lambda pair: -pair[0][1])
            return [(id, share) for (id, _), share in best]
        scored = self._scored(candidates, shares, path)
        exponentials = [math.exp(max(score - scored[0][0], -30.0)) for score, _ in scored]
        of_all = math.fsum(exponentials)
        return [(id, each / of_all) for (_, id), each in zip(scored, exponentials, strict=True)]

    def is_penalised(self, id: int, path: Sequence[int]) -> bool:
        """Whether penalties or a bias make a token less likely. path: as for `ranked`."""
        return self._biases.get(id, 0.0) < 0.0 or (self._params.has_penalties and (id in self._recent or id in path))

    def is_banned(self, id: int) -> bool:
        """Whether a bias bans a token."""
        return self._biases.get(id, 0.0) <= _BAN

    def _scored(
        self,
        candidates: Sequence[tuple[int, float]],
        shares: Sequence[float],
        path: Sequence[int],
    ) -> list[tuple[float, int]]:
        """(score, id) of the candidates that top_p and min_p leave, the largest score first."""
        params, temperature = self._params, max(self._params.temperature, _TINY)
        key = stream_key(params.seed or 0, self._n_tokens + len(path))
        least, cumulated = params.min_p * max(shares), 0.0
        scored: list[tuple[float, int]] = []
        for place in sorted(range(len(shares)), key=shares.__getitem__, reverse=True):
            if scored and (shares[place] < least or cumulated >= params.top_p):
                break
            cumulated += shares[place]
            id, logit = candidates[place]
            scored.append((logit / temperature + _sampler.noise(id, key), id))
        return sorted(scored, reverse=True)

    def _changed(self, id: int, logit: float, path: Sequence[int]) -> float:
        """A logit after bias and penalties."""
        params = self._params
        logit += self._biases.get(id, 0.0)
        n_seen = self._recent.get(id, 0) + (path.count(id) if params.has_penalties else 0)
        if n_seen:
            logit = logit * params.repeat_penalty if logit <= 0.0 else logit / params.repeat_penalty
            logit -= n_seen * params.frequency_penalty + params.presence_penalty
        return logit
