"""Reading model files: tensors, tokenizer, chat template and the layers of a model. Nothing here runs a model."""

from __future__ import annotations

from edgeinfer.models.architectures import read_spec, supported_architectures
from edgeinfer.models.reader import Architecture
from edgeinfer.models.rope import query_factors
from edgeinfer.models.spec import (
    Activation,
    AttentionSpec,
    CombineTensors,
    GateTensors,
    LayerTensors,
    LongRope,
    ModelSizes,
    ModelSpec,
    PairTensors,
    QueryTemperature,
    RopeSpec,
    TensorRef,
    TensorRows,
)

__all__ = [
    "Activation",
    "Architecture",
    "AttentionSpec",
    "CombineTensors",
    "GateTensors",
    "LayerTensors",
    "LongRope",
    "ModelSizes",
    "ModelSpec",
    "PairTensors",
    "QueryTemperature",
    "RopeSpec",
    "TensorRef",
    "TensorRows",
    "query_factors",
    "read_spec",
    "supported_architectures",
]
