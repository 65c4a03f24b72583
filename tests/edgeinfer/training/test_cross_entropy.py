"""The cross-entropy with the target's probabilities against torch's own, over more positions than are made at once."""

import importlib.util

import pytest
from parts import missing

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
import torch
from torch.nn import functional

from edgeinfer.training.cross_entropy import soft_cross_entropy

N_STEPS, N_EMBD, N_DRAFT = 2, 16, 40
EACH_STEP = torch.tensor([1.0, 0.3])


def some_rows(n: int) -> tuple[torch.Tensor, ...]:
    """(rows, expected, output, target_output)."""
    generator = torch.Generator().manual_seed(n)
    shapes = (N_STEPS, n, N_EMBD), (n, N_EMBD), (N_DRAFT, N_EMBD), (N_DRAFT, N_EMBD)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def of_torch(rows: torch.Tensor, expected: torch.Tensor, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same losses by torch.nn.functional.cross_entropy, (n_steps,)."""
    probabilities = (expected @ target.T).softmax(dim=-1)
    return torch.stack([functional.cross_entropy(each @ output.T, probabilities) for each in rows])


@pytest.mark.parametrize("n", [1, 256, 600])
def test_losses_and_gradients_are_those_of_torch(n: int) -> None:
    rows, *others = some_rows(n)
    results = []
    for losses_of in (soft_cross_entropy, of_torch):
        own = rows.clone().requires_grad_()
        losses = losses_of(own, *others)
        (losses * EACH_STEP).sum().backward()
        assert own.grad is not None
        results.append((losses.detach(), own.grad))
    (losses, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients, expected_gradients)
    assert float(gradients.abs().max()) > 1e-4


def test_products_are_in_the_type_of_autocast() -> None:
    rows, *others = some_rows(300)
    rows.requires_grad_()
    exact = soft_cross_entropy(rows, *others)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = soft_cross_entropy(rows, *others)
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert rows.grad is not None
    assert rows.grad.dtype == torch.float32
    assert not torch.equal(losses, exact)
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0.02)


def test_no_positions_have_no_loss() -> None:
    rows, *others = some_rows(0)
    rows.requires_grad_()
    losses = soft_cross_entropy(rows, *others)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0]
