"""Cross-entropy with the target's probabilities, a few positions at a time.

Probabilities over a draft vocabulary are a thousand times as many numbers as the loss. For a whole batch, writing and
reading them would take most of the training time. So they are computed for a few positions at a time, while they fit
into the caches, and only the gradient is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def soft_cross_entropy(
    rows: torch.Tensor, expected: torch.Tensor, output: torch.Tensor, target_output: torch.Tensor
) -> torch.Tensor:
    """(n_steps,) means over positions of -sum(p log q), differentiable by rows; 0 where there are no positions.

    q: softmax of rows (n_steps, k, n_embd) times output (n_logits, n_embd).  p: that of expected (k, n_embd) times
    target_output (n_logits, n_embd). Products are in autocast's type where it is on, all else in float32.
    """
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    losses: torch.Tensor = _SoftCrossEntropy.apply(
        rows, *(each.to(dtype) for each in (expected, output, target_output))
    )
    return losses


def _n_at_once(device: torch.device) -> int:
    """Positions whose probabilities are computed together: as many as fit into caches, or keep a GPU busy."""
    return 256 if device.type == "cpu" else 8192


class _SoftCrossEntropy(torch.autograd.Function):
    """The loss and, already in the forward pass, its gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, expected: torch.Tensor, output: torch.Tensor, target_output: torch.Tensor
    ) -> torch.Tensor:
        n_steps, n, _ = rows.shape
        losses, gradients = rows.new_zeros(n_steps), torch.zeros_like(rows)
        at_once = _n_at_once(rows.device)
        for first in range(0, n, at_once):
            at = slice(first, first + at_once)
            probabilities = (expected[at] @ target_output.T).float().softmax(dim=-1)
            for step in range(n_steps):
                log_own = (rows[step, at].to(output.dtype) @ output.T).float().log_softmax(dim=-1)
                losses[step] -= (probabilities * log_own).sum()
                if ctx.needs_input_grad[0]:
                    gradients[step, at] = ((log_own.exp_() - probabilities).to(output.dtype) @ output).to(rows.dtype)
        ctx.save_for_backward(gradients / max(1, n))
        return losses / max(1, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * weights[:, None, None], None, None, None
