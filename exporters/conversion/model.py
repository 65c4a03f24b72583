"""A checkpoint that is being converted: its sizes, its tensors, and what the user should know."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import NoReturn

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint import Checkpoint, Config, Rope
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.recipe import Recipe
from edgeinfer.exporters.source import Floats, SourceTensor

MOST_LAYERS = 4096
MOST_EXPERTS = 4096


class Model:
    """The language model of a checkpoint, with the recipe for it.

    config: with what transformers takes for missing keys.  notes: sentences for the user.  taken: names of tensors that
    have a place in the GGUF file, or none on purpose.
    """

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint) -> None:
        self.recipe = recipe
        self.checkpoint = checkpoint
        found = self.given = _spelled(recipe, checkpoint.config)
        absent = _nulls(checkpoint) - {"rope_parameters"}  # transformers takes no default for the others
        absent |= {"rope_parameters"} if "rope_scaling" in found else set()  # its old name
        defaults = {key: value for key, value in recipe.defaults.items() if key not in absent}
        self.config = Config({**defaults, **found.values}, found.path, found.prefix)
        self.notes: list[str] = []
        self.taken: set[str] = set()
        self._read: set[str] = set()  # since the last release

    # ---- sizes -----------------------------------------------------------------------------------------------------

    @cached_property
    def n_layers(self) -> int:
        """Layers that the model's own text depends on."""
        if "num_hidden_layers" not in self.config and "layers_block_type" in self.config:
            return len(self.config.texts("layers_block_type"))
        return self.config.integer("num_hidden_layers", most=MOST_LAYERS)

    @cached_property
    def n_embd(self) -> int:
        """Numbers in the residual stream."""
        return self.config.integer("hidden_size", most=1 << 20)

    @cached_property
    def n_heads(self) -> int:
        """Heads of queries."""
        return self.config.integer("num_attention_heads", most=1 << 14)

    @cached_property
    def n_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.config.integer("num_key_value_heads", self.n_heads, most=self.n_heads)

    @cached_property
    def head_dim(self) -> int:
        """Numbers in a head."""
        found = self.config.integer("head_dim", max(1, self.n_embd // self.n_heads), most=1 << 14)
        if found % 2:
            self.refuse("head_dim", f"must be even: found {found}")
        return found

    @cached_property
    def n_ctx(self) -> int:
        """The longest context that it was trained for."""
        return self.config.integer("max_position_embeddings")

    @cached_property
    def n_experts(self) -> int:
        """Experts of a layer that has some, 0 in a model without."""
        names = self.recipe.experts
        if names is None:
            return 0
        key = next((key for key in names.count if key in self.config), names.count[0])
        if names.may_lack and self.config.get(key) is None:
            return 0
        return self.config.integer(key, most=MOST_EXPERTS)

    @cached_property
    def blocks(self) -> list[str]:
        """What stands before the names of each block: of the layers, then of those that draft (MTP)."""
        return [*(f"model.layers.{layer}." for layer in range(self.n_layers)), *self.recipe.nextn(self)]

    def is_recurrent(self, block: int) -> bool:
        """Whether a block has the tensors of a recurrence in place of attention."""
        return any(self.blocks[block] + name in self for name in self.recipe.recurrent)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.n_experts > 0 and self.recipe.has_experts(self, layer)

    # ---- rotation and windows --------------------------------------------------------------------------------------

    @cached_property
    def rope(self) -> Rope:
        """The rotation in layers that see everything."""
        return self.config.rope("full_attention")

    @cached_property
    def n_rotated(self) -> int:
        """Numbers of a head that are rotated."""
        return int(self.head_dim * self.rope.share)

    def layer_types(self) -> list[str] | None:
        """What config.json calls each layer, None where it does not say it."""
        return self.config.texts("layer_types", self.n_layers) if "layer_types" in self.config else None

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def take(self, name: str) -> SourceTensor:
        """A tensor of the checkpoint, which then has a place. Raises ModelFileError if it is missing or no floats."""
        self.taken.add(name)
        tensor = rows.of_checkpoint(self.checkpoint, name)
        return replace(tensor, rows=partial(self._rows, name))

    def release(self) -> None:
        """Give back what reading tensors keeps in memory, such as the scales of quantised ones."""
        names, self._read = self._read, set()
        for name in names:
            self.checkpoint.release(name)

    def _rows(self, name: str, first: int, last: int) -> Floats:
        self._read.add(name)
        return self.checkpoint.rows(name, first, last)

    # ---- messages --------------------------------------------------------------------------------------------------

    def note(self, sentence: str) -> None:
        """Say something to the user."""
        self.notes.append(sentence)

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises UnsupportedModel about a key of config.json."""
        raise UnsupportedModel(f"{self.config.path}: {self.config.prefix}{key} {reason}")


def _spelled(recipe: Recipe, config: Config) -> Config:
    """A config with the usual spellings beside its own."""
    usual = {ours: config.get(theirs) for theirs, ours in recipe.spellings.items() if theirs in config}
    return Config({**config.values, **usual}, config.path, config.prefix)


def _nulls(checkpoint: Checkpoint) -> set[str]:
    """Keys of config.json that are there, and null."""
    whole = checkpoint.folder.json("config.json")
    parts = [whole, *(part for part in whole.values() if isinstance(part, dict))]
    return {key for part in parts for key, value in part.items() if value is None}
