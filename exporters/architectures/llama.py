"""Llama 1 to 3 and what copies them; Mistral 7B, whose window GGUF cannot say; Mixtral, which is Llama with experts."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import BIASES, ExpertNames, Keys, Recipe
from edgeinfer.exporters.conversion.windows import context_within_window


def _context(model: Model) -> Keys:
    return {"context_length": context_within_window(model)}


LLAMA = Recipe(
    name="llama",
    classes=("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"),
    model_types=("llama",),
    fixed={"hidden_act": (None, "silu")},
    optional=BIASES,
    interleaved=True,
    rope_kinds=frozenset({"llama3"}),
)
MISTRAL = replace(
    LLAMA,
    classes=("MistralForCausalLM", "MistralModel"),
    model_types=("mistral",),
    defaults={"sliding_window": 4096},
    reads=frozenset({"sliding_window"}),
    keys=_context,
)
MIXTRAL = replace(
    MISTRAL,
    classes=("MixtralForCausalLM",),
    model_types=("mixtral",),
    defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    experts=ExpertNames(
        module="block_sparse_moe.experts",
        matrices={"w1": "gate", "w3": "up", "w2": "down"},
        router="block_sparse_moe.gate.weight",
        count=("num_local_experts", "num_experts"),
    ),
)
RECIPES = (LLAMA, MISTRAL, MIXTRAL)
