"""Nemotron-3 (NVIDIA 2025, arXiv:2512.20848): nemotron_h with experts in place of its networks.

The block behind the layers that drafts is attention and experts, and ends in a layer norm.
"""

from dataclasses import replace

from edgeinfer.models.architectures import nemotron_h
from edgeinfer.models.expert_reader import ExpertRecipe

ARCHITECTURE = replace(
    nemotron_h.ARCHITECTURE,
    name="nemotron_h_moe",
    skips_nextn=True,
    has_nextn=True,
    nextn_layer=nemotron_h.nextn_layer,
    experts=ExpertRecipe(
        n_ff="own",
        n_ff_shared="length or none",
        router_function="sigmoid",
        is_normalised=True,
        activation="relu2",
        is_plain=True,
        required=frozenset({"selection_bias"}),
        reads=frozenset({"expert_weights_norm", "expert_weights_scale"}),
    ),
)
