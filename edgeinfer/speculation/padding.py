"""Verify passes that are padded with dummy tokens, to measure their cost again.

Costs are corrected by passes that are made anyway. A size that the policy never chooses, because its cost was measured
too high while the machine was busy, would keep that cost for ever.
"""

from __future__ import annotations

from edgeinfer.speculation.cost import CostModel

_MAX_IDLE, _BACKOFF = 32, 4  # steps without a draft before a doubtful cost is measured again; growth of that number
_EVERY = 8  # steps, after that number, in which costs are asked whether they are doubtful: it takes time
_IDLE_SIZES = (2, 4)  # tokens of the passes that are then padded
# Steps without a long pass before one is padded to that size, and the most of them as they grow.
_LONG, _MAX_SHORT, _LIMIT_SHORT = 8, 64, 4096


class PassPadding:
    """Decides how many dummy tokens a verify pass gets."""

    def __init__(self) -> None:
        self._n_idle, self._max_idle = 0, _MAX_IDLE
        self._sizes: list[int] = []  # to be measured again
        self._n_short, self._max_short = 0, _MAX_SHORT

    def n_tokens(self, n_nodes: int, max_nodes: int, costs: CostModel) -> int:
        """Dummy tokens for the next pass, which verifies n_nodes of at most max_nodes."""
        if not costs.may_be_padded:
            return 0
        self._n_idle = 0 if n_nodes else self._n_idle + 1
        self._n_short = 0 if n_nodes + 1 >= _LONG else self._n_short + 1
        if self._n_short >= self._max_short and max_nodes + 1 >= _LONG:
            self._n_short, self._max_short = 0, min(_BACKOFF * self._max_short, _LIMIT_SHORT)
            return _LONG - 1 - n_nodes
        if self._n_idle >= self._max_idle and self._n_idle % _EVERY == 0 and costs.is_doubtful:
            self._n_idle, self._max_idle, self._sizes = 0, _BACKOFF * self._max_idle, list(_IDLE_SIZES)
        if n_nodes or not self._sizes or self._sizes[0] > max_nodes + 1:
            return 0
        return self._sizes.pop(0) - 1
