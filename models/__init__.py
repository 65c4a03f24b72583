"""Reading model files: tensors, tokenizer, chat template and the layers of a model. Nothing here runs a model."""

from __future__ import annotations

from edgeinfer.models.architectures import read_draft_spec, read_spec, supported_architectures
from edgeinfer.models.reader import Architecture
from edgeinfer.models.rope import query_factors
from edgeinfer.models.spec import (
    Activation,
    Attention,
    Block,
    Dense,
    ExpertRows,
    Experts,
    ExpertsRef,
    FeedForward,
    Layer,
    LongRope,
    Mixer,
    ModelSizes,
    ModelSpec,
    QueryTemperature,
    RopeSpec,
    RouterFunction,
    TensorRef,
    TensorRows,
    Weight,
    attention_of,
    check_blocks,
    dense_of,
)

__all__ = [
    "Activation",
    "Architecture",
    "Attention",
    "Block",
    "Dense",
    "ExpertRows",
    "Experts",
    "ExpertsRef",
    "FeedForward",
    "Layer",
    "LongRope",
    "Mixer",
    "ModelSizes",
    "ModelSpec",
    "QueryTemperature",
    "RopeSpec",
    "RouterFunction",
    "TensorRef",
    "TensorRows",
    "Weight",
    "attention_of",
    "check_blocks",
    "dense_of",
    "query_factors",
    "read_draft_spec",
    "read_spec",
    "supported_architectures",
]
