"""Expected tokens per millisecond of a drafter, from its acceptance rate, its draft cost and the verify cost.

verify_ms in all functions: (MAX_TOKENS + 1,) milliseconds of a pass by number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.cost import MAX_TOKENS


def chain_rate(acceptance_rate: float, draft_ms: float, verify_ms: Sequence[float], max_nodes: int) -> float:
    """Tokens per millisecond of chains of the best length; see best_chain."""
    return best_chain(acceptance_rate, draft_ms, verify_ms, max_nodes)[1]


def best_chain(
    acceptance_rate: float, draft_ms: float, verify_ms: Sequence[float], max_nodes: int
) -> tuple[int, float]:
    """Length and tokens per millisecond of the best chains that are drafted before each verify pass, draft_ms a token.

    acceptance_rate: of each token if the one before it is accepted (Leviathan et al., arXiv:2211.17192, section 3).
    """
    length, best, expected, path_probability = 0, 0.0, 1.0, 1.0
    for n in range(1, max_nodes + 1):
        path_probability *= acceptance_rate
        expected += path_probability
        rate = expected / (verify_ms[n + 1] + n * draft_ms)
        if rate <= best:
            break
        length, best = n, rate
    return length, best


def overlapped_rate(acceptance_rate: float, draft_ms: float, verify_ms: Sequence[float], max_nodes: int) -> float:
    """Tokens per millisecond of chains of the best length that are drafted while the target verifies.

    A step has a draft if the drafter guessed the text that it continues: one token after a step without a draft, all of
    the last draft and the token after it otherwise. The drafter must also keep up: a step with a draft consumes n + 1
    of its tokens, a step without one consumes 1.
    """
    plain_ms = verify_ms[1]
    best, expected = 1.0 / plain_ms, 1.0
    for n in range(1, max_nodes + 1 if draft_ms < plain_ms else 1):
        expected += acceptance_rate**n
        share = acceptance_rate / (1.0 + acceptance_rate - acceptance_rate ** (n + 1))  # of the steps that have a draft
        share = min(share, (plain_ms - draft_ms) / (n * draft_ms)) if draft_ms else share
        tokens = share * expected + 1.0 - share
        best = max(best, tokens / (share * verify_ms[n + 1] + (1.0 - share) * plain_ms))
    return best


def is_overlapping_faster(overlapped_ms: float, sequential_ms: float, verify_ms: Sequence[float]) -> bool:
    """Whether a draft model on a device of its own is faster than the same model on the target's cores.

    overlapped_ms, sequential_ms: cost of a draft token on each. The acceptance rate is the usual one.
    """
    acceptance_rate, max_nodes = AcceptanceTable().acceptance_rate, MAX_TOKENS - 1
    overlapped = overlapped_rate(acceptance_rate, overlapped_ms, verify_ms, max_nodes)
    return overlapped > chain_rate(acceptance_rate, sequential_ms, verify_ms, max_nodes)
