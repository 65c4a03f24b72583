"""Optimisers: AdamW, or Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from edgeinfer.training.recipe import OptimizerName

WEIGHT_DECAY = 0.01
_BETAS = 0.9, 0.95
_MOMENTUM = 0.95
_N_ITERATIONS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
_ADAMW_SIZE = 0.2  # root mean square of an AdamW step at a learning rate of 1


class Muon(torch.optim.Optimizer):
    """Steps along the nearest semi-orthogonal matrix to the momentum (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/), as large as AdamW's at that learning rate (Liu et al.,
    arXiv:2502.16982).

    bfloat16: multiply in it, as torch.optim.Muon always does; it is slower on a CPU without instructions for it.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, bfloat16: bool = False) -> None:
        super().__init__(matrices, {"lr": lr})
        self._type = torch.bfloat16 if bfloat16 else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step, for the matrices that have gradients."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].mul_(_MOMENTUM).add_(matrix.grad)
                direction = orthogonalized(matrix.grad + _MOMENTUM * momentum, self._type)  # Nesterov's
                size = _ADAMW_SIZE * math.sqrt(max(matrix.shape))
                matrix.mul_(1.0 - group["lr"] * WEIGHT_DECAY).add_(direction, alpha=-group["lr"] * size)


def orthogonalized(matrix: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix with the singular vectors of this one, and singular values near 1: five Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = (x / (x.norm() + 1e-7)).to(dtype)
    for _ in range(_N_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


class Optimizers:
    """The optimizers of a head's parameters, in step."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], name: OptimizerName, rate: float, bfloat16: bool = False
    ) -> None:
        every = list(parameters)
        matrices = [each for each in every if each.ndim == 2 and name == "muon"]
        rest = [each for each in every if each.ndim != 2 or name != "muon"]
        adamw = torch.optim.AdamW(rest, lr=rate, betas=_BETAS, weight_decay=WEIGHT_DECAY)
        self._every: list[torch.optim.Optimizer] = [adamw, *([Muon(matrices, rate, bfloat16)] if matrices else [])]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for each in self._every:
            each.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        """One step by the gradients at a learning rate."""
        for each in self._every:
            for group in each.param_groups:
                group["lr"] = rate
            each.step()

    def state_dicts(self) -> list[dict[str, Any]]:
        """The states, for load_state_dicts."""
        return [each.state_dict() for each in self._every]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what state_dicts returned."""
        for each, state in zip(self._every, states, strict=True):
            each.load_state_dict(state)
