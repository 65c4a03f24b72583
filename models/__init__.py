"""Architectures: one file each, named as GGUF's `general.architecture`, holding one `ARCHITECTURE`."""

from __future__ import annotations

import importlib
import pkgutil

from edgeinfer.errors import UnsupportedModel
from edgeinfer.gguf import ModelFile
from edgeinfer.models.spec import Architecture, LayerTensors, ModelSpec, RopeSpec

__all__ = ["Architecture", "LayerTensors", "ModelSpec", "RopeSpec", "read_spec", "supported_architectures"]


def supported_architectures() -> list[str]:
    """Names of the architectures that have a file here, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "spec")


def read_spec(file: ModelFile) -> ModelSpec:
    """Spec of a model file. Raises UnsupportedModel if its architecture is unknown or its tensors do not fit."""
    name = file.metadata.get("general.architecture")
    if name not in supported_architectures():
        known = ", ".join(supported_architectures())
        raise UnsupportedModel(f"{file.path}: architecture {name!r:.80} is not supported; supported: {known}")
    architecture: Architecture = importlib.import_module(f"edgeinfer.models.{name}").ARCHITECTURE
    return architecture.read(file)
