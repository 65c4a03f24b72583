"""Granite 3 and 4 without experts: Llama with factors on embeddings, branches, attention and logits.

Granite 4 has one class for all its models: those whose layers all attend are here, granitehybrid.py has the others.
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import BIASES, Keys, Recipe
from edgeinfer.exporters.conversion.rows import part
from edgeinfer.exporters.source import SourceTensor

FACTORS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def factors(model: Model) -> Keys:
    """Keys of the four factors."""
    return {ours: model.config.number(theirs, 1.0) for theirs, ours in FACTORS.items()}


def _check_hybrid(model: Model) -> None:
    types = model.config.texts("layer_types", model.n_layers) if "layer_types" in model.config else []
    others = [layer for layer, kind in enumerate(types) if kind not in ("attention", "full_attention")]
    if others:
        found = f"{types[others[0]]} in layer {others[0]}"
        model.refuse("layer_types", f"must be attention in each layer, as the tensors are: found {found}")


def _hybrid_keys(model: Model) -> Keys:
    rotated = model.config.choice("position_embedding_type", ("rope", "nope"), "rope") == "rope"
    return {
        **factors(model),
        "feed_forward_length": model.config.integer("shared_intermediate_size"),
        "rope.scaling.finetuned": rotated,  # here it switches the rotation
    }


def shared_networks(model: Model) -> list[SourceTensor]:
    """The shared network is the only one; its gate stands above its up."""
    found = []
    for layer in range(model.n_layers):
        module, ours = f"model.layers.{layer}.shared_mlp", f"blk.{layer}.ffn_{{}}.weight"
        both, n = model.take(f"{module}.input_linear.weight"), model.config.integer("shared_intermediate_size")
        if both.shape != (2 * n, model.n_embd):
            model.checkpoint.refuse(both.name, f"must be {(2 * n, model.n_embd)}: found {both.shape}")
        down = model.take(f"{module}.output_linear.weight")
        parts = {"gate": part(both, 0, n), "up": part(both, n, 2 * n), "down": down}
        found += [replace(tensor, name=ours.format(kind)) for kind, tensor in parts.items()]
    return found


GRANITE = Recipe(
    name="granite",
    classes=("GraniteForCausalLM",),
    model_types=("granite",),
    fixed={"hidden_act": (None, "silu")},
    reads=frozenset(FACTORS),
    optional=BIASES,
    interleaved=True,
    rope_kinds=frozenset({"llama3"}),
    keys=factors,
)
HYBRID = replace(
    GRANITE,
    classes=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    fixed={"hidden_act": (None, "silu"), "num_local_experts": (0,), "normalization_function": (None, "rmsnorm")},
    reads=frozenset(FACTORS)
    | {"shared_intermediate_size", "position_embedding_type"}
    | {"num_experts_per_tok", "init_method"},
    dense={},
    special=shared_networks,
    check=_check_hybrid,
    keys=_hybrid_keys,
)
RECIPES = (GRANITE,)
