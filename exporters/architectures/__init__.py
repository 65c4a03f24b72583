"""Checkpoints of Hugging Face by architecture, one file for each `general.architecture` of GGUF, named like it.

Each has `RECIPES`: how the checkpoints of some classes of transformers become that architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.conversion.recipe import Recipe


def supported_model_types() -> list[str]:
    """Values of model_type in config.json that there are recipes for, sorted."""
    return sorted(name for name in _by_model_type() if "/" not in name)


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """The recipe for a checkpoint: by the class in config.json, else by model_type. Raises UnsupportedModel.

    A model with other parts beside the language model has two model_types, "whole/language".
    """
    config = checkpoint.config
    if checkpoint.quantization == "bitnet" or config.get("model_type") == "bitnet":
        raise UnsupportedModel(f"{checkpoint.path}: its matrices are ternary: use edgeinfer export --to ternary")
    outer, inner = (str(each.get("model_type")) for each in (config, config.language()))
    by_class, by_type = _by_class(), _by_model_type()
    found = by_class.get(config.architecture) or next(
        (by_type[name] for name in (f"{outer}/{inner}", outer, inner) if name in by_type), None
    )
    if found is None:
        known = ", ".join(supported_model_types())
        raise UnsupportedModel(
            f"{config.path}: architectures {shown(config.architecture)}, model_type {shown(outer)} are not supported; "
            f"supported: {known}"
        )
    return found.instead(checkpoint) or found


@cache
def all_recipes() -> list[Recipe]:
    """Every recipe, by the name of its file."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return [recipe for module in modules for recipe in module.RECIPES]


@cache
def _by_class() -> dict[str, Recipe]:
    return {name: recipe for recipe in all_recipes() for name in recipe.classes}


@cache
def _by_model_type() -> dict[str, Recipe]:
    return {name: recipe for recipe in all_recipes() for name in recipe.model_types}
