"""Architectures: one file each, named as GGUF's `general.architecture`, holding one `ARCHITECTURE`."""

from __future__ import annotations

import importlib
import pkgutil

from edgeinfer.errors import UnsupportedModel
from edgeinfer.gguf import ModelFile
from edgeinfer.models.reader import Architecture
from edgeinfer.models.rope import query_factors
from edgeinfer.models.spec import (
    Activation,
    AttentionSpec,
    LayerTensors,
    LongRope,
    ModelSizes,
    ModelSpec,
    QueryTemperature,
    RopeSpec,
    TensorRef,
    TensorRows,
)

__all__ = [
    "Activation",
    "Architecture",
    "AttentionSpec",
    "LayerTensors",
    "LongRope",
    "ModelSizes",
    "ModelSpec",
    "QueryTemperature",
    "RopeSpec",
    "TensorRef",
    "TensorRows",
    "query_factors",
    "read_spec",
    "supported_architectures",
]

_SHARED = {"reader", "rope", "spec"}  # the files beside those of the architectures


def supported_architectures() -> list[str]:
    """Names of the architectures that have a file here, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)


def read_spec(file: ModelFile) -> ModelSpec:
    """Spec of a model file. Raises UnsupportedModel if its architecture is unknown or its tensors do not fit."""
    name = file.metadata.get("general.architecture")
    if name not in supported_architectures():
        known = ", ".join(supported_architectures())
        raise UnsupportedModel(f"{file.path}: architecture {name!r:.80} is not supported; supported: {known}")
    architecture: Architecture = importlib.import_module(f"edgeinfer.models.{name}").ARCHITECTURE
    return architecture.read(file)
