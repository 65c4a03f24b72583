"""The probability that a draft token is accepted, learnt for one drafter.

Learnt from every draft that was made, verified or not, by comparing it with the tokens that came: by bucket and depth
of a node, as Beta counts with exponential decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.common.overriding import override
from edgeinfer.speculation.cost import MAX_TOKENS
from edgeinfer.speculation.drafters.base import AcceptanceModel
from edgeinfer.speculation.tree import DraftTree

_PRIOR_WEIGHT = 10.0  # observations that the drafter's own estimate counts for
_DECAY = 0.98  # of all counts of a bucket with each new one
_CALIBRATION_WEIGHT, _CALIBRATION_DECAY = 2.0, 0.97  # prior count of accepted first nodes, and decay of those counted
_RATE, _RATE_WEIGHT = 0.85, 4.0  # prior acceptance rate of a chain, and the observations that it counts for
_N_DEPTHS = 4
_DEPTH = [min(depth, 2) if depth < 4 else 3 for depth in range(MAX_TOKENS + 1)]  # class of a depth


@dataclass(slots=True)
class ChainLengthRule:
    """Whether a chain whose tokens cost time to draft should be made longer.

    verify_ms: cost of a verify pass by number of tokens.  draft_ms: of one more draft token.  spent_ms: spent on drafts
    in this step already.  max_nodes: most tokens of the chain.
    """

    verify_ms: Sequence[float]
    draft_ms: float = 0.0
    spent_ms: float = 0.0
    max_nodes: int = MAX_TOKENS - 1

    def should_extend(self, path_probabilities: Sequence[float], next_probability: float) -> bool:
        """Whether one more token adds more expected tokens per millisecond than the chain has.

        path_probabilities: that the chain is accepted up to each of its tokens.  next_probability: of one more token,
        if all before it are accepted.
        """
        n = len(path_probabilities)
        if n >= self.max_nodes:
            return False
        expected, cost = 1.0 + sum(path_probabilities), self.verify_ms[n + 1] + self.spent_ms + n * self.draft_ms
        more_expected = (path_probabilities[-1] if path_probabilities else 1.0) * next_probability
        more_cost = self.verify_ms[n + 2] - self.verify_ms[n + 1] + self.draft_ms
        return more_expected * cost > expected * more_cost


class AcceptanceTable(AcceptanceModel):
    """The `AcceptanceModel` (edgeinfer.speculation.drafters.base) of one drafter.

    acceptance_rate: of its chains where that is known beforehand; see the property.
    """

    def __init__(self, acceptance_rate: float | None = None) -> None:
        self.min_probability = 0.0
        self.max_wait_ms = 0.0
        self.length_rule = ChainLengthRule([0.0] * (MAX_TOKENS + 1))
        # Accepted first nodes over those expected, in this request and the ones before: what corrects the estimates of
        # first nodes for the text at hand.
        self.calibration = 1.0
        self._counts: dict[int, tuple[float, float]] = {}  # accepted, all; both decayed
        self._first = 0.0, 0.0
        self._prior = _RATE_WEIGHT * (_RATE if acceptance_rate is None else acceptance_rate), _RATE_WEIGHT
        self._accepted, self._all = self._prior

    @override
    def probability(self, bucket: int, depth: int, p: float) -> float:
        counts = self._counts.get(bucket * _N_DEPTHS + _DEPTH[depth])
        if counts is not None:
            p = (_PRIOR_WEIGHT * p + counts[0]) / (_PRIOR_WEIGHT + counts[1])
        return p if depth else p * self.calibration

    @property
    def acceptance_rate(self) -> float:
        """Of the first chain of each draft, up to its first rejected token: accepted tokens over all of them."""
        return self._accepted / self._all

    @override
    def should_extend(self, path_probabilities: Sequence[float]) -> bool:
        return self.length_rule.should_extend(path_probabilities, self.acceptance_rate)

    def learn(self, tree: DraftTree, new_tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that came: each node whose parent was right is an observation."""
        self._learn_calibration(tree, new_tokens[0])
        self._learn_rate(tree, new_tokens)
        depths: list[int] = []  # of the nodes that were right, else -1
        counts = self._counts
        for token, parent, bucket in zip(tree.tokens, tree.parents, tree.buckets, strict=True):
            depth = 0 if parent < 0 else depths[parent] + 1 if depths[parent] >= 0 else -1
            if depth < 0 or depth >= len(new_tokens):
                depths.append(-1)
                continue
            is_right = token == new_tokens[depth]
            depths.append(depth if is_right else -1)
            key = bucket * _N_DEPTHS + _DEPTH[depth]
            before = counts.get(key, (0.0, 0.0))
            counts[key] = (_DECAY * before[0] + is_right, _DECAY * before[1] + 1.0)

    def _learn_rate(self, tree: DraftTree, new_tokens: Sequence[int]) -> None:
        """Count the nodes of a draft's first chain, which follows the first child of each node."""
        depth, parent_node = 0, -1
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent != parent_node:
                continue
            if depth >= len(new_tokens):
                return
            is_right = token == new_tokens[depth]
            self._accepted, self._all = _DECAY * self._accepted + is_right, _DECAY * self._all + 1.0
            if not is_right:
                return
            depth, parent_node = depth + 1, node

    def _learn_calibration(self, tree: DraftTree, token: int) -> None:
        """Compare the estimate for the first node with the token that came."""
        estimate = self.probability(tree.buckets[0], 0, tree.p[0]) / self.calibration
        accepted, expected = self._first
        accepted = _CALIBRATION_DECAY * accepted + (tree.tokens[0] == token)
        self._calibrate(accepted, _CALIBRATION_DECAY * expected + estimate)

    def start_request(self) -> None:
        """Forget half of the acceptance rate and the calibration: another text may suit a drafter better."""
        self._accepted, self._all = (self._accepted + self._prior[0]) / 2, (self._all + self._prior[1]) / 2
        self._calibrate(self._first[0] / 2, self._first[1] / 2)

    def _calibrate(self, accepted: float, expected: float) -> None:
        """Set the calibration from the numbers of first nodes that were accepted and that should have been."""
        self._first = accepted, expected
        self.calibration = min(1.0, (_CALIBRATION_WEIGHT + accepted) / (_CALIBRATION_WEIGHT + expected))
