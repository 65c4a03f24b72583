"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and Mamba2 side by side in each block, then a network.

A block of the file is two layers: Mamba2 alone, and then attention, which reads what Mamba2 read, with the network. The
factors of the checkpoint are in the weights of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgeinfer.models.architectures.granitehybrid import mamba2_of
from edgeinfer.models.reader import BIASES, Architecture, Reader
from edgeinfer.models.spec import Layer, ModelSpec, NoFeedForward


def side_by_side(reader: Reader, spec: ModelSpec) -> ModelSpec:
    """The spec with the recurrence of each block before its attention. spec: with the others."""
    layers = tuple(layer for block in range(spec.n_layers) for layer in _layers(reader, spec, block))
    return replace(spec, n_layers=len(layers), layers=layers)


def _layers(reader: Reader, spec: ModelSpec, block: int) -> Iterator[Layer]:
    has_norm = f"blk.{block}.ssm_norm.weight" in reader.file.tensors
    yield Layer(mamba2_of(reader, block, has_norm), NoFeedForward(spec.n_embd))
    yield replace(spec.layers[block], is_beside=True)


ARCHITECTURE = Architecture(
    name="falcon-h1",
    rope_kind="halves",
    optional=BIASES,
    renamed={"ffn.norm": "ffn_norm"},  # without an ending, as llama.cpp writes it
    refine=side_by_side,
)
