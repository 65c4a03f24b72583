"""Weights rounded as the file will have them, in torch, so that a head is trained with the rounding."""

from __future__ import annotations

import torch

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.gguf import GGMLType

SCALE_STEPS = [0.82 + 0.02 * i for i in range(13)]  # as in models/formats/q4_0.h


@torch.no_grad()
def rounded(weights: torch.Tensor, type: GGMLType) -> torch.Tensor:
    """Weights (..., n_in) as formats.quantize and dequantize would return them: the same shape, float32, same device.

    n_in is a multiple of the block. Where two scales fit equally well, this may take the other one.

    Raises UnsupportedModel for types other than F16, Q8_0 and Q4_0.
    """
    if type == GGMLType.F16:
        return _half(weights)
    if type not in (GGMLType.Q8_0, GGMLType.Q4_0):
        raise UnsupportedModel(f"weights can be trained as F16, Q8_0 or Q4_0: found {type.name}")
    blocks = weights.reshape(-1, type.block_elements)
    of_blocks = _q8_0(blocks) if type == GGMLType.Q8_0 else _q4_0(blocks)
    return of_blocks.view_as(weights)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    places = (blocks * (1 / scale)).nan_to_num_(posinf=0, neginf=0).double()  # in which adding 0.5 is exact
    return places.abs().add_(0.5).floor_().copysign_(places).float().mul_(_half(scale))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True)) / -8
    found, least = torch.zeros_like(blocks), torch.full_like(largest, torch.inf)
    for step in SCALE_STEPS:
        tried = _with_codes(blocks, _half(largest * step), -8, 7)
        error = (tried - blocks).square().sum(dim=1, keepdim=True)
        found, least = torch.where(error < least, tried, found), torch.minimum(error, least)
    return found


def _with_codes(blocks: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Blocks (n, k) as codes times scale (n, 1)."""
    return (blocks / scale).nan_to_num_().round_().clamp_(least, most).mul_(scale)
