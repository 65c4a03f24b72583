"""Granite 3 with experts, and a shared one in some: gate and up of all experts are one tensor."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.exporters.architectures.granite import FACTORS, factors
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import BIASES, Keys, Recipe
from edgeinfer.exporters.conversion.rows import part
from edgeinfer.exporters.source import SourceTensor


def _keys(model: Model) -> Keys:
    n_shared = model.config.integer("shared_intermediate_size", 0, least=0)
    keys: Keys = {
        **factors(model),
        "expert_count": model.config.integer("num_local_experts"),
        "expert_used_count": model.config.integer("num_experts_per_tok"),
    }
    return keys | ({"expert_shared_feed_forward_length": n_shared} if n_shared else {})


def networks(model: Model) -> list[SourceTensor]:
    """The experts' matrices, (n_experts, 2 n_ff, n_embd), and the shared network's: gate above up."""
    found = []
    for layer in range(model.n_layers):
        kinds = {"block_sparse_moe": "exps"}
        if model.config.integer("shared_intermediate_size", 0, least=0):
            kinds["shared_mlp"] = "shexp"
        for module, kind in kinds.items():
            both = model.take(f"model.layers.{layer}.{module}.input_linear.weight")
            if len(both.shape) < 2 or both.shape[-2] % 2:
                model.checkpoint.refuse(both.name, f"must have an even number of rows: found {both.shape}")
            down, n = model.take(f"model.layers.{layer}.{module}.output_linear.weight"), both.shape[-2] // 2
            parts = {"gate": part(both, 0, n), "up": part(both, n, 2 * n), "down": down}
            ours = f"blk.{layer}.ffn_{{}}_{kind}.weight"
            found += [replace(tensor, name=ours.format(role)) for role, tensor in parts.items()]
    return found


RECIPES = (
    Recipe(
        name="granitemoe",
        classes=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        model_types=("granitemoe", "granitemoeshared"),
        fixed={"hidden_act": (None, "silu")},
        reads=frozenset(FACTORS) | {"shared_intermediate_size", "num_local_experts", "num_experts_per_tok"},
        optional=BIASES,
        dense={"block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight"},
        special=networks,
        interleaved=True,
        rope_kinds=frozenset({"llama3"}),
        keys=_keys,
    ),
)
