"""Draft tokens whose experts would have to be read from disk, as far as that can be told before the pass.

A token mostly needs experts that it needed before (as in Fate, Fang et al., arXiv:2502.12224, for the first layer). How
often that is right is measured with each pass; where it is not, nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import PassHook, chained
from edgeinfer.speculation.expert_cost import ExpertCostModel
from edgeinfer.speculation.policy import VerifyTree

_FEW = 8  # tokens of a pass
_TABLE_BYTES = 4 << 20  # at most
_SLOT_BYTES = 160  # of a token and its place, in a dict
_MOST_TOKENS = 4096
_MOST_ROWS, _EVERY = 32, 4  # of passes that say how good predictions are; of those of one row, every fourth one does
_PRECISION = 0.5  # of predictions, above which they are used
_LEAST_PREDICTED = 64.0  # absent experts, before precision says something
_FORGET = 0.98  # of these counts, with each pass


def _n_tokens(n_each: int) -> int:
    return max(64, min(_MOST_TOKENS, _TABLE_BYTES // (2 * n_each)))


class RoutedModel(Protocol):
    """What a forecast needs of a model with an expert cache."""

    pass_hook: PassHook | None

    def routing(self) -> NDArray[np.int32]:
        """The experts of the last pass, (n_layers, n_rows, n_used); -1 for none."""
        ...


class ExpertTable:
    """The experts that tokens used last, in all layers.

    n_layers: with experts.  The tokens that came last are kept, as many as fit into some MiB.
    """

    def __init__(self, n_layers: int, n_used: int) -> None:
        self.n_each = n_layers * n_used
        self._experts = np.zeros((_n_tokens(self.n_each), self.n_each), np.uint16)
        self._slots: dict[int, int] = {}  # by token, the latest last

    def learn(self, tokens: Sequence[int], experts: NDArray[np.uint16]) -> None:
        """Tokens of a pass, and the (n, n_layers * n_used) experts of each."""
        slots = self._slots
        tokens, experts = tokens[-len(self._experts) :], experts[-len(self._experts) :]
        places = []
        for token in tokens:
            slot = slots.pop(token, None)
            if slot is None:
                slot = len(slots) if len(slots) < len(self._experts) else slots.pop(next(iter(slots)))
            slots[token] = slot
            places.append(slot)
        self._experts[places] = experts

    def experts(self, tokens: Sequence[int]) -> tuple[list[int], NDArray[np.uint16]]:
        """(places of the tokens that are known, (n_known, n_layers * n_used) experts of these)."""
        known = [(i, slot) for i, token in enumerate(tokens) if (slot := self._slots.get(token)) is not None]
        return [i for i, _ in known], self._experts[[slot for _, slot in known]]


class ExpertForecast:
    """Watches the passes of a model, and leaves out draft nodes that the pass would wait for more than they bring.

    presence: (n_layers, n_experts) of the model's layers, 1 for experts in memory.
    """

    def __init__(
        self, model: RoutedModel, presence: Callable[[], NDArray[np.uint8]], layers: Sequence[int], n_used: int
    ) -> None:
        self._model, self._presence = model, presence
        self._layers = np.array(layers)
        self._table = ExpertTable(len(layers), n_used)
        self._of_layer = np.repeat(np.arange(len(layers)), n_used)  # layer of each number of a table's row
        self._predicted = self._right = 0.0
        self._n_passes = 0
        model.pass_hook = chained(model.pass_hook, self.run)

    @staticmethod
    def memory(n_each: int = 0) -> int:
        """Bytes of its table, full. n_each: experts of a token in all layers; 0 for the most that a table takes."""
        return 2 * n_each * _n_tokens(n_each) + _SLOT_BYTES * _n_tokens(n_each) if n_each else _TABLE_BYTES

    @property
    def precision(self) -> float:
        """Share of the experts predicted for a token that were absent and that it needed."""
        return self._right / self._predicted if self._predicted else 0.0

    @property
    def is_trusted(self) -> bool:
        """Whether predictions are good enough to be used."""
        return self._predicted >= _LEAST_PREDICTED and self.precision >= _PRECISION

    def run(self, tokens: Sequence[int], forward: Callable[[], bool | None]) -> bool | None:
        """Run a pass of these tokens, and learn from it if it was whole; see backends.base.PassHook."""
        self._n_passes += 1
        is_measured = len(tokens) <= _MOST_ROWS and (len(tokens) > 1 or self._n_passes % _EVERY == 0)
        absent = self._absent() if is_measured else None
        is_whole = forward()
        if is_whole:
            routing = self._model.routing()[self._layers]
            n_rows = routing.shape[1]
            used = routing.transpose(1, 0, 2).reshape(n_rows, -1).clip(0).astype(np.uint16)
            of_rows = tokens[len(tokens) - n_rows :]
            if absent is not None:
                self._measure(of_rows, used, absent)
            self._table.learn(of_rows, used)
        return is_whole

    def kept(
        self,
        first_token: int,
        tree: VerifyTree,
        order: Sequence[int],
        path_probabilities: Sequence[float],
        costs: ExpertCostModel,
        n_past: int,
    ) -> list[int]:
        """The nodes of a tree that are worth their wait, in that order, parents first; without descendants of others.

        A node that is accepted saves a pass, without what that would wait for the node's experts; one that is rejected
        waited for nothing.
        """
        one_ms = costs.without_waits(1, n_past)
        more_ms = (costs.without_waits(_FEW, n_past) - one_ms) / (_FEW - 1)  # of a further token
        known, experts = self._table.experts([first_token, *(tree.tokens[node] for node in order)])
        rows = dict(zip(known, experts, strict=True))
        absent = self._absent()
        if (of_first := rows.get(0)) is not None:
            absent[self._of_layer, of_first] = False
        a_number = self.precision * costs.wait_ms / self._table.n_each  # expected wait for one that is predicted
        kept: list[int] = []
        left_out: set[int] = set()
        for i, node in enumerate(order, start=1):
            if tree.parents[node] in left_out:
                left_out.add(node)
                continue
            row = rows.get(i)
            if row is not None:
                wait = a_number * int(absent[self._of_layer, row].sum())
                p = path_probabilities[node]
                if wait and (1.0 - p) * wait + more_ms > p * one_ms:
                    left_out.add(node)
                    continue
                absent[self._of_layer, row] = False
            kept.append(node)
        return kept

    def _absent(self) -> NDArray[np.bool_]:
        absent: NDArray[np.bool_] = self._presence()[self._layers] == 0
        return absent

    def _measure(self, tokens: Sequence[int], used: NDArray[np.uint16], absent: NDArray[np.bool_]) -> None:
        """Compare predictions of absent experts with what a pass needed. absent: before it."""
        known, predicted = self._table.experts(tokens)
        if not known:
            return
        is_absent = absent[self._of_layer, predicted]
        n_used = self._table.n_each // len(self._layers)
        shape = len(known), len(self._layers), n_used
        is_used = (predicted.reshape(shape)[..., None] == used[known].reshape(shape)[..., None, :]).any(-1)
        self._predicted = _FORGET * self._predicted + float(is_absent.sum())
        self._right = _FORGET * self._right + float((is_absent & is_used.reshape(is_absent.shape)).sum())
