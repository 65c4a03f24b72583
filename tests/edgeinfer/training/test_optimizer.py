"""The steps of Muon: along singular vectors, as large as AdamW's, and the same after a checkpoint."""

import importlib.util

import pytest
from parts import missing

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
import torch
from torch import nn

from edgeinfer.training.optimizer import WEIGHT_DECAY, Muon, OptimizerName, Optimizers, orthogonalized


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_a_matrix_keeps_its_singular_vectors_and_its_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = 7.0 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalized(matrix) @ v.T
    diagonal = found.diagonal()
    assert ((diagonal > 0.5) & (diagonal < 1.3))[values > 0.1 * values[0]].all()
    assert (found - torch.diag(diagonal)).abs().max() < 1e-4


@pytest.mark.parametrize("bfloat16", [False, True])
def test_steps_are_those_of_torchs_muon_as_far_as_bfloat16_goes(bfloat16: bool) -> None:
    start = torch.randn((32, 64), generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"momentum": 0.95, "nesterov": True, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = Muon([ours], 0.01, bfloat16), torch.optim.Muon([theirs], 0.01, **options)
    for step in range(5):
        gradient = torch.randn((32, 64), generator=torch.Generator().manual_seed(step + 1))
        for matrix, optimizer in zip((ours, theirs), optimizers, strict=True):
            matrix.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).detach()
    assert (ours - theirs).norm() < 0.05 * moved.norm()
    assert 0.1 < float(moved.square().mean().sqrt()) / (5 * 0.01 * 0.2) < 1.1


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_optimizers_go_on_from_their_states(name: OptimizerName) -> None:
    def some() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 12), (12,), (12, 4))]

    def train(parameters: list[nn.Parameter], optimizers: Optimizers, steps: range) -> None:
        for step in steps:
            optimizers.zero_grad()
            sum(((each - step) ** 2).sum() for each in parameters).backward()  # type: ignore[union-attr]
            optimizers.step(0.01 * (step + 1))

    whole, first = some(), some()
    train(whole, Optimizers(whole, name, 0.01), range(6))
    optimizers = Optimizers(first, name, 0.01)
    train(first, optimizers, range(3))
    again, states = [nn.Parameter(each.detach().clone()) for each in first], optimizers.state_dicts()
    optimizers = Optimizers(again, name, 0.01)
    optimizers.load_state_dicts(states)
    train(again, optimizers, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole, first, strict=True))
